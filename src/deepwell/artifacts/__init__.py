"""What outlives a run: checkpoints and exported engines."""
