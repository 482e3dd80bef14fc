"""Softmax attention in a causal window, with sinks: what torch's SDPA takes only as a mask of all pairs."""
