// FP8 GEMM for Hopper with a scale per row of A and per row of B (or one each), in the epilogue:
//     D[m, n] = act(scale_a[m] * (scale_b[n] * acc[m, n]) + bias[n])
// "fast" sums in the tensor core's own accumulator; "exact" adds its partial sums in fp32 registers every few MMAs.
#pragma once

#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/epilogue/fusion/operations.hpp"
#include "cutlass/epilogue/fusion/sm90_callbacks_tma_warpspecialized.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/kernel/gemm_universal.hpp"

#include "epilogue.cuh"
#include "launch.cuh"

namespace dw {

namespace fusion = cutlass::epilogue::fusion;

template <class ElementA, class TileShape, class ClusterShape, class MainloopSchedule, class EpilogueSchedule>
struct Fp8Rowwise {
  using ElementB = cutlass::float_e4m3_t;
  using ElementD = cutlass::bfloat16_t;
  static constexpr int kAlignment = 16;  // 16 bytes of FP8
  static constexpr int kAlignmentD = 8;
  static constexpr auto kRound = cutlass::FloatRoundStyle::round_to_nearest;

  // A bool in the stride: one scale for all rows where it is false.
  using ScaleA = fusion::Sm90ColBroadcast<0, TileShape, float, float, cute::Stride<bool, cute::_0, int64_t>>;
  using ScaleB = fusion::Sm90RowBroadcast<0, TileShape, float, float, cute::Stride<cute::_0, bool, int64_t>>;
  using Bias = fusion::Sm90RowBroadcast<0, TileShape, ElementD, float, cute::Stride<cute::_0, cute::_1, int64_t>>;
  using TimesB = fusion::Sm90EVT<fusion::Sm90Compute<cutlass::multiplies, float, float, kRound>, ScaleB, fusion::Sm90AccFetch>;
  using TimesA = fusion::Sm90EVT<fusion::Sm90Compute<cutlass::multiplies, float, float, kRound>, ScaleA, TimesB>;
  using PlusBias = fusion::Sm90EVT<fusion::Sm90Compute<cutlass::plus, float, float, kRound>, Bias, TimesA>;
  using Epilogue = fusion::Sm90EVT<fusion::Sm90Compute<Activation, ElementD, float, kRound>, PlusBias>;

  using CollectiveEpilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, TileShape, ClusterShape,
      cutlass::epilogue::collective::EpilogueTileAuto, float, float,
      void, cutlass::layout::RowMajor, kAlignmentD,
      ElementD, cutlass::layout::RowMajor, kAlignmentD,
      EpilogueSchedule, Epilogue>::CollectiveOp;

  using CollectiveMainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp,
      ElementA, cutlass::layout::RowMajor, kAlignment,
      ElementB, cutlass::layout::ColumnMajor, kAlignment,
      float, TileShape, ClusterShape,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename CollectiveEpilogue::SharedStorage))>,
      MainloopSchedule>::CollectiveOp;

  using Kernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, CollectiveMainloop, CollectiveEpilogue,
                                                      cutlass::gemm::PersistentScheduler>;

  static typename Kernel::Arguments arguments(const dw_gemm* g) {
    typename ScaleA::Arguments scale_a{static_cast<const float*>(g->scale_a), 0.0f, {g->per_row_a != 0, {}, 0}};
    typename ScaleB::Arguments scale_b{static_cast<const float*>(g->scale_b), 0.0f, {{}, g->per_row_b != 0, 0}};
    typename Bias::Arguments bias{static_cast<const ElementD*>(g->bias), ElementD(0), {{}, {}, 0}};
    typename Activation<float>::Arguments activation{g->activation};
    // Children first, then the node's own arguments: an EVT's order.
    typename Epilogue::Arguments epilogue{{bias, {scale_a, {scale_b, {}, {}}, {}}, {}}, activation};
    return {cutlass::gemm::GemmUniversalMode::kGemm,
            {static_cast<int>(g->m), static_cast<int>(g->n), static_cast<int>(g->k), 1},
            {static_cast<const ElementA*>(g->a), row_stride<typename Kernel::StrideA>(g->lda),
             static_cast<const ElementB*>(g->b), row_stride<typename Kernel::StrideB>(g->ldb)},
            {epilogue, nullptr, {}, static_cast<ElementD*>(g->d), row_stride<typename Kernel::StrideD>(g->ldd)},
            hardware(g)};
  }
};

using cute::_1;
using cute::_2;
using cute::_64;
using cute::_128;
using cute::_256;
using CooperativeFast = cutlass::gemm::KernelTmaWarpSpecializedCooperativeFP8FastAccum;
using PingpongFast = cutlass::gemm::KernelTmaWarpSpecializedPingpongFP8FastAccum;
using CooperativeExact = cutlass::gemm::KernelTmaWarpSpecializedCooperative;
using CooperativeEpilogue = cutlass::epilogue::TmaWarpSpecializedCooperative;
using PingpongEpilogue = cutlass::epilogue::TmaWarpSpecialized;

// Large products.
template <class ElementA>
struct RowwiseLarge : Fp8Rowwise<ElementA, cute::Shape<_128, _256, _128>, cute::Shape<_2, _1, _1>, CooperativeFast, CooperativeEpilogue> {
  static constexpr const char* name = "128x256x128_2x1_cooperative_fast";
};

// Products whose tiles of 128x256 would leave multiprocessors idle; one warp group stores while the other multiplies.
template <class ElementA>
struct RowwiseMedium : Fp8Rowwise<ElementA, cute::Shape<_128, _128, _128>, cute::Shape<_2, _1, _1>, PingpongFast, PingpongEpilogue> {
  static constexpr const char* name = "128x128x128_2x1_pingpong_fast";
};

// Few rows.
template <class ElementA>
struct RowwiseSmall : Fp8Rowwise<ElementA, cute::Shape<_64, _128, _128>, cute::Shape<_1, _1, _1>, PingpongFast, PingpongEpilogue> {
  static constexpr const char* name = "64x128x128_1x1_pingpong_fast";
};

// fp32 accumulation: two accumulators take the registers that a wider tile would need.
template <class ElementA>
struct RowwiseExact : Fp8Rowwise<ElementA, cute::Shape<_128, _128, _128>, cute::Shape<_2, _1, _1>, CooperativeExact, CooperativeEpilogue> {
  static constexpr const char* name = "128x128x128_2x1_cooperative_exact";
};

// Defined in fp8_rowwise_e5m2.cu; the four configurations of E4M3, by number, with E5M2 gradients as A.
extern const Entry rowwise_e5m2[4];

}  // namespace dw
