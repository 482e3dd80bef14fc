"""Matrix products: FP8, block-scaled, emulated, and the candidates that compete for one."""
