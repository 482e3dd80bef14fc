"""The ends of a model: embedding, head and cross entropy."""
