"""What a model is: one vocabulary of ops, and how a PyTorch module becomes it."""
