"""Which file of csrc/ does today what a file of the original documents did."""

SOURCES = {
    "csrc/blackwell_gemm_kernel.cu": ("csrc/mxfp8.cu", "csrc/nvfp4.cu", "csrc/block_scaled.cuh"),
    "csrc/mxfp8_quantization.cu": ("src/deepwell/kernels/quantize/microscaled.py",),
    "csrc/cutlass_kernels.cpp": ("csrc/abi.cu", "csrc/deepwell_abi.h"),
    "csrc/python_bindings.cpp": ("src/deepwell/kernels/cutlass/library.py",),
}
