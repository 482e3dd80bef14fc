// The activation at the end of every kernel, chosen at run time: one kernel instead of five, a uniform branch per tile.
#pragma once

#include "cutlass/array.h"
#include "cutlass/cutlass.h"

#include "deepwell_abi.h"

namespace dw {

template <class T>
struct Activation {
  struct Arguments {
    int kind = DW_NONE;
  };

  CUTLASS_HOST_DEVICE static T gelu(T x) { return T(0.5f) * x * (T(1) + ::erff(x * T(0.70710678118654752f))); }

  CUTLASS_HOST_DEVICE static T gelu_tanh(T x) {
    const T inner = T(0.79788456080286536f) * x * (T(1) + T(0.044715f) * x * x);
    return T(0.5f) * x * (T(1) + ::tanhf(inner));
  }

  CUTLASS_HOST_DEVICE static T silu(T x) { return x / (T(1) + ::expf(-x)); }

  // NaN stays NaN, as in torch.
  CUTLASS_HOST_DEVICE static T relu(T x) { return x < T(0) ? T(0) : x; }

  CUTLASS_HOST_DEVICE T operator()(T const& x, Arguments const& arguments) const {
    switch (arguments.kind) {
      case DW_GELU: return gelu(x);
      case DW_GELU_TANH: return gelu_tanh(x);
      case DW_SILU: return silu(x);
      case DW_RELU: return relu(x);
      default: return x;
    }
  }
};

template <class T, int N>
struct Activation<cutlass::Array<T, N>> {
  using Scalar = Activation<T>;
  using Arguments = typename Scalar::Arguments;

  CUTLASS_HOST_DEVICE cutlass::Array<T, N> operator()(cutlass::Array<T, N> x, Arguments const& arguments) const {
    // Outside the loop: the branch is taken once for N elements.
    switch (arguments.kind) {
      case DW_GELU:
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < N; ++i) x[i] = Scalar::gelu(x[i]);
        break;
      case DW_GELU_TANH:
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < N; ++i) x[i] = Scalar::gelu_tanh(x[i]);
        break;
      case DW_SILU:
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < N; ++i) x[i] = Scalar::silu(x[i]);
        break;
      case DW_RELU:
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < N; ++i) x[i] = Scalar::relu(x[i]);
        break;
      default: break;
    }
    return x;
  }
};

}  // namespace dw
