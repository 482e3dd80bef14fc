"""Attention in graphs: which pairs a mask opens, and what is given to the backend in its place."""
