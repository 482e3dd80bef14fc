"""Every kernel of the experts' products as its wrapper launches it, compiled for a GPU that is not here.

PYTHONPATH=src:tests/kernels python tests/kernels/experts/compiled.py [ARCH [WORD OF A NAME]]

prints registers, spills and shared memory.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

import aot
from deepwell.kernels.experts import hidden_rows as H
from deepwell.kernels.experts import row_products as R
from deepwell.kernels.experts import token_products as W
from deepwell.kernels.experts.activation import ExpertActivation
from deepwell.kernels.experts.group_rows import group_layout_ref, padded_columns
from launches import on_absent_gpu

E4M3 = torch.float8_e4m3fn
SWIGLU = ExpertActivation()
GPT_OSS = ExpertActivation(interleaved=True, limit=7.0, alpha=1.702, up_shift=1.0)
RELU2 = ExpertActivation(function="relu2", gated=False)
_TOKENS = 512


@dataclass(frozen=True, kw_only=True)
class Form:
    """One call of a wrapper, and the kernel of it that is meant."""

    name: str
    kernel: str
    call: Callable[[], object]

    def compiled(self, arch: int) -> aot.Compiled:
        with on_absent_gpu(arch) as launches:
            self.call()
        return aot.measured(next(launch.made for launch in launches if launch.name == self.kernel), arch)


@dataclass(frozen=True, kw_only=True)
class Model:
    """The experts of one model: activation, widths of a token and of an expert, experts, choices of a token."""

    name: str
    how: ExpertActivation
    d: int
    f: int
    experts: int
    top_k: int
    kn: bool = False  # weights stored [E, K, N], with biases


MODELS = (
    Model(name="qwen3", how=SWIGLU, d=2048, f=768, experts=128, top_k=8),
    Model(name="mixtral", how=SWIGLU, d=4096, f=14336, experts=8, top_k=2),
    Model(name="gpt-oss", how=GPT_OSS, d=2880, f=2880, experts=32, top_k=4, kn=True),
    # Widths that tiles do not divide, one choice, one expert: integers that are 1 are constants.
    Model(name="ragged", how=GPT_OSS, d=192, f=160, experts=4, top_k=2, kn=True),
    Model(name="relu2", how=RELU2, d=2048, f=1024, experts=1, top_k=1),
)


class _Operands:
    """Of one model, with few tokens: memory that nobody reads is not taken."""

    def __init__(self, model: Model) -> None:
        self.model = model
        g = model.f * (1 + model.how.gated)
        choices = _TOKENS * model.top_k
        ends = torch.full((model.experts,), choices, dtype=torch.int32)
        ends, slot, _ = group_layout_ref(ends, torch.arange(choices), choices)
        self.rows, self.lying = R.Rows(ends, slot, model.top_k), R.Rows(ends)
        p = slot.shape[0]
        self.x, self.wide, self.hidden = bf16(_TOKENS, model.d), bf16(p, g), bf16(p, model.f)
        self.up, self.down = self.weight(g, model.d), self.weight(model.d, model.f)
        self.bias_up, self.bias_down = (bf16(model.experts, n) if model.kn else None for n in (g, model.d))
        self.weight_S = torch.empty(choices)

    def weight(self, n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        e, kn = self.model.experts, self.model.kn and dtype is torch.bfloat16
        return torch.empty((e, k, n), dtype=dtype).transpose(1, 2) if kn else torch.empty((e, n, k), dtype=dtype)


def bf16(*sizes: int) -> Tensor:
    return torch.empty(sizes, dtype=torch.bfloat16)


def products(model: Model) -> Iterator[Form]:
    """Down, dX, and up in FP8."""
    o = _Operands(model)
    for tile in R.PRODUCT_TILES:
        down = partial(R.row_product, o.hidden, o.down, o.lying, bias_EN=o.bias_down, tile=tile)
        yield Form(name=f"down {model.name} {tile.name}", kernel="_row_product_kernel", call=down)
        dx = partial(R.row_product, o.wide, o.up.transpose(1, 2), o.lying, tile=tile)
        yield Form(name=f"dX {model.name} {tile.name}", kernel="_row_product_kernel", call=dx)
    codes, w = torch.empty((_TOKENS, model.d), dtype=E4M3), o.weight(o.wide.shape[1], model.d, E4M3)
    scales = torch.empty(_TOKENS), torch.empty(w.shape[:2])
    for tile in R.FP8_TILES:
        up = partial(R.row_product, codes, w, o.rows, scales=scales, bias_EN=o.bias_up, tile=tile)
        yield Form(name=f"FP8 up {model.name} {tile.name}", kernel="_row_product_kernel", call=up)


def up(model: Model) -> Iterator[Form]:
    o = _Operands(model)
    for tile in R.UP_TILES:
        up = partial(R.up_product, o.x, o.up, o.rows, model.how, bias_EG=o.bias_up, tile=tile)
        yield Form(name=f"up {model.name} {tile.name}", kernel="_up_kernel", call=up)


def weight_grads(model: Model) -> Iterator[Form]:
    o = _Operands(model)
    columns, scale = padded_columns(o.hidden.shape[0], model.experts), torch.empty(model.experts)
    codes = {side.shape[1]: torch.empty((side.shape[1], columns), dtype=E4M3) for side in (o.x, o.hidden, o.wide)}
    for tile in W.WEIGHT_TILES:
        for label, (left, right) in (("dW2", (o.x, o.hidden)), ("dW1", (o.wide, o.x))):
            sides = (codes[left.shape[1]], scale, codes[right.shape[1]], scale)
            call = partial(W.token_product, *sides, o.rows.ends, tile=tile)
            yield Form(name=f"FP8 {label} {model.name} {tile.name}", kernel="_token_product_kernel", call=call)
    for tile in W.ROW_TILES:
        for label, (left, right) in (("dW2", (o.x, o.hidden)), ("dW1", (o.wide, o.x))):
            side = bf16(o.hidden.shape[0], left.shape[1]), bf16(o.hidden.shape[0], right.shape[1])
            call = partial(W.wgrad_of_rows, *side, o.rows.ends, tile=tile)
            yield Form(name=f"{label} {model.name} {tile.name}", kernel="_token_product_kernel", call=call)


def row_kernels(model: Model) -> Iterator[Form]:
    o = _Operands(model)
    hidden = partial(H.hidden_rows, o.wide, model.how)
    yield Form(name=f"hidden {model.name}", kernel="_hidden_kernel", call=hidden)
    assert o.rows.slot is not None
    grads = partial(H.weighted_grads, o.hidden, o.wide, o.weight_S, o.rows.slot, model.how)
    yield Form(name=f"hidden grads {model.name}", kernel="_grads_kernel", call=grads)
    down = partial(R.row_product, o.hidden, o.down, o.lying)
    yield Form(name=f"table of tiles {model.name}", kernel="_table_kernel", call=down)


def forms() -> list[Form]:
    kinds = (products, up, weight_grads, row_kernels)
    return [form for model in MODELS for kind in kinds for form in kind(model)]


def main() -> None:
    arch = int(sys.argv[1]) if len(sys.argv) > 1 else 90
    words = sys.argv[2:]
    print(f"{'sm_' + str(arch):44} registers  spills   shared   wgmma cp.async  TMA")
    for form in forms():
        if not all(word in form.name.split() for word in words):
            continue
        made = form.compiled(arch)
        counts = [made.count(p) for p in (r"wgmma\.mma|tcgen05\.mma", r"cp\.async\.c[ag]", r"cp\.async\.bulk\.tensor")]
        print(
            f"{form.name:44} {made.registers:9} {made.spill_bytes:7} {made.shared_bytes:8} {counts[0]:7} {counts[1]:8} "
            f"{counts[2]:4}",
            flush=True,
        )


if __name__ == "__main__":
    main()
