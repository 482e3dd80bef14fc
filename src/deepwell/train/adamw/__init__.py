"""AdamW over all tensors of a model in one pass, and the optimizer around it."""
