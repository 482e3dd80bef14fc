"""`from deepwell import cutlass_kernels`: the CUTLASS kernels without an engine.

Where the library of `deepwell build` is not there, the same formats run by other kernels or by exact emulation.
"""

from deepwell.kernels.cutlass.library import library_for
from deepwell.kernels.cutlass_bindings import CutlassConfig, CutlassKernel, MicroscaleManager

quantize_mxfp8 = MicroscaleManager.quantize_mxfp8
dequantize_mxfp8 = MicroscaleManager.dequantize_mxfp8

__all__ = ["CutlassConfig", "CutlassKernel", "MicroscaleManager", "dequantize_mxfp8", "library_for", "quantize_mxfp8"]
