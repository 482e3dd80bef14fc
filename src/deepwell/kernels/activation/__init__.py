"""SwiGLU, GEGLU and plain activations, with FP8 rows written in the same pass."""
