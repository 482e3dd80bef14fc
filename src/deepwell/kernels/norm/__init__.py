"""RMSNorm and LayerNorm, with residual addition and FP8 rows in the same pass."""
