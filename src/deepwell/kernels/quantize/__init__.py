"""Quantization to FP8, MXFP8 and NVFP4, and transposition of FP8 operands."""
