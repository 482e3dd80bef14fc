/* The C ABI between Deepwell (ctypes) and its CUTLASS kernels: plain structs and functions, no C++ across the border.
 *
 * A library is built for one architecture and exports dw_abi_version, dw_arch, dw_error_string and, for each kernel
 * family F that the architecture has:
 *
 *     int         dw_F_num_configs(void)          tile configurations of the family
 *     const char* dw_F_config_name(int config)    e.g. "128x256x128_2x1_cooperative"; NULL past the end
 *     int64_t     dw_F_workspace(const dw_gemm*)  bytes that dw_F wants at `workspace`; negative: minus a DW_ error
 *     int         dw_F(const dw_gemm*)            launches on `stream` and returns; DW_OK or another DW_ error
 *
 * Families: fp8_rowwise, fp8_blockwise (sm_90a); mxfp8, nvfp4 (sm_100a).
 * All compute D[m, n] = act(alpha * sum_k A[m, k] * B[n, k] * scales + bias[n]) in bf16; A, B and D have contiguous
 * rows (the contraction is the fast axis of both operands), `ld*` counts elements from row to row.
 */
#ifndef DEEPWELL_ABI_H
#define DEEPWELL_ABI_H

#include <stdint.h>

/* Raise with every change of dw_gemm, of a function's meaning or of an error code: the loader refuses another number. */
#define DW_ABI_VERSION 1

#if defined(_WIN32)
#define DW_EXPORT __declspec(dllexport)
#else
#define DW_EXPORT __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

enum dw_error {
  DW_OK = 0,
  DW_BAD_STRUCT = 1,        /* dw_gemm.size is not this library's */
  DW_BAD_CONFIG = 2,        /* no such configuration in this family */
  DW_BAD_TYPE = 3,          /* element types that the family has no kernel for */
  DW_BAD_SHAPE = 4,         /* a size is negative, or too large for 32 bits */
  DW_BAD_ALIGNMENT = 5,     /* a pointer or row is not a multiple of 16 bytes */
  DW_BAD_POINTER = 6,       /* a pointer that is needed is null */
  DW_SMALL_WORKSPACE = 7,   /* fewer bytes than dw_F_workspace said */
  DW_NOT_IMPLEMENTED = 8,   /* CUTLASS cannot run this problem with this configuration */
  DW_CUDA_ERROR = 9,        /* the launch failed; the CUDA error stands in dw_last_cuda_error */
  DW_NUM_ERRORS = 10
};

enum dw_type { DW_E4M3 = 0, DW_E5M2 = 1, DW_E2M1 = 2 };
enum dw_activation { DW_NONE = 0, DW_GELU = 1, DW_GELU_TANH = 2, DW_SILU = 3, DW_RELU = 4 };

typedef struct dw_gemm {
  int32_t size;        /* sizeof(dw_gemm) as the caller knows it */
  int32_t config;
  int32_t type_a;      /* dw_type */
  int32_t type_b;
  int32_t activation;  /* dw_activation */
  int32_t device;      /* CUDA device of all pointers */
  int32_t num_sms;     /* its multiprocessors */
  int32_t per_row_a;   /* fp8_rowwise: 1 where scale_a holds a scale per row, 0 where it holds one */
  int32_t per_row_b;
  float alpha;         /* used where alpha_ptr is null */
  int64_t m, n, k;
  int64_t lda, ldb, ldd;
  const void* a;
  const void* b;
  /* fp8_rowwise: fp32 (1) or (M), (N). fp8_blockwise: fp32, (K/128, M) and (K/128, N/128) contiguous, M and N/128 fast.
   * mxfp8: E8M0, nvfp4: E4M3, both in the 128x4 tile order of deepwell.formats.layout. */
  const void* scale_a;
  const void* scale_b;
  const void* bias;        /* bf16 (N), or null */
  const float* alpha_ptr;  /* device memory, or null */
  void* d;                 /* bf16 */
  void* workspace;
  int64_t workspace_bytes;
  void* stream;            /* cudaStream_t */
} dw_gemm;

DW_EXPORT int dw_abi_version(void);
DW_EXPORT const char* dw_arch(void);
DW_EXPORT const char* dw_error_string(int error);
/* CUDA's own words for the last DW_CUDA_ERROR of this thread; "" where there was none. */
DW_EXPORT const char* dw_last_cuda_error(void);

#define DW_DECLARE_FAMILY(F)                            \
  DW_EXPORT int dw_##F##_num_configs(void);             \
  DW_EXPORT const char* dw_##F##_config_name(int config); \
  DW_EXPORT int64_t dw_##F##_workspace(const dw_gemm* gemm); \
  DW_EXPORT int dw_##F(const dw_gemm* gemm);

DW_DECLARE_FAMILY(fp8_rowwise)
DW_DECLARE_FAMILY(fp8_blockwise)
DW_DECLARE_FAMILY(mxfp8)
DW_DECLARE_FAMILY(nvfp4)

#ifdef __cplusplus
}
#endif

#endif
