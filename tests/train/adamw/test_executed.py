"""AdamW's compiled kernels, executed instruction by instruction: what a thread does with the elements it really has."""

from typing import Any

import pytest

import aot
from adamw_forms import BF16, FP8, Case, Reference, make
from deepwell.formats.metrics import assert_bitwise_equal
from deepwell.formats.quantize import quantize_both
from deepwell.kernels.device.triton_support import triton
from deepwell.train.adamw import copies as adamw_copies
from deepwell.train.adamw import update as adamw
from deepwell.train.adamw import words as adamw_words
from deepwell.train.adamw.tables import FusedAdamW
from ptx_machine import Machine

KERNELS = {"_adamw_kernel": adamw, "_words_kernel": adamw_words, "_copies_kernel": adamw_copies}
Launches = dict[str, list[dict[str, Any]]]


class Stand:
    """Takes a kernel's place. Without a machine it writes down how it is launched; with one it executes."""

    def __init__(self, launches: list[dict[str, Any]], machines: list[Machine] | None) -> None:
        self.launches = launches
        self.machines = machines

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *tables, **how: self._launch(grid[0], tables, how)

    def _launch(self, grid: int, tables: Any, how: dict[str, Any]) -> None:
        if self.machines is None:
            self.launches.append({**how, "tables": tuple(table.dtype for table in tables)})
        else:
            number = next(i for i, known in enumerate(self.launches) if all(known[key] == how[key] for key in how))
            self.machines[number].launch(grid, [*(table.data_ptr() for table in tables), 0, 0])


@pytest.fixture
def executed(interpreting, monkeypatch) -> Any:
    """Steps of a case by compiled kernels and by the reference; returns both and the names of the kernels that ran."""
    monkeypatch.setattr(triton.knobs.language, "default_fp_fusion", False)

    def steps(count: int, launches: Launches, machines: dict[str, list[Machine]], how: Any) -> Any:
        with interpreting() as patch:
            patch.setattr(FusedAdamW, "_runs_kernels", lambda self: True)
            for name, module in KERNELS.items():
                patch.setattr(module, name, Stand(launches.setdefault(name, []), machines.get(name)))
            kernel, reference, grads, groups = make(*how)
            for step in range(count):
                for form in (kernel, reference):
                    form.step(grads[step], groups)
                if machines:
                    check(kernel, reference)
        return kernel

    def run(count: int, *how: Any) -> Any:
        # Which constants a launch has is decided where it is launched: once only to see them.
        launches: Launches = {}
        steps(1, launches, {}, how)
        machines = {name: [_machine(name, one) for one in launches[name]] for name in launches}
        return steps(count, launches, machines, how), {name for name in launches if launches[name]}

    return run


def _machine(name: str, launch: dict[str, Any]) -> Machine:
    kernel = getattr(KERNELS[name], name)
    constants = {key: value for key, value in launch.items() if key in kernel.arg_names}
    pointers = dict(zip(kernel.arg_names, launch["tables"], strict=False))
    made = aot.compile_kernel(
        kernel,
        {**pointers, **constants, "ASM": True},
        arch=90,
        num_warps=launch["num_warps"],
        max_registers=launch["maxnreg"],
    )
    return Machine(made.ptx, launch["num_warps"])


def check(kernel: FusedAdamW, reference: Reference) -> None:
    """Moments bit for bit; parameters but for one in 500, whose update was rounded once less."""
    for mine, wanted in zip(kernel.slots, reference.slots, strict=True):
        for name in ("exp_avg", "exp_avg_sq", "exp_avg_scales", "exp_avg_sq_scales"):
            if getattr(wanted, name) is not None:
                assert_bitwise_equal(getattr(mine, name), getattr(wanted, name), name)
        assert int((mine.param != wanted.param).sum()) <= 1 + mine.param.numel() // 500
        wanted.param.copy_(mine.param)


@pytest.mark.parametrize("moment", [BF16, FP8], ids=str)
@pytest.mark.parametrize("shapes", [[(257,), (77,)], [(24, 128)]], ids=["one by one", "in words"])
def test_an_update_is_the_references_however_elements_are_loaded(executed, moment, shapes) -> None:
    # 257 elements end inside a word, so that all are loaded one by one: a thread has elements 32 apart.
    _, ran = executed(2, Case(moment=moment), shapes, "cpu")
    assert ran == {"_adamw_kernel"}


@pytest.mark.parametrize("moment", [BF16, FP8], ids=str)
@pytest.mark.parametrize(
    ("fmt", "shape", "name"),
    [
        ("mxfp8", (48, 128), "_words_kernel"),
        ("fp8_e4m3_tensor_pow2", (48, 128), "_words_kernel"),
        ("fp8_e4m3_128x128_pow2", (144, 128), "_words_kernel"),
        ("fp8_e4m3_row", (80, 256), "_words_kernel"),
        ("fp8_e4m3_row_pow2", (80, 256), "_words_kernel"),
        # Rows that are no multiple of 16, and rows that begin inside a draw of random bits.
        ("mxfp8", (20, 128), "_copies_kernel"),
        ("mxfp8", (20, 20), "_copies_kernel"),
    ],
)
def test_copies_are_those_of_the_new_weights(executed, fmt, shape, name, moment) -> None:
    kernel, ran = executed(1, Case(moment=moment), [shape], "cpu", fmt)
    assert name in ran
    (slot,) = kernel.slots
    row, col = quantize_both(slot.param, fmt, amax=slot.copies.amax)
    assert_bitwise_equal(slot.copies.row, row.data, "row")
    assert_bitwise_equal(slot.copies.col, col.data, "col")
    if slot.copies.row_scales is not None:
        assert_bitwise_equal(slot.copies.row_scales, row.scales, "row_scales")
        assert_bitwise_equal(slot.copies.col_scales, col.scales, "col_scales")
