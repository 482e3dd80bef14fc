"""Rotary position embedding, with and without the norm of q and k."""
