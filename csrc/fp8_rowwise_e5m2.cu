// FP8 rowwise GEMM, E5M2 x E4M3: gradients in the format with the longer range.

#include "fp8_rowwise.cuh"

namespace dw {

using E5M2 = cutlass::float_e5m2_t;

extern const Entry rowwise_e5m2[4] = {
    entry<RowwiseLarge<E5M2>>(), entry<RowwiseMedium<E5M2>>(), entry<RowwiseSmall<E5M2>>(), entry<RowwiseExact<E5M2>>()};

}  // namespace dw
