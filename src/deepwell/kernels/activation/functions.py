"""Activation functions and their slopes, in torch and in Triton.

silu       act(g) = g * s(g)                             s the logistic function
gelu_tanh  act(g) = g * s(2 z),  z = sqrt(2/pi) (g + 0.044715 g^3)       (0.5 g (1 + tanh z), without cancellation)
gelu       act(g) = g * (1 + erf(g / sqrt 2)) / 2
quick_gelu act(g) = g * s(1.702 g)            relu  act(g) = max(g, 0)
"""

# ruff: noqa: RET505 (the compiler reads what follows a return; only a whole if-else chain of constexprs ends it)

import torch
from torch import Tensor

from deepwell.kernels.device.triton_support import constant, tl, triton

ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "quick_gelu", "relu")

# ---- reference ----


def act_ref(g: Tensor, act: str) -> tuple[Tensor, Tensor]:
    """act(g) and its slope in fp32."""
    if act == "silu":
        s = torch.sigmoid(g)
        return g * s, s * (1 + g * (1 - s))
    if act == "gelu":
        phi = 0.5 * (1 + torch.erf(g * 0.5**0.5))
        return g * phi, phi + g * torch.exp(-0.5 * g * g) * 0.3989422804014327
    if act == "quick_gelu":
        s = torch.sigmoid(1.702 * g)
        return g * s, s * (1 + 1.702 * g * (1 - s))
    if act == "relu":
        return g.relu(), torch.where(g <= 0, 0.0, 1.0)
    c = 0.7978845608028654
    s = torch.sigmoid(2 * c * (g + 0.044715 * g * g * g))
    return g * s, s + g * s * (1 - s) * 2 * c * (1 + 3 * 0.044715 * g * g)


# ---- kernel functions ----

# exp2 and reciprocal as the GPU has them, two units off; beyond |g| = 87 the logistic function is 0 or 1.
_SIGMOID = constant("""{
    .reg .f32 e;
    mul.ftz.f32 e, $1, 0fBFB8AA3B;
    ex2.approx.ftz.f32 e, e;
    add.ftz.f32 e, e, 0f3F800000;
    rcp.approx.ftz.f32 $0, e;
}""")


@triton.jit
def _sigmoid(x, ASM: tl.constexpr):
    if ASM:
        return tl.inline_asm_elementwise(_SIGMOID, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return tl.sigmoid(x)


@triton.jit
def act_of(g, ACT: tl.constexpr, ASM: tl.constexpr = False):
    if ACT == "silu":
        return g * _sigmoid(g, ASM)
    elif ACT == "gelu_tanh":
        return g * tl.sigmoid(1.5957691216057308 * (g + 0.044715 * g * g * g))
    elif ACT == "quick_gelu":
        return g * tl.sigmoid(1.702 * g)
    elif ACT == "relu":
        return tl.where(g <= 0.0, 0.0, g)  # NaN stays
    else:
        return g * (0.5 * (1.0 + tl.erf(g * 0.7071067811865476)))


@triton.jit
def act_and_slope(g, ACT: tl.constexpr, ASM: tl.constexpr = False):
    if ACT == "silu":
        s = _sigmoid(g, ASM)
        a = g * s
        return a, s + a * (1.0 - s)
    elif ACT == "gelu_tanh":
        s = tl.sigmoid(1.5957691216057308 * (g + 0.044715 * g * g * g))
        return g * s, s + g * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * g * g)
    elif ACT == "quick_gelu":
        s = tl.sigmoid(1.702 * g)
        return g * s, s * (1.0 + 1.702 * g * (1.0 - s))
    elif ACT == "relu":
        return tl.where(g <= 0.0, 0.0, g), tl.where(g <= 0.0, 0.0, 1.0)
    else:
        phi = 0.5 * (1.0 + tl.erf(g * 0.7071067811865476))
        return g * phi, phi + g * tl.exp(-0.5 * g * g) * 0.3989422804014327
