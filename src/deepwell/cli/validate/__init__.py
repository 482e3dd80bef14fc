"""`deepwell validate`: checks that answer yes or no with measured numbers."""
