"""Triton functions that kernels share: FP8 conversion, packed bf16, random bits, stores."""
