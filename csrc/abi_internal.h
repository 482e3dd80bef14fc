// What the sources share among themselves and do not export.
#pragma once

#include <cuda_runtime.h>

// Remembers the error for dw_last_cuda_error; returns DW_CUDA_ERROR.
int dw_fail_cuda(cudaError_t error);
