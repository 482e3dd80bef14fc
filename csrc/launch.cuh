// From the ABI's struct to a CUTLASS device GEMM: checks, strides, workspace, launch, and the table of configurations.
#pragma once

#include <climits>
#include <cstdint>

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/gemm/device/gemm_universal_adapter.h"

#include "abi_internal.h"
#include "deepwell_abi.h"

namespace dw {

inline bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

// Bits of an element of `type`; 0 for a type that is not known.
inline int bits_of(int type) { return type == DW_E2M1 ? 4 : type == DW_E4M3 || type == DW_E5M2 ? 8 : 0; }

// What holds for every family. TMA wants 16-byte rows and pointers.
inline int check(const dw_gemm* g) {
  if (g == nullptr) return DW_BAD_POINTER;
  if (g->size != static_cast<int32_t>(sizeof(dw_gemm))) return DW_BAD_STRUCT;
  if (g->m < 0 || g->n < 0 || g->k <= 0 || g->m > INT_MAX || g->n > INT_MAX || g->k > INT_MAX) return DW_BAD_SHAPE;
  if (g->activation < DW_NONE || g->activation > DW_RELU) return DW_BAD_TYPE;
  const int bits_a = bits_of(g->type_a), bits_b = bits_of(g->type_b);
  if (bits_a == 0 || bits_b == 0) return DW_BAD_TYPE;
  if (g->lda < g->k || g->ldb < g->k || g->ldd < g->n) return DW_BAD_SHAPE;
  if (g->lda * bits_a % 128 || g->ldb * bits_b % 128 || g->ldd * 16 % 128) return DW_BAD_ALIGNMENT;
  if (g->k * bits_a % 128 || g->k * bits_b % 128 || g->n * 16 % 128) return DW_BAD_ALIGNMENT;
  if (!is_aligned(g->a) || !is_aligned(g->b) || !is_aligned(g->d) || !is_aligned(g->bias)) return DW_BAD_ALIGNMENT;
  return DW_OK;
}

inline int check_pointers(const dw_gemm* g) {
  const bool complete = g->a && g->b && g->scale_a && g->scale_b && g->d;
  return complete ? DW_OK : DW_BAD_POINTER;
}

// Makes the GEMM's device current for a call and puts the caller's back.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    error_ = cudaGetDevice(&before_);
    if (error_ == cudaSuccess && before_ != device) {
      error_ = cudaSetDevice(device);
      changed_ = error_ == cudaSuccess;
    }
  }
  ~OnDevice() {
    if (changed_) cudaSetDevice(before_);
  }
  cudaError_t error() const { return error_; }

 private:
  int before_ = 0;
  bool changed_ = false;
  cudaError_t error_ = cudaSuccess;
};

// Strides of matrices with contiguous rows: (row to row, 1, batch).
template <class StrideType>
StrideType row_stride(int64_t leading) {
  StrideType stride{};
  cute::get<0>(stride) = leading;
  return stride;
}

inline cutlass::KernelHardwareInfo hardware(const dw_gemm* g) {
  cutlass::KernelHardwareInfo info;
  info.device_id = g->device;
  info.sm_count = g->num_sms;
  return info;
}

// One configuration of a family: Config names the CUTLASS kernel and fills its arguments.
template <class Config>
struct Runner {
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<typename Config::Kernel>;

  static int64_t workspace(const dw_gemm* g) { return static_cast<int64_t>(Gemm::get_workspace_size(Config::arguments(g))); }

  static int run(const dw_gemm* g) {
    OnDevice on_device(g->device);
    if (on_device.error() != cudaSuccess) return dw_fail_cuda(on_device.error());
    auto arguments = Config::arguments(g);
    if (Gemm::can_implement(arguments) != cutlass::Status::kSuccess) return DW_NOT_IMPLEMENTED;
    const int64_t needed = workspace(g);
    if (needed > 0 && (g->workspace_bytes < needed || g->workspace == nullptr)) return DW_SMALL_WORKSPACE;
    auto stream = static_cast<cudaStream_t>(g->stream);
    Gemm gemm;
    cudaGetLastError();  // an older error of somebody else is not this launch's
    auto status = gemm.initialize(arguments, g->workspace, stream);
    if (status == cutlass::Status::kSuccess) status = gemm.run(stream);
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) return dw_fail_cuda(error);
    return status == cutlass::Status::kSuccess ? DW_OK : DW_NOT_IMPLEMENTED;
  }
};

struct Entry {
  const char* name;
  int64_t (*workspace)(const dw_gemm*);
  int (*run)(const dw_gemm*);
};

template <class Config>
constexpr Entry entry() {
  return {Config::name, &Runner<Config>::workspace, &Runner<Config>::run};
}

// The entry of a checked problem, or an error. K of an empty product is not special: only M or N may be 0.
template <int Count>
int find(const Entry (&entries)[Count], const dw_gemm* g, const Entry** found) {
  const int error = check(g);
  if (error != DW_OK) return error;
  if (g->config < 0 || g->config >= Count) return DW_BAD_CONFIG;
  *found = &entries[g->config];
  return DW_OK;
}

template <int Count>
int64_t workspace(const Entry (&entries)[Count], const dw_gemm* g) {
  const Entry* found = nullptr;
  const int error = find(entries, g, &found);
  if (error != DW_OK) return -error;
  return g->m == 0 || g->n == 0 ? 0 : found->workspace(g);
}

template <int Count>
int run(const Entry (&entries)[Count], const dw_gemm* g) {
  const Entry* found = nullptr;
  int error = find(entries, g, &found);
  if (error != DW_OK) return error;
  if (g->m == 0 || g->n == 0) return DW_OK;
  error = check_pointers(g);
  return error == DW_OK ? found->run(g) : error;
}

template <int Count>
const char* name(const Entry (&entries)[Count], int config) {
  return config >= 0 && config < Count ? entries[config].name : nullptr;
}

}  // namespace dw
