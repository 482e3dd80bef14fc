"""The last look before a run: does it fit, how fast, what may go wrong."""
