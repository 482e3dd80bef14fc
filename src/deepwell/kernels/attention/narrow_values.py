"""Causal attention whose values are narrower than its keys, as latent attention has them: by the fastest kernel here.

    sdpa            what torch chooses: cuDNN where its version takes both widths, else the memory-efficient kernel
    cudnn           cuDNN at both widths, also where torch would not choose it
    padded_cudnn    values padded with zeros to the keys' width, and what is padded of the result dropped
    padded_flash    the same by torch's flash attention

torch's flash attention has one width alone. Which of them runs, is right and fastest differs with the versions of torch
and cuDNN: each is compared with the reference and timed,
forward and backward, and torch's own choice stays unless another gains on it.
Numerics: those of `flash`; columns of zeros change no sum.
Cost: padded, 2 * D instead of D + V a pair and a head, and one more pass over values, result and its gradient.
"""

# Shapes: B batch, H query heads, G key-value heads, S tokens, D width of a head, V width of its values.

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention
from torch.nn.attention import SDPBackend, sdpa_kernel

from deepwell.errors import UnsupportedError
from deepwell.kernels.attention.autograd import windowed_attention
from deepwell.kernels.attention.flash import NO_WINDOW, attention_backward_ref, attention_ref, padded
from deepwell.kernels.attention.proof import TimedShape, case_of, in_units
from deepwell.kernels.tune.candidate import Candidate
from deepwell.kernels.tune.choose import Rules, TimingSetup, fastest_or_default
from deepwell.kernels.tune.problem import Problem
from deepwell.kernels.tune.sources import sources_hash
from deepwell.kernels.tune.verify import FLOORS_DB, Case

OP = "narrow_values"
SDPA = "sdpa"
# A step has other work between two calls: what is gained by less would drown in the noise of its measurement.
_RULES = Rules(default=SDPA, least_gain=0.02, record=False)


def narrow_values_attention(q_BHSD: Tensor, k_BGSD: Tensor, v_BGSV: Tensor, scale: float, way: str) -> Tensor:
    """Causal attention [B, H, S, V] by one of the ways above."""
    return WAYS[way](q_BHSD, k_BGSD, v_BGSV, scale)


# ---- the ways ----


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)


def _cudnn(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    # Backends are a GPU's; elsewhere torch has one kernel.
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if q.is_cuda else nullcontext():
        return _sdpa(q, k, v, scale)


def _padded_cudnn(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    return _cudnn(q, k, padded(v, q.shape[-1]), scale)[..., : v.shape[-1]]


def _padded_flash(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    return windowed_attention(q, k, v, None, scale, NO_WINDOW)


WAYS: dict[str, Callable[..., Tensor]] = {
    SDPA: _sdpa,
    "cudnn": _cudnn,
    "padded_cudnn": _padded_cudnn,
    "padded_flash": _padded_flash,
}


# ---- which kernel ----


@dataclass(frozen=True, slots=True, kw_only=True)
class NarrowShape(TimedShape):
    """Sizes whose V is below D."""


def fastest_way(shape: NarrowShape, dtype: torch.dtype, device: str) -> str:
    """The kernel that was the fastest at this shape, measured once on this kind of device."""
    problem = shape.problem(OP, dtype, device)
    return fastest_or_default(problem, built_in(OP), partial(_setup, shape, dtype, device), _RULES)


def built_in(op: str) -> tuple[Candidate, ...]:
    """All ways, forward and backward; torch's own needs no proof."""
    return tuple(
        Candidate(
            name=way,
            op=op,
            precision="bf16",
            fn=partial(_both, way),
            origin="reference" if way == SDPA else "vendor",
            trusted=True,
            fingerprint=sources_hash(sys.modules[__name__]),
        )
        for way in WAYS
    )


def _both(way: str, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
    """(out, dq, dk, dv)."""
    if q.is_cuda and "cudnn" in way:
        values = padded(v, q.shape[-1]) if way == "padded_cudnn" else v
        if not can_use_cudnn_attention(SDPAParams(q, k, values, None, 0.0, True, True)):
            raise UnsupportedError(f"this torch gives cuDNN no widths of {q.shape[-1]} and {values.shape[-1]}")
    with torch.enable_grad():
        leaves = q, k, v = [t.detach().requires_grad_() for t in (q, k, v)]
        out = narrow_values_attention(q, k, v, q.shape[-1] ** -0.5, way)
        return out.detach(), *torch.autograd.grad(out, leaves, dout)


def cases(candidate: Candidate, problem: Problem) -> Iterator[Case]:
    """The widths of DeepSeek-V3 and others, fewer key-value heads, a ragged length."""
    dtype = getattr(torch, problem.dtype)
    for shape in (NarrowShape(B=2, H=4, G=4, S=256, D=192, V=128), NarrowShape(B=1, H=4, G=2, S=131, D=96, V=64)):
        if (shape.D, shape.V) != (192, 128) and candidate.name == "cudnn":
            continue  # others are not what it is for everywhere; at the problem's own widths it is compared too
        given = shape.tensors(problem.device, dtype)
        q, k, v, dout = (t.double() for t in given)
        out, lse = attention_ref(q, k, v, None, shape.D**-0.5, NO_WINDOW)
        grads = attention_backward_ref(dout, q, k, v, out, lse, shape.D**-0.5, NO_WINDOW)
        yield case_of(str(shape), given, ("q", "k", "v", "dout"), (out, *grads))


def _setup(shape: NarrowShape, dtype: torch.dtype, device: str) -> TimingSetup:
    """Every kernel at this very shape. The first head's results are compared with those of torch's own choice."""
    given = shape.tensors(device, dtype)
    wanted = [t[:1, :1] for t in _both(SDPA, *given)]
    case = Case(label=str(shape), operands=given, wanted=in_units(wanted, wanted), floor_db=FLOORS_DB["bf16"])

    def call(candidate: Candidate, operands: tuple[Any, ...]) -> Callable[[], Tensor]:
        return lambda: in_units([t[:1, :1] for t in candidate.fn(*operands)], wanted)

    return TimingSetup(inputs=[given], call=call, case=lambda candidate: case)
