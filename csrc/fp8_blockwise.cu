// FP8 GEMM for Hopper with a scale per 1x128 of A and per 128x128 of B, applied while summing:
//     D[m, n] = act(sum_kb scale_a[kb, m] * scale_b[kb, n / 128] * acc_kb[m, n] + bias[n])

#include "cutlass/detail/blockwise_scale_layout.hpp"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/epilogue/fusion/operations.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/kernel/gemm_universal.hpp"

#include "epilogue.cuh"
#include "launch.cuh"

namespace {

using cute::_1;
using cute::_2;
using cute::_128;

template <class ClusterShape>
struct Fp8Blockwise {
  using Element = cutlass::float_e4m3_t;
  using ElementD = cutlass::bfloat16_t;
  using TileShape = cute::Shape<_128, _128, _128>;
  static constexpr int kAlignment = 16;
  static constexpr int kAlignmentD = 8;

  // Granularity 1 x 128 x 128 of (M, N, K); rows of A, and blocks of B, are neighbours in memory.
  using Scales = cutlass::detail::Sm90BlockwiseScaleConfig<1, 128, 128>;
  using LayoutScaleA = decltype(Scales::deduce_layoutSFA());
  using LayoutScaleB = decltype(Scales::deduce_layoutSFB());
  using Fusion = cutlass::epilogue::fusion::LinCombPerColBiasEltAct<dw::Activation, ElementD, float, ElementD, void, float>;

  using CollectiveEpilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, TileShape, ClusterShape,
      cutlass::epilogue::collective::EpilogueTileAuto, float, float,
      void, cutlass::layout::RowMajor, kAlignmentD,
      ElementD, cutlass::layout::RowMajor, kAlignmentD,
      cutlass::epilogue::TmaWarpSpecializedCooperative, Fusion>::CollectiveOp;

  using CollectiveMainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp,
      Element, cute::tuple<cutlass::layout::RowMajor, LayoutScaleA>, kAlignment,
      Element, cute::tuple<cutlass::layout::ColumnMajor, LayoutScaleB>, kAlignment,
      float, TileShape, ClusterShape,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename CollectiveEpilogue::SharedStorage))>,
      cutlass::gemm::KernelTmaWarpSpecializedCooperativeFP8Blockwise>::CollectiveOp;

  using Kernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, CollectiveMainloop, CollectiveEpilogue,
                                                      cutlass::gemm::PersistentScheduler>;

  static typename Kernel::Arguments arguments(const dw_gemm* g) {
    const auto problem = cute::make_shape(static_cast<int>(g->m), static_cast<int>(g->n), static_cast<int>(g->k), 1);
    typename Kernel::Arguments arguments{
        cutlass::gemm::GemmUniversalMode::kGemm,
        problem,
        {static_cast<const Element*>(g->a), dw::row_stride<typename Kernel::StrideA>(g->lda),
         static_cast<const Element*>(g->b), dw::row_stride<typename Kernel::StrideB>(g->ldb),
         static_cast<const float*>(g->scale_a), Scales::tile_atom_to_shape_SFA(problem),
         static_cast<const float*>(g->scale_b), Scales::tile_atom_to_shape_SFB(problem)},
        {{}, nullptr, {}, static_cast<ElementD*>(g->d), dw::row_stride<typename Kernel::StrideD>(g->ldd)},
        dw::hardware(g)};
    auto& epilogue = arguments.epilogue.thread;
    epilogue.alpha = g->alpha;
    epilogue.alpha_ptr = g->alpha_ptr;
    epilogue.beta = 0.0f;
    epilogue.bias_ptr = static_cast<const ElementD*>(g->bias);
    epilogue.activation = {g->activation};
    return arguments;
  }
};

struct Wide : Fp8Blockwise<cute::Shape<_2, _1, _1>> {
  static constexpr const char* name = "128x128x128_2x1_cooperative";
};

// Without a cluster: any number of tiles fills the machine.
struct Single : Fp8Blockwise<cute::Shape<_1, _1, _1>> {
  static constexpr const char* name = "128x128x128_1x1_cooperative";
};

const dw::Entry entries[] = {dw::entry<Wide>(), dw::entry<Single>()};

bool has_kernel(const dw_gemm* g) { return g != nullptr && g->type_a == DW_E4M3 && g->type_b == DW_E4M3; }

}  // namespace

extern "C" {

int dw_fp8_blockwise_num_configs(void) { return 2; }

const char* dw_fp8_blockwise_config_name(int config) { return dw::name(entries, config); }

int64_t dw_fp8_blockwise_workspace(const dw_gemm* g) {
  return has_kernel(g) ? dw::workspace(entries, g) : -DW_BAD_TYPE;
}

int dw_fp8_blockwise(const dw_gemm* g) {
  if (!has_kernel(g)) return DW_BAD_TYPE;
  // Whole blocks along N and K: the caller's scales have no others. Rows of scales are read 16 bytes at a time.
  if (g->k % 128 != 0 || g->n % 128 != 0 || g->m % 4 != 0) return DW_BAD_SHAPE;
  return dw::run(entries, g);
}

}  // extern "C"
