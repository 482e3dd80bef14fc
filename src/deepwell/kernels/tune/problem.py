"""Problem: what is to be computed where. A value without torch, and the name of a choice in the cache."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What is to be computed where: the op, its sizes, the format asked for, the epilogue, the device."""

    op: str
    m: int = 0
    n: int = 0
    k: int = 0
    precision: str
    dtype: str = "bfloat16"
    bias: bool = False
    activation: str | None = None
    # Whether b is quantized once for many products (a weight), so that its preparation is not part of the chain.
    static_b: bool = False
    # Whether sums must be in fp32: those over tokens drift one way, and a short accumulator cuts off what is added.
    exact_sums: bool = False
    # Whether FP8 values come with one scale a tensor, as those of weight gradients, instead of one a row.
    one_scale: bool = False
    # What else distinguishes problems of an op.
    details: str = ""
    # Whether a choice holds for this very M instead of its bucket.
    exact_m: bool = False
    device: str = "cpu"

    @property
    def size(self) -> str:
        return f"{self.m}x{self.n}x{self.k}"

    @property
    def bucket(self) -> Problem:
        """The same with M rounded up to a power of two: what is measured for one M holds for its bucket."""
        return self if self.exact_m else replace(self, m=1 << max(self.m - 1, 0).bit_length())

    @property
    def key(self) -> str:
        """The bucket as a string, without the device: the name of a choice in a device's cache."""
        parts = [self.op, self.bucket.size, self.precision, self.dtype]
        parts += ["bias"] * self.bias + [self.activation or ""] * bool(self.activation) + ["static_b"] * self.static_b
        parts += ["exact_sums"] * self.exact_sums + ["one_scale"] * self.one_scale + [self.details] * bool(self.details)
        return " ".join(parts)


def problem_of(
    a: torch.Tensor, b: torch.Tensor, *, precision: str, bias: bool = False, activation: str | None = None
) -> Problem:
    """The problem of `a [M, K] @ b [K, N]`."""
    return Problem(
        op="gemm",
        m=a.shape[0],
        n=b.shape[1],
        k=a.shape[1],
        precision=precision,
        dtype=str(a.dtype).removeprefix("torch."),
        bias=bias,
        activation=activation,
        device=str(a.device),
    )
