"""A model as a graph without code: written from a capture, checked and run by the loader."""
