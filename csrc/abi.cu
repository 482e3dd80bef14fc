// The functions of every library: version, architecture, errors. Compiles in seconds, without CUTLASS.

#include <cuda_runtime.h>

#include "abi_internal.h"
#include "deepwell_abi.h"

#ifndef DW_ARCH
#error "define DW_ARCH, the architecture that this library is built for, e.g. -DDW_ARCH=sm_90a"
#endif
#define DW_STRING_(x) #x
#define DW_STRING(x) DW_STRING_(x)

namespace {
thread_local cudaError_t last_error = cudaSuccess;
}

int dw_fail_cuda(cudaError_t error) {
  last_error = error;
  return DW_CUDA_ERROR;
}

extern "C" {

int dw_abi_version(void) { return DW_ABI_VERSION; }

const char* dw_arch(void) { return DW_STRING(DW_ARCH); }

const char* dw_last_cuda_error(void) { return last_error == cudaSuccess ? "" : cudaGetErrorString(last_error); }

const char* dw_error_string(int error) {
  switch (error) {
    case DW_OK: return "ok";
    case DW_BAD_STRUCT: return "the caller's dw_gemm has another size than the library's";
    case DW_BAD_CONFIG: return "the kernel family has no such configuration";
    case DW_BAD_TYPE: return "the kernel family has no kernel for these element types";
    case DW_BAD_SHAPE: return "a size is negative, too large or no multiple of what the format needs";
    case DW_BAD_ALIGNMENT: return "a pointer or a row is not a multiple of 16 bytes";
    case DW_BAD_POINTER: return "a pointer that is needed is null";
    case DW_SMALL_WORKSPACE: return "the workspace is smaller than the kernel needs";
    case DW_NOT_IMPLEMENTED: return "this configuration cannot run this problem";
    case DW_CUDA_ERROR: return "CUDA reported an error";
    default: return "unknown error code";
  }
}

}  // extern "C"
