"""Training: the optimizer and what is built on it."""
