"""Copies of weights written with the update: the quantized new weights, bit for bit, interpreted and on a GPU."""

import math
from dataclasses import replace

import pytest
import torch

from adamw_forms import BF16, COPIED, FP32, Case, assert_same, make, slot_of
from deepwell.errors import ConfigError, UnsupportedError
from deepwell.formats.metrics import assert_bitwise_equal
from deepwell.formats.quantize import quantize_both
from deepwell.train.adamw.copies import FORMATS, TILE_CONFIGS, Copies
from deepwell.train.adamw.tables import FusedAdamW
from deepwell.train.adamw.update import FP8
from deepwell.train.adamw.words import WORD_CONFIGS


# Only one scale per tensor can be delayed.
@pytest.mark.parametrize("fmt, is_delayed", [(f, d) for f in FORMATS for d in (False, True)[: 1 + ("tensor" in f)]])
@pytest.mark.parametrize(
    "case, shapes",
    [
        (Case(is_random=False), [(96, 144)]),  # ragged tiles
        (Case(is_random=False), [(2, 16, 32)]),  # a stack of two matrices
        (Case(moment=FP8, is_random=False), [(16, 128), (16, 72)]),  # the second: rows that are no whole blocks
        (Case(param=FP32, grad=FP32, moment=FP32), [(37, 53)]),  # no alignment at all
    ],
    ids=str,
)
def test_copies_are_the_quantized_new_weights(case, shapes, fmt, is_delayed, device):
    kernel, reference, grads, groups = make(case, shapes, device, fmt, is_delayed)
    for form in (kernel, reference):
        form.write_copies()
        form.step(grads[0], groups)
    assert_same(kernel, reference)
    for slot in kernel.slots:
        copies = slot.copies
        row, col = quantize_both(slot.param, fmt, amax=copies.amax)
        assert_bitwise_equal(copies.row, row.data, "row")
        assert_bitwise_equal(copies.col, col.data, "col")
        if "tensor" in fmt:
            current = slot.param.float().abs().amax()
            assert_bitwise_equal(copies.scale, row.scales, "scale")
            assert_bitwise_equal(copies.new_amax if is_delayed else copies.amax, current, "amax")
        else:
            assert_bitwise_equal(copies.row_scales, row.scales, "row_scales")
            assert_bitwise_equal(copies.col_scales, col.scales, "col_scales")


@pytest.mark.parametrize("case", [Case(), Case(moment=FP8), Case(has_master=True)], ids=str)
@pytest.mark.parametrize("columns", [128, 20])
def test_a_tile_draws_the_same_random_bits_as_a_flat_pass(case, columns, device):
    # 20 columns: rows begin in the middle of eight elements that share a call.
    kernel, reference, grads, groups = make(case, [(20, columns)], device, "mxfp8")
    for form in (kernel, reference):
        form.step(grads[0], groups)
    assert_same(kernel, reference)


# Interpreted, each of the larger ones takes ten seconds.
_WORDS = [pytest.param(c, marks=[pytest.mark.slow] if c.rows > 32 else []) for c in WORD_CONFIGS]


@pytest.mark.parametrize("config", [*TILE_CONFIGS, *_WORDS], ids=str)
def test_no_tile_config_changes_a_copy(config, device):
    if device == "cpu" and config in WORD_CONFIGS:
        # The interpreter knows neither warps nor registers.
        alike = next(other for other in WORD_CONFIGS if other.rows == config.rows)
        if alike is not config:
            pytest.skip(f"interpreted as {alike}")
    is_square = config.rows == 128 or (config in WORD_CONFIGS and config.rows == 64)
    for fmt in ("mxfp8", "fp8_e4m3_row", *["fp8_e4m3_128x128"] * is_square):
        # 144 rows end inside the last tile.
        case = Case(moment=FP8) if config in WORD_CONFIGS else Case(is_random=False)
        shape = (144, 128) if config in WORD_CONFIGS else (144, 16)
        kernel, reference, grads, groups = make(case, [shape], device, fmt, tile_config=config)
        for form in (kernel, reference):
            form.step(grads[0], groups)
        assert_same(kernel, reference)


