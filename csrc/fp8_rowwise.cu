// FP8 rowwise GEMM, E4M3 x E4M3, and the family's exported functions.

#include "fp8_rowwise.cuh"

namespace {

using E4M3 = cutlass::float_e4m3_t;

const dw::Entry rowwise_e4m3[4] = {dw::entry<dw::RowwiseLarge<E4M3>>(), dw::entry<dw::RowwiseMedium<E4M3>>(),
                                   dw::entry<dw::RowwiseSmall<E4M3>>(), dw::entry<dw::RowwiseExact<E4M3>>()};

// The table of the GEMM's element types; null where there is none.
const dw::Entry (*table(const dw_gemm* g))[4] {
  if (g == nullptr || g->type_b != DW_E4M3) return nullptr;
  return g->type_a == DW_E4M3 ? &rowwise_e4m3 : g->type_a == DW_E5M2 ? &dw::rowwise_e5m2 : nullptr;
}

}  // namespace

extern "C" {

int dw_fp8_rowwise_num_configs(void) { return 4; }

const char* dw_fp8_rowwise_config_name(int config) { return dw::name(rowwise_e4m3, config); }

int64_t dw_fp8_rowwise_workspace(const dw_gemm* g) {
  const auto* entries = table(g);
  return entries == nullptr ? -DW_BAD_TYPE : dw::workspace(*entries, g);
}

int dw_fp8_rowwise(const dw_gemm* g) {
  const auto* entries = table(g);
  return entries == nullptr ? DW_BAD_TYPE : dw::run(*entries, g);
}

}  // extern "C"
