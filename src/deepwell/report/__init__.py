"""HTML pages that people look at: self-contained, offline, no torch."""
