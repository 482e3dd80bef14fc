"""What is timed and compared: the race's models and peers, whole training steps, and accuracy in pairs of runs."""
