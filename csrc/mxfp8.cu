// MXFP8 GEMM (E4M3 x E4M3, E8M0 scales per 32) for sm_100a.

#include "block_scaled.cuh"

namespace {

using Operand = cutlass::mx_float8_t<cutlass::float_e4m3_t>;

// Two multiprocessors share a tile: half the traffic of B, for large products.
struct Pair : dw::BlockScaled<Operand, 32, 16, cute::Shape<dw::_256, dw::_256, dw::_128>, cute::Shape<dw::_2, dw::_1, dw::_1>,
                              cutlass::gemm::KernelTmaWarpSpecialized2SmMxf8f6f4Sm100, dw::Epilogue2Sm> {
  static constexpr const char* name = "256x256x128_2x1_2sm";
};

struct One : dw::BlockScaled<Operand, 32, 16, cute::Shape<dw::_128, dw::_128, dw::_128>, cute::Shape<dw::_1, dw::_1, dw::_1>,
                             cutlass::gemm::KernelTmaWarpSpecialized1SmMxf8f6f4Sm100, dw::Epilogue1Sm> {
  static constexpr const char* name = "128x128x128_1x1_1sm";
};

const dw::Entry entries[] = {dw::entry<Pair>(), dw::entry<One>()};

bool has_kernel(const dw_gemm* g) { return g != nullptr && g->type_a == DW_E4M3 && g->type_b == DW_E4M3; }

}  // namespace

extern "C" {

int dw_mxfp8_num_configs(void) { return 2; }

const char* dw_mxfp8_config_name(int config) { return dw::name(entries, config); }

int64_t dw_mxfp8_workspace(const dw_gemm* g) { return has_kernel(g) ? dw::workspace(entries, g) : -DW_BAD_TYPE; }

int dw_mxfp8(const dw_gemm* g) {
  if (!has_kernel(g)) return DW_BAD_TYPE;
  if (g->k % 32 != 0) return DW_BAD_SHAPE;  // whole scale blocks
  return dw::run(entries, g);
}

}  // extern "C"
