// Block-scaled GEMM for Blackwell's tcgen05: MXFP8 (32 elements per E8M0 scale) and NVFP4 (16 per E4M3 scale):
//     D[m, n] = act(alpha * sum_k (A[m, k] * scale_a[m, k / block]) * (B[n, k] * scale_b[n, k / block]) + bias[n])
// The tensor core multiplies the scales in; alpha is NVFP4's product of the two scales per tensor.
#pragma once

#include "cutlass/detail/sm100_blockscaled_layout.hpp"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/epilogue/fusion/operations.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/kernel/gemm_universal.hpp"

#include "epilogue.cuh"
#include "launch.cuh"

namespace dw {

// kVector: elements that share a scale.
template <class Operand, int kVector, int Alignment, class MmaTile, class ClusterShape, class MainloopSchedule, class EpilogueSchedule>
struct BlockScaled {
  using Element = typename Operand::DataType;
  using ElementScale = typename Operand::ScaleFactorType;
  using ElementD = cutlass::bfloat16_t;
  static constexpr int kAlignmentD = 8;
  // CUTLASS' own choice for 256 columns, 128 of them at once, takes 255 registers and spills with a bias and an
  // activation; 64 columns do not.
  using EpilogueTile = cute::Shape<cute::_128, cute::_64>;
  // Two accumulators of 256 columns overlap in tensor memory by the width of an epilogue tile; the scales must fit into
  // what that leaves of 512. Too many are no compile error, so say it here. A tile of 128 x 4 scales takes 4 columns.
  static constexpr int kScaleColumns =
      (1 + cute::size<1>(MmaTile{}) / 128) * cute::size<2>(MmaTile{}) / kVector / 4 * 4;
  static_assert(cute::size<1>(MmaTile{}) < 256 || kScaleColumns <= cute::size<1>(EpilogueTile{}), "tensor memory");
  using Fusion = cutlass::epilogue::fusion::LinCombPerColBiasEltAct<Activation, ElementD, float, ElementD, void, float>;

  using CollectiveEpilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm100, cutlass::arch::OpClassBlockScaledTensorOp, MmaTile, ClusterShape,
      EpilogueTile, float, float,
      void, cutlass::layout::RowMajor, kAlignmentD,
      ElementD, cutlass::layout::RowMajor, kAlignmentD,
      EpilogueSchedule, Fusion>::CollectiveOp;

  using CollectiveMainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm100, cutlass::arch::OpClassBlockScaledTensorOp,
      Operand, cutlass::layout::RowMajor, Alignment,
      Operand, cutlass::layout::ColumnMajor, Alignment,
      float, MmaTile, ClusterShape,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename CollectiveEpilogue::SharedStorage))>,
      MainloopSchedule>::CollectiveOp;

  using Kernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, CollectiveMainloop, CollectiveEpilogue, void>;
  using Layout = typename CollectiveMainloop::Sm1xxBlkScaledConfig;

  static typename Kernel::Arguments arguments(const dw_gemm* g) {
    const auto problem = cute::make_shape(static_cast<int>(g->m), static_cast<int>(g->n), static_cast<int>(g->k), 1);
    typename Kernel::Arguments arguments{
        cutlass::gemm::GemmUniversalMode::kGemm,
        problem,
        {static_cast<const Element*>(g->a), row_stride<typename Kernel::StrideA>(g->lda),
         static_cast<const Element*>(g->b), row_stride<typename Kernel::StrideB>(g->ldb),
         static_cast<const ElementScale*>(g->scale_a), Layout::tile_atom_to_shape_SFA(problem),
         static_cast<const ElementScale*>(g->scale_b), Layout::tile_atom_to_shape_SFB(problem)},
        {{}, nullptr, {}, static_cast<ElementD*>(g->d), row_stride<typename Kernel::StrideD>(g->ldd)},
        hardware(g)};
    auto& epilogue = arguments.epilogue.thread;
    epilogue.alpha = g->alpha;
    epilogue.alpha_ptr = g->alpha_ptr;
    epilogue.beta = 0.0f;
    epilogue.bias_ptr = static_cast<const ElementD*>(g->bias);
    epilogue.activation = {g->activation};
    return arguments;
  }
};

using cute::_1;
using cute::_2;
using cute::_128;
using cute::_256;
using Epilogue1Sm = cutlass::epilogue::TmaWarpSpecialized1Sm;
using Epilogue2Sm = cutlass::epilogue::TmaWarpSpecialized2Sm;

}  // namespace dw
