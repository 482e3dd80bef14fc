// The C ABI on a CPU: what a library looks like from the loader, without CUDA. Plain loops over host memory.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "deepwell_abi.h"

#ifndef TEST_ABI_VERSION
#define TEST_ABI_VERSION DW_ABI_VERSION
#endif

namespace {

float e4m3(uint8_t code) {
  const int exponent = (code >> 3) & 15, mantissa = code & 7;
  const float value = exponent ? std::ldexp(8.0f + mantissa, exponent - 10) : std::ldexp(float(mantissa), -9);
  return code & 128 ? -value : value;
}

float from_bf16(uint16_t bits) {
  const uint32_t wide = uint32_t(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

uint16_t to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return uint16_t((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

float activate(float x, int kind) {
  switch (kind) {
    case DW_GELU: return 0.5f * x * (1 + std::erf(x * 0.70710678f));
    case DW_GELU_TANH: return 0.5f * x * (1 + std::tanh(0.79788456f * x * (1 + 0.044715f * x * x)));
    case DW_SILU: return x / (1 + std::exp(-x));
    case DW_RELU: return x < 0 ? 0 : x;
    default: return x;
  }
}

}  // namespace

extern "C" {

int dw_abi_version(void) { return TEST_ABI_VERSION; }
const char* dw_arch(void) { return "host"; }
const char* dw_error_string(int error) { return error == DW_CUDA_ERROR ? "CUDA reported an error" : "words for the error"; }
const char* dw_last_cuda_error(void) { return "out of patience"; }

int dw_fp8_rowwise_num_configs(void) { return 3; }
const char* dw_fp8_rowwise_config_name(int config) {
  static const char* names[] = {"plain", "wants_workspace", "breaks"};
  return config >= 0 && config < 3 ? names[config] : nullptr;
}
int64_t dw_fp8_rowwise_workspace(const dw_gemm* g) {
  if (g->size != int32_t(sizeof(dw_gemm))) return -DW_BAD_STRUCT;
  if (g->k % 16) return -DW_BAD_ALIGNMENT;
  return g->config == 1 ? 640 : 0;
}
int dw_fp8_rowwise(const dw_gemm* g) {
  if (g->config == 1 && (g->workspace == nullptr || g->workspace_bytes != 640)) return DW_SMALL_WORKSPACE;
  if (g->config == 2) return DW_CUDA_ERROR;
  const auto* a = static_cast<const uint8_t*>(g->a);
  const auto* b = static_cast<const uint8_t*>(g->b);
  const auto* scale_a = static_cast<const float*>(g->scale_a);
  const auto* scale_b = static_cast<const float*>(g->scale_b);
  const auto* bias = static_cast<const uint16_t*>(g->bias);
  auto* d = static_cast<uint16_t*>(g->d);
  for (int64_t m = 0; m < g->m; ++m) {
    for (int64_t n = 0; n < g->n; ++n) {
      float sum = 0;
      for (int64_t k = 0; k < g->k; ++k) sum += e4m3(a[m * g->lda + k]) * e4m3(b[n * g->ldb + k]);
      sum = scale_a[g->per_row_a ? m : 0] * (scale_b[g->per_row_b ? n : 0] * sum);
      if (bias) sum += from_bf16(bias[n]);
      d[m * g->ldd + n] = to_bf16(activate(sum, g->activation));
    }
  }
  return DW_OK;
}

// Where each field lies, in the order of the struct.
int dw_test_offsets(int64_t* out) {
  const int64_t offsets[] = {
      offsetof(dw_gemm, size),      offsetof(dw_gemm, config),    offsetof(dw_gemm, type_a),    offsetof(dw_gemm, type_b),
      offsetof(dw_gemm, activation), offsetof(dw_gemm, device),   offsetof(dw_gemm, num_sms),   offsetof(dw_gemm, per_row_a),
      offsetof(dw_gemm, per_row_b), offsetof(dw_gemm, alpha),     offsetof(dw_gemm, m),         offsetof(dw_gemm, n),
      offsetof(dw_gemm, k),         offsetof(dw_gemm, lda),       offsetof(dw_gemm, ldb),       offsetof(dw_gemm, ldd),
      offsetof(dw_gemm, a),         offsetof(dw_gemm, b),         offsetof(dw_gemm, scale_a),   offsetof(dw_gemm, scale_b),
      offsetof(dw_gemm, bias),      offsetof(dw_gemm, alpha_ptr), offsetof(dw_gemm, d),         offsetof(dw_gemm, workspace),
      offsetof(dw_gemm, workspace_bytes), offsetof(dw_gemm, stream), sizeof(dw_gemm)};
  const int count = sizeof(offsets) / sizeof(offsets[0]);
  for (int i = 0; i < count; ++i) out[i] = offsets[i];
  return count;
}

}  // extern "C"
