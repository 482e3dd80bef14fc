// NVFP4 GEMM (E2M1 x E2M1, E4M3 scales per 16, fp32 scale per tensor in alpha) for sm_100a.

#include "block_scaled.cuh"

namespace {

using Operand = cutlass::nv_float4_t<cutlass::float_e2m1_t>;

struct Pair : dw::BlockScaled<Operand, 16, 32, cute::Shape<dw::_256, dw::_256, dw::_256>, cute::Shape<dw::_2, dw::_1, dw::_1>,
                              cutlass::gemm::KernelTmaWarpSpecialized2SmNvf4Sm100, dw::Epilogue2Sm> {
  static constexpr const char* name = "256x256x256_2x1_2sm";
};

struct One : dw::BlockScaled<Operand, 16, 32, cute::Shape<dw::_128, dw::_128, dw::_256>, cute::Shape<dw::_1, dw::_1, dw::_1>,
                             cutlass::gemm::KernelTmaWarpSpecialized1SmNvf4Sm100, dw::Epilogue1Sm> {
  static constexpr const char* name = "128x128x256_1x1_1sm";
};

const dw::Entry entries[] = {dw::entry<Pair>(), dw::entry<One>()};

bool has_kernel(const dw_gemm* g) { return g != nullptr && g->type_a == DW_E2M1 && g->type_b == DW_E2M1; }

}  // namespace

extern "C" {

int dw_nvfp4_num_configs(void) { return 2; }

const char* dw_nvfp4_config_name(int config) { return dw::name(entries, config); }

int64_t dw_nvfp4_workspace(const dw_gemm* g) { return has_kernel(g) ? dw::workspace(entries, g) : -DW_BAD_TYPE; }

int dw_nvfp4(const dw_gemm* g) {
  if (!has_kernel(g)) return DW_BAD_TYPE;
  if (g->k % 32 != 0) return DW_BAD_SHAPE;  // 16 bytes of packed E2M1, two scale blocks
  return dw::run(entries, g);
}

}  // extern "C"
