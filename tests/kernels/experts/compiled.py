"""Every configuration of the experts' products that may be launched, compiled for a GPU that is not here.

PYTHONPATH=src:tests/kernels python tests/kernels/experts/compiled.py [ARCH]

prints registers, spills and shared memory.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

import aot
from deepwell.kernels.experts import hidden_rows as H
from deepwell.kernels.experts import row_products as R
from deepwell.kernels.experts import token_products as W
from deepwell.kernels.experts.activation import ExpertActivation, constants

BF16, FP32, I32, E4M3 = torch.bfloat16, torch.float32, torch.int32, torch.float8_e4m3fn
SWIGLU = ExpertActivation()
GPT_OSS = ExpertActivation(interleaved=True, limit=7.0, alpha=1.702, up_shift=1.0)
RELU2 = ExpertActivation(function="relu2", gated=False)


@dataclass(frozen=True, kw_only=True)
class Form:
    """One kernel with all of its arguments."""

    name: str
    kernel: Any
    arguments: dict[str, Any]
    num_warps: int
    num_stages: int | None = None

    def compiled(self, arch: int) -> aot.Compiled:
        return aot.compile_kernel(
            self.kernel, self.arguments, arch=arch, num_warps=self.num_warps, num_stages=self.num_stages
        )


def _rows(tile: R.RowTile, *, kn: bool, whole: bool) -> dict[str, Any]:
    return {
        **dict.fromkeys(("table_ptr", "ends_ptr"), I32),
        "K": "i32",
        "PROGRAMS": "i32:any",
        "TOP_K": 8,
        "W_KN": kn,
        "WHOLE_K": whole,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "GROUP_M": tile.group_m,
        "PERSISTENT": tile.persistent,
    }


def _weight(tile: R.RowTile, kn: bool, dtype: str = "bf16", halves: int = 1) -> str:
    n = tile.block_n * halves
    return f"tensordesc<{dtype}{[tile.block_k, n] if kn else [n, tile.block_k]}>"


def _form(name: str, kernel: Any, tile: Any, arguments: dict[str, Any]) -> Form:
    full = f"{name} {tile.name}"
    return Form(name=full, kernel=kernel, arguments=arguments, num_warps=tile.num_warps, num_stages=tile.num_stages)


def products() -> Iterator[Form]:
    """With and without a gather, weights stored both ways, a bias, widths that tiles do not divide; and of codes."""
    for tile in R.PRODUCT_TILES:
        for kn in (False, True):
            common = {"a_ptr": BF16, "c_ptr": BF16, "N": "i32", "stride_a": "i32", **_rows(tile, kn=kn, whole=not kn)}
            common |= {"w_desc": _weight(tile, kn), "scale_a_ptr": None, "scale_w_ptr": None}
            down = {**common, "slot_ptr": None, "bias_ptr": BF16 if kn else None}
            yield _form(f"product {'kn' if kn else 'nk'}", R._row_product_kernel, tile, down)
    for tile in R.FP8_TILES:
        common = {"a_ptr": E4M3, "c_ptr": BF16, "N": "i32", "stride_a": "i32", **_rows(tile, kn=False, whole=True)}
        common |= {"w_desc": _weight(tile, False, "fp8e4nv"), "scale_a_ptr": FP32, "scale_w_ptr": FP32}
        yield _form("gathered codes", R._row_product_kernel, tile, {**common, "slot_ptr": I32, "bias_ptr": None})


def up_and_grads() -> Iterator[Form]:
    """SwiGLU with weights as Hugging Face's Qwen3 has them, GPT-OSS with its own, and experts without a gate."""
    for label, how, kn in (("swiglu", SWIGLU, False), ("gpt-oss", GPT_OSS, True), ("relu2", RELU2, False)):
        spec = {"GATED": how.gated, "INTERLEAVED": how.interleaved, **constants(how), "slot_ptr": I32, "F": "i32"}
        for tile in R.UP_TILES:
            common = {**_rows(tile, kn=kn, whole=not kn), **spec, "stride_a": "i32"}
            common |= {"a_ptr": BF16, "bias_ptr": BF16 if kn else None, "h_ptr": BF16, "out_ptr": BF16}
            common |= {"w_desc": _weight(tile, kn, halves=1 + how.interleaved)}
            yield _form(f"up {label}", R._up_kernel, tile, common)
        for tile in R.GRADS_TILES:
            # The down projection [E, D, F] read along D: stored the other way round.
            common = {**_rows(tile, kn=not kn, whole=not kn), **spec, "P": "i32", "stride_dy": "i32"}
            common |= {"dy_ptr": BF16, "dgu_ptr": BF16, "hidden_ptr": BF16, "weight_ptr": FP32, "dw_ptr": FP32}
            block = [tile.block_m, tile.block_n // 4 * (1 + how.interleaved)]
            common |= {"w_desc": _weight(tile, not kn), "gu_desc": f"tensordesc<bf16{block}>"}
            yield _form(f"grads {label}", R._grads_kernel, tile, common)


def weight_grads() -> Iterator[Form]:
    for tile in W.WEIGHT_TILES:
        arguments = {
            **dict.fromkeys(("left_ptr", "right_ptr", "out_ptr"), BF16),
            **dict.fromkeys(("slot_ptr", "ends_ptr"), I32),
            **dict.fromkeys(("N", "K", "stride_left", "stride_right"), "i32"),
            **dict.fromkeys(("E", "PROGRAMS"), "i32:any"),
            "TOP_K": 8,
            "GATHERS_LEFT": True,
            "BLOCK_N": tile.block_n,
            "BLOCK_K": tile.block_k,
            "BLOCK_T": tile.block_t,
        }
        yield _form("wgrad", W._token_product_kernel, tile, arguments)


def row_kernels() -> Iterator[Form]:
    for label, how in (("swiglu", SWIGLU), ("gpt-oss", GPT_OSS), ("relu2", RELU2)):
        spec = {"GATED": how.gated, "INTERLEAVED": how.interleaved, **constants(how), "F": "i32", "BLOCK": 1024}
        hidden = {"gu_ptr": BF16, "h_ptr": BF16, **spec}
        yield Form(name=f"hidden {label}", kernel=H._hidden_kernel, arguments=hidden, num_warps=4)
        grads = {**hidden, "dh_ptr": BF16, "weight_ptr": FP32, "slot_ptr": I32, "dgu_ptr": BF16, "dw_ptr": FP32}
        yield Form(name=f"hidden grads {label}", kernel=H._grads_kernel, arguments=grads, num_warps=4)
    table = {"ends_ptr": I32, "table_ptr": I32, "TILES": "i32:any", "E": "i32:any"}
    table |= {"BLOCK_M": 128, "BLOCK_E": 128, "BLOCK_T": R._TABLE_BLOCK}
    yield Form(name="table of tiles", kernel=R._table_kernel, arguments=table, num_warps=4)


def forms() -> list[Form]:
    return [*products(), *up_and_grads(), *weight_grads(), *row_kernels()]


def main() -> None:
    arch = int(sys.argv[1]) if len(sys.argv) > 1 else 90
    print(f"{'sm_' + str(arch):44} registers  spills   shared   wgmma cp.async  TMA")
    for form in forms():
        made = form.compiled(arch)
        counts = [made.count(p) for p in (r"wgmma\.mma|tcgen05\.mma", r"cp\.async\.c[ag]", r"cp\.async\.bulk\.tensor")]
        print(
            f"{form.name:44} {made.registers:9} {made.spill_bytes:7} {made.shared_bytes:8} {counts[0]:7} {counts[1]:8} "
            f"{counts[2]:4}",
            flush=True,
        )


if __name__ == "__main__":
    main()
