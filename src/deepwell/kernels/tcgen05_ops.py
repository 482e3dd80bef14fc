"""Blackwell's tensor-core operations, `tcgen05.mma` with block scales, under one name: quantize, multiply, check.

On a CPU each is its reference; on a GPU `native_kernel(format, device)` says which candidate passed its self-check.
"""

from deepwell.kernels.gemm.block_scaled import ScaledOperand, block_scaled_gemm
from deepwell.kernels.gemm.native_candidates import native_kernel
from deepwell.kernels.quantize.microscaled import quantize_mxfp8, quantize_nvfp4

__all__ = ["ScaledOperand", "block_scaled_gemm", "native_kernel", "quantize_mxfp8", "quantize_nvfp4"]