def test_weights_of_one_gemm_share_a_buffer_and_a_scale(device):
    # Two projections side by side: rows of one row copy, columns of one transposed copy, one scale.
    row = torch.zeros((64, 32), dtype=torch.uint8, device=device).view(FP8)
    col = torch.zeros((32, 64), dtype=torch.uint8, device=device).view(FP8)
    kernel, _, grads, groups = make(Case(), [(48, 32), (16, 32)], device)
    scalars = {name: torch.zeros((), device=device) for name in ("scale", "amax", "new_amax")}
    fmt = Copies.empty_like(kernel.slots[0].param, "fp8_e4m3_tensor_pow2").format
    parts = [(row[:48], col[:, :48]), (row[48:], col[:, 48:])]
    slots = [
        replace(slot, copies=Copies(format=fmt, row=r, col=c, **scalars))
        for slot, (r, c) in zip(kernel.slots, parts, strict=True)
    ]
    fused = FusedAdamW(slots, steps=torch.zeros(2, dtype=torch.int64, device=device), seed=5)
    fused.write_copies()
    before = torch.cat([slot.param for slot in slots]).float().abs().amax()
    fused.step(grads[0], groups)
    merged = torch.cat([slot.param for slot in slots])
    wanted_row, wanted_col = quantize_both(merged, fmt, amax=before)
    assert_bitwise_equal(row, wanted_row.data, "row")
    assert_bitwise_equal(col, wanted_col.data, "col")
    assert_bitwise_equal(scalars["new_amax"], merged.float().abs().amax(), "new_amax")


def test_delayed_copies_are_written_again_with_the_amax_that_was_collected(device):
    # Words, a stack and rows of no alignment; what a scale is of no longer fits the weights.
    kernel, reference, grads, groups = make(Case(), [(48, 32), (2, 16, 32), (20, 24)], device, "fp8_e4m3_tensor_pow2")
    for form in (kernel, reference):
        form.write_copies()
        form.step(grads[0], groups)
    assert_same(kernel, reference)
    for form in (kernel, reference):
        for slot in form.slots:
            slot.copies.new_amax.mul_(8.0)
        form.write_copies(is_step=True)
    assert_same(kernel, reference)
    for slot in kernel.slots:
        current = slot.param.float().abs().amax()
        assert_bitwise_equal(slot.copies.amax, 8.0 * current, "amax")
        assert_bitwise_equal(slot.copies.new_amax, current, "new_amax")
        row, col = quantize_both(slot.param, slot.copies.format, amax=slot.copies.amax)
        assert_bitwise_equal(slot.copies.row, row.data, "row")
        assert_bitwise_equal(slot.copies.col, col.data, "col")


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_weight_that_is_not_finite_stays_visible_in_its_copies(fmt, device):
    kernel, reference, _, _ = make(Case(), [(40, 64)], device, fmt)
    for form in (kernel, reference):
        form.slots[0].param[3, 5] = math.nan
        form.slots[0].param[7, 40] = math.inf
        form.write_copies()
    assert_same(kernel, reference)
    assert bool(kernel.slots[0].copies.row_tensor().dequantize()[3, 5].isnan())


@pytest.mark.parametrize("fmt", ["fp8_e4m3_tensor", "fp8_e4m3_row"])
def test_a_skipped_step_leaves_copies_alone(fmt, device):
    kernel, reference, grads, groups = make(Case(is_random=False), [(64, 128)], device, fmt, skip_nonfinite=True)
    for form in (kernel, reference):
        form.write_copies()
    copies = kernel.slots[0].copies
    before = {name: getattr(copies, name).clone() for name in COPIED if getattr(copies, name) is not None}
    for form in (kernel, reference):
        form.step([torch.full_like(grads[0][0], math.nan)], groups)
    for name, wanted in before.items():
        assert_bitwise_equal(getattr(copies, name), wanted, name)
    # Nor does it leave anything behind for the next one.
    for form in (kernel, reference):
        form.step(grads[0], groups)
    assert_same(kernel, reference)


