"""Mixture-of-experts kernels: rows grouped by expert, grouped GEMMs, SwiGLU between them."""
