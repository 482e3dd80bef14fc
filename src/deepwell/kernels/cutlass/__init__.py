"""The CUTLASS kernels of csrc/: built, loaded and called."""