@pytest.mark.parametrize("fmt", ["fp8_e4m3_row", "fp8_e4m3_row_pow2"])
def test_each_row_and_column_has_the_scale_of_its_own_maximum(fmt, device):
    # By rows, and by columns, from 0, which has a rule of its own, and subnormal numbers to nearly the largest; in
    # words and one by one. Then a thousand times smaller: maxima of the step before do not count.
    powers = torch.tensor([0.0, 2.0**-149, 2.0**-130, 1e-30, 1.0, 447.9, 1e19, 3e38])
    for rows, columns in ((144, 32), (130, 67)):
        shapes = [(rows, columns), (columns, rows)]
        kernel, reference, grads, groups = make(Case(param=FP32, grad=FP32, moment=FP32), shapes, device, fmt)
        still = [torch.zeros_like(grad) for grad in grads[0]]
        numbers = torch.rand(shapes[0], generator=torch.Generator().manual_seed(0)) - 0.5
        numbers[:, 5] = 1.0
        numbers[:8] *= powers[:, None]
        for shrunk in (1.0, 1e-3):
            for form in (kernel, reference):
                form.slots[0].param.copy_(numbers * shrunk)
                form.slots[1].param.copy_(numbers.T * shrunk)
                form.step(still, groups)
            assert_same(kernel, reference)
            one, other = (slot.copies for slot in kernel.slots)
            assert float(one.row_scales[0]) == float(other.col_scales[0]) == 2.0**-126


# Rows that are no whole blocks of moments, in words, and one by one.
@pytest.mark.parametrize("shape", [(3, 40, 72), (2, 48, 128), (2, 20, 128)], ids=str)
@pytest.mark.parametrize("is_row", [True, False], ids=["row alone", "col alone"])
def test_row_scales_of_one_copy_may_lie_apart(is_row, shape, device):
    kernel, _, grads, groups = make(Case(moment=FP8), [shape], device)
    made = Copies.empty_like(kernel.slots[0].param, "fp8_e4m3_row", row=is_row, col=not is_row)
    side = "row" if is_row else "col"
    # One column of a larger table; what lies beside it is not ours.
    table = torch.full((*getattr(made, f"{side}_scales").shape[:-1], 3), -1.0, device=device)
    made = replace(made, **{f"{side}_scales": table[..., 1:2]})
    fused = FusedAdamW(
        [replace(kernel.slots[0], copies=made)], steps=torch.zeros(1, dtype=torch.int64, device=device), seed=5
    )
    fused.step(grads[0], groups)
    wanted = quantize_both(fused.slots[0].param, made.format)[not is_row]
    assert_bitwise_equal(getattr(made, side), wanted.data, side)
    assert_bitwise_equal(table[..., 1:2].contiguous(), wanted.scales, f"{side}_scales")
    assert bool((table[..., ::2] == -1.0).all())


def test_rows_of_an_empty_matrix_have_the_scale_of_zeros(device):
    kernel, reference, _, _ = make(Case(), [(5, 0), (0, 7), (16, 0), (0, 16)], device, "fp8_e4m3_row")
    for form in (kernel, reference):
        form.write_copies()
    assert_same(kernel, reference)
    assert kernel.slots[1].copies.col_scales.flatten().tolist() == [2.0**-126] * 7


def test_refuses_copies_that_do_not_fit():
    weight = torch.zeros((64, 32), dtype=BF16)
    with pytest.raises(UnsupportedError, match="has no copies with the update"):
        Copies.empty_like(weight, "nvfp4")
    with pytest.raises(ConfigError, match="matrices or stacks"):
        Copies.empty_like(weight[0], "mxfp8")
    other = Copies.empty_like(weight.T.contiguous(), "mxfp8")
    with pytest.raises(ConfigError, match=r"slots\[0\].copies.row must be"):
        FusedAdamW(
            [slot_of(param=weight, exp_avg=weight.clone(), exp_avg_sq=weight.clone(), copies=other)],
            steps=torch.zeros(1, dtype=torch.int64),
        )
