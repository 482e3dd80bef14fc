"""The page of a run: its record read back, and one object per panel."""
