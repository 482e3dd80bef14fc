"""The fused AdamW kernels against their reference, bit for bit: interpreted, and on a GPU."""

import math
from dataclasses import dataclass, replace
from fractions import Fraction

import pytest
import torch

from deepwell.errors import ConfigError, UnsupportedError
from deepwell.formats.metrics import assert_bitwise_equal, assert_no_worse_than
from deepwell.formats.quantize import quantize_both
from deepwell.kernels import adamw_scalars
from deepwell.kernels.adamw import CONFIGS, FP8
from deepwell.kernels.adamw_copies import FORMATS, TILE_CONFIGS, Copies, write_copies_ref
from deepwell.kernels.adamw_copy_tables import Slot
from deepwell.kernels.adamw_moments import encode_ref, fma_ref
from deepwell.kernels.adamw_tables import FusedAdamW
from deepwell.kernels.adamw_words import WORD_CONFIGS

BF16, FP32 = torch.bfloat16, torch.float32
# lr, betas, eps, weight decay, sign, clip_norm; the second group ascends.
GROUPS = [[1e-2, 0.9, 0.999, 1e-8, 0.1, 1.0, 0.5], [3e-4, 0.9, 0.95, 1e-8, 0.0, -1.0, 0.5]]
STATE = ("param", "exp_avg", "exp_avg_sq", "exp_avg_scales", "exp_avg_sq_scales", "master")
COPIED = ("row", "col", "row_scales", "col_scales", "scale", "amax", "new_amax")


class Reference(FusedAdamW):
    """The plain torch reference on any device, also while kernels are interpreted."""

    def _runs_kernels(self):
        return False


@dataclass(frozen=True)
class Case:
    param: torch.dtype = BF16
    grad: torch.dtype = BF16
    moment: torch.dtype = BF16
    has_master: bool = False
    is_random: bool = True


CASES = [
    Case(),
    Case(is_random=False),
    Case(moment=FP8),
    Case(moment=FP8, is_random=False),
    Case(moment=FP32, grad=FP32, has_master=True),
    Case(moment=FP8, has_master=True),
    Case(param=FP32, grad=FP32, moment=FP32),
    Case(param=FP32, moment=FP8),
]
# More than one tile with a ragged end; a single element; just over a block; whole vectors, masked.
SHAPES = [(2200,), (1,), (129,), (3, 48)]


def make(case, shapes, device, fmt=None, is_delayed=True, **options):
    """Slots with random weights, small gradients for three steps, and the optimizer's two forms over equal copies."""
    generator = torch.Generator().manual_seed(0)
    forms = []
    grads = [
        [(torch.randn(shape, generator=generator) * 1e-3).to(case.grad).to(device) for shape in shapes]
        for _ in range(3)
    ]
    params = [(torch.randn(shape, generator=generator) * 0.05).to(case.param) for shape in shapes]
    for form in (FusedAdamW, Reference):
        slots = []
        for i, param in enumerate(params):
            weight = param.clone().to(device)
            scales = [torch.ones(-(-param.numel() // 128), device=device) if case.moment == FP8 else None] * 2
            moments = [torch.zeros(param.shape, device=device).to(case.moment) for _ in range(2)]
            slots.append(
                Slot(
                    param=weight,
                    exp_avg=moments[0],
                    exp_avg_sq=moments[1],
                    exp_avg_scales=None if scales[0] is None else scales[0].clone(),
                    exp_avg_sq_scales=None if scales[1] is None else scales[1].clone(),
                    master=weight.float() if case.has_master else None,
                    copies=None if fmt is None else Copies.empty_like(weight, fmt, is_delayed=is_delayed),
                    group=i % 2,
                    index=i + 3,
                )
            )
        steps = torch.zeros(len(slots), dtype=torch.int64, device=device)
        random = {"random_params": case.is_random, "random_moments": case.is_random}
        forms.append(form(slots, steps=steps, seed=5, **random, **options))
    groups = torch.tensor(GROUPS, dtype=torch.float64, device=device)
    return forms[0], forms[1], grads, groups


def one_nan(x):
    """fp32 with every NaN the same: its payload is the device's own affair (seen: 0x7fff0000 and 0x7fffffff)."""
    return torch.where(x.isnan(), math.nan, x) if x.dtype == torch.float32 else x


def settle_quotients(kernel, reference, update=2e-2):
    """A GPU divides by approximation where parameters are bf16: the reference goes on from the kernel's parameters.

    Off by two units of fp32 in the update, now and then one falls on the other side of a rounding to bf16.
    """
    for got, wanted in zip(kernel.slots, reference.slots, strict=True):
        if kernel.device.type == "cpu" or wanted.param.dtype != BF16 or wanted.master is not None:
            continue
        mine, its = (slot.param.double().nan_to_num(nan=1e30) for slot in (got, wanted))
        unit = 2.0 ** (torch.frexp(torch.maximum(mine.abs(), its.abs())).exponent - 8)
        assert ((mine - its).abs() <= unit + 2.0**-22 * update).all()
        assert (mine != its).sum() <= 1 + mine.numel() // 500
        wanted.param.copy_(got.param)
        if wanted.copies is not None:
            write_copies_ref(wanted.param, wanted.copies)


def assert_same(kernel, reference):
    settle_quotients(kernel, reference)
    assert_bitwise_equal(kernel.steps, reference.steps, "steps")
    for got, wanted in zip(kernel.slots, reference.slots, strict=True):
        for name in STATE:
            if getattr(wanted, name) is not None:
                assert_bitwise_equal(getattr(got, name), getattr(wanted, name), f"{name} of {got.index}")
        for name in COPIED if wanted.copies is not None else ():
            if getattr(wanted.copies, name) is not None:
                pair = (one_nan(getattr(form.copies, name)) for form in (got, wanted))
                assert_bitwise_equal(*pair, name)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_the_reference_bit_for_bit(case, device):
    kernel, reference, grads, groups = make(case, SHAPES, device)
    for step in range(2):
        kernel.step(grads[step], groups)
        reference.step(grads[step], groups)
    assert_same(kernel, reference)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_no_config_changes_a_bit(config, device):
    kernel, reference, grads, groups = make(Case(moment=FP8), [(2200,)], device, config=config)
    kernel.step(grads[0], groups)
    reference.step(grads[0], groups)
    assert_same(kernel, reference)


def test_serves_tensors_that_are_not_aligned(device):
    # Views one element into their storage: no 16-byte access may be tried.
    kernel, reference, grads, groups = make(Case(), [(257,)], device)
    forms = []
    for form in (kernel, reference):
        slot = form.slots[0]
        shifted = replace(slot, **{n: _shifted(getattr(slot, n)) for n in ("param", "exp_avg", "exp_avg_sq")})
        forms.append(type(form)([shifted], steps=form.steps, seed=5))
        forms[-1].step([_shifted(grads[0][0])], groups)
    assert_same(*forms)


def _shifted(tensor):
    storage = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    view = storage[1:]
    view.copy_(tensor)
    return view


def test_leaves_parameters_without_a_gradient_and_empty_ones_alone(device):
    kernel, reference, grads, groups = make(Case(), [(300,), (0,), (40,)], device)
    for form in (kernel, reference):
        form.step([None, *grads[0][1:]], groups)
        form.step(grads[1], groups)
    assert_same(kernel, reference)
    # A parameter counts the steps that it took part in.
    assert kernel.steps.tolist() == [1, 0, 2]


def test_follows_gradients_that_stay_move_or_change_their_dtype(device):
    # The same memory twice with other numbers, then other memory, then fp32.
    kernel, reference, grads, groups = make(Case(is_random=False), [(200,)], device)
    for form in (kernel, reference):
        buffer = [grads[0][0].clone()]
        form.step(buffer, groups)
        buffer[0].copy_(grads[1][0])
        form.step(buffer, groups)
        form.step(grads[2], groups)
        form.step([grads[2][0].float()], groups)
    assert_same(kernel, reference)


def test_bits_of_a_parameter_do_not_depend_on_its_neighbours(device):
    kernel, _, grads, groups = make(Case(), [(300,), (2200,)], device)
    alone, _, _, _ = make(Case(), [(300,), (2200,)], device)
    alone = FusedAdamW([alone.slots[1]], steps=torch.zeros(1, dtype=torch.int64, device=device), seed=5)
    kernel.step(grads[0], groups)
    alone.step(grads[0][1:], groups)
    assert_bitwise_equal(alone.slots[0].param, kernel.slots[1].param, "param")


@pytest.mark.parametrize("case", [Case(), Case(param=FP32, grad=FP32, moment=FP32)], ids=str)
def test_clips_by_the_global_norm(case, device):
    kernel, reference, grads, groups = make(case, [(2200,), (77,)], device, clip_norm=0.5)
    large = [grad * 100 for grad in grads[0]]
    for form in (kernel, reference):
        form.step(large, groups)
    norm = math.sqrt(sum(float(grad.double().square().sum()) for grad in large))
    assert norm > 0.5
    # The kernel sums squares in fp32 within a thread: far below a percent of a percent.
    assert float(kernel.norm) == pytest.approx(norm, rel=1e-6)
    assert float(kernel._hyper[0, 7]) == pytest.approx(0.5 / norm, rel=1e-6)
    small = [grad * 1e-3 for grad in grads[0]]
    kernel.step(small, groups)
    # Below the limit nothing is scaled; the second group ascends.
    assert kernel._hyper[:, 7].tolist() == [1.0, -1.0]


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
@pytest.mark.parametrize("options", [{"clip_norm": 0.5}, {"skip_nonfinite": True}], ids=str)
def test_skips_a_step_whose_gradient_is_not_finite_and_counts_it(bad, options, device):
    kernel, _, grads, groups = make(Case(is_random=False), [(2200,), (77,)], device, **options)
    kernel.step(grads[0], groups)
    before = [tensor.clone() for slot in kernel.slots for tensor in (slot.param, slot.exp_avg, slot.exp_avg_sq)]
    grads[1][1][76] = bad
    kernel.step(grads[1], groups)
    after = [tensor for slot in kernel.slots for tensor in (slot.param, slot.exp_avg, slot.exp_avg_sq)]
    for got, wanted in zip(after, before, strict=True):
        assert_bitwise_equal(got, wanted)
    assert (int(kernel.num_skipped), kernel.steps.tolist()) == (1, [1, 1])
    kernel.step(grads[2], groups)
    assert (int(kernel.num_skipped), kernel.steps.tolist()) == (1, [2, 2])


def test_a_gradient_that_is_not_finite_stays_visible_without_a_norm(device):
    kernel, reference, grads, groups = make(Case(moment=FP8), [(300,)], device)
    grads[0][0][130] = math.nan
    for form in (kernel, reference):
        form.step(grads[0], groups)
        # The parameter itself, and its whole block of moments by their scale; nothing else.
        slot = form.slots[0]
        assert slot.param.isnan().nonzero().flatten().tolist() == [130]
        assert slot.exp_avg_scales.isnan().tolist() == [False, True, False]
        assert slot.exp_avg_sq_scales.isnan().tolist() == [False, True, False]
    # Codes too; only a NaN's own bits are free.
    assert_bitwise_equal(kernel.slots[0].exp_avg, reference.slots[0].exp_avg, "exp_avg")
    assert_bitwise_equal(kernel.slots[0].exp_avg_sq, reference.slots[0].exp_avg_sq, "exp_avg_sq")


# ---- numerics of the reference itself ----


def test_follows_torch_as_closely_as_fp32_allows():
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(2000, generator=generator)
    grads = [torch.randn(2000, generator=generator) * 0.01 for _ in range(30)]
    runs = {}
    for name, dtype in (("fp64", torch.float64), ("torch", FP32)):
        param = start.to(dtype, copy=True).requires_grad_()
        optimizer = torch.optim.AdamW([param], lr=1e-2, betas=(0.9, 0.999), weight_decay=0.1)
        for grad in grads:
            param.grad = grad.to(dtype)
            optimizer.step()
        runs[name] = param.detach()
    slot = Slot(param=start.clone(), exp_avg=torch.zeros(2000), exp_avg_sq=torch.zeros(2000))
    ours = FusedAdamW([slot], steps=torch.zeros(1, dtype=torch.int64))
    groups = torch.tensor(GROUPS[:1], dtype=torch.float64)
    for grad in grads:
        ours.step([grad], groups)
    assert_no_worse_than(slot.param, runs["torch"], runs["fp64"])


def test_fp8_second_moment_never_falls_to_zero_and_follows_a_decay():
    # One gradient a million times the others, then none at all: codes of the small roots would round to zero.
    grad = torch.full((128,), 1e-6)
    grad[0] = 1.0
    slot = _fp8_slot(128)
    ours = FusedAdamW([slot], steps=torch.zeros(1, dtype=torch.int64), random_params=False)
    groups = torch.tensor(GROUPS[:1], dtype=torch.float64)
    ours.step([grad], groups)
    assert bool((slot.exp_avg_sq.float() > 0).all())
    largest = float(slot.exp_avg_sq.float()[0] * slot.exp_avg_sq_scales[0])
    for _ in range(200):
        ours.step([torch.zeros(128)], groups)
    # b2 = 0.999 over 200 steps: the root decays by 0.999^100, far less than a code in any one step.
    assert float(slot.exp_avg_sq.float()[0] * slot.exp_avg_sq_scales[0]) == pytest.approx(
        largest * 0.999**100, rel=0.01
    )


def _fp8_slot(count):
    zeros = [torch.zeros(count).to(FP8) for _ in range(2)]
    scales = [torch.ones(-(-count // 128)) for _ in range(2)]
    return Slot(
        param=torch.zeros(count),
        exp_avg=zeros[0],
        exp_avg_sq=zeros[1],
        exp_avg_scales=scales[0],
        exp_avg_sq_scales=scales[1],
    )


def test_fp8_moments_move_parameters_nearly_as_fp32_moments_do():
    # Gradients with a mean and noise, magnitudes spread over a block by 1000. An E4M3 step is 1/16 to 1/8 of a value:
    # after 100 steps the way may be off by less than one step, and its mean length by much less.
    generator = torch.Generator().manual_seed(3)
    spread = torch.logspace(-3, 0, 1024)[torch.randperm(1024, generator=generator)]
    exact = Slot(param=torch.zeros(1024), exp_avg=torch.zeros(1024), exp_avg_sq=torch.zeros(1024))
    slots = (_fp8_slot(1024), exact)
    forms = [FusedAdamW([slot], steps=torch.zeros(1, dtype=torch.int64)) for slot in slots]
    groups = torch.tensor([[1e-3, 0.9, 0.999, 1e-8, 0.0, 1.0, 0.0]], dtype=torch.float64)
    for _ in range(100):
        grad = spread * (1 + torch.randn(1024, generator=generator))
        for form in forms:
            form.step([grad], groups)
    way = exact.param
    assert float((slots[0].param - way).norm() / way.norm()) < 1 / 8
    assert float((slots[0].param @ way) / (way @ way)) == pytest.approx(1.0, abs=1 / 32)


@pytest.mark.parametrize("moment", [BF16, FP8], ids=str)
def test_a_second_moment_decays_at_random_and_stalls_to_nearest(moment):
    # Gradients of 1 for 10 steps, then of 0.001 but for the first, which keeps the block's scale where it is. With
    # b2 = 0.999 v loses 0.1 % a step: less than half a step of bf16, and its root far less than half one of E4M3.
    roots = {}
    for is_random in (True, False):
        slot = _fp8_slot(128)
        if moment == BF16:
            slot = Slot(param=torch.zeros(128), exp_avg=torch.zeros(128, dtype=BF16), exp_avg_sq=slot.param.to(BF16))
        form = FusedAdamW([slot], steps=torch.zeros(1, dtype=torch.int64), random_moments=is_random)
        groups = torch.tensor([[1e-3, 0.9, 0.999, 1e-8, 0.0, 1.0, 0.0]], dtype=torch.float64)
        found = []
        for grad, steps in ((torch.ones(128), 10), (torch.tensor([1.0] + [1e-3] * 127), 500)):
            for _ in range(steps):
                form.step([grad], groups)
            root = slot.exp_avg_sq.float()
            root = root * slot.exp_avg_sq_scales if moment == FP8 else root.sqrt()
            found.append(float(root[1:].mean()))
        roots[is_random] = found[1] / found[0]
    wanted = 0.999**250
    assert roots[True] == pytest.approx(wanted, rel=0.05)
    assert roots[False] > wanted * 1.2


# ---- FP8 moments by themselves ----


def test_a_fused_multiply_add_is_rounded_once():
    # 1 + 2^-24 lies halfway between two fp32 numbers; 2^-80 beside it decides, and is lost in fp64.
    a = torch.tensor([1 + 2.0**-12, 1 + 2.0**-12, -1 - 2.0**-12, 1.0, math.inf, 3.0])
    b = torch.tensor([1 + 2.0**-12, 1 + 2.0**-12, 1 + 2.0**-12, 1.0, 2.0, 0.0])
    c = torch.tensor([2.0**-80, -(2.0**-80), -(2.0**-80), 2.0**-80, 1.0, -0.0])
    up, down = 1 + 2.0**-11 + 2.0**-23, 1 + 2.0**-11
    assert fma_ref(a, b, c).tolist() == [up, down, -up, 1.0, math.inf, 0.0]
    # Against integers wide enough to hold any of it.
    generator = torch.Generator().manual_seed(0)
    powers = torch.randint(-20, 20, (3, 300), generator=generator)
    a, b, c = torch.randn((3, 300), generator=generator) * 2.0**powers
    exact = [Fraction(x) * Fraction(y) + Fraction(z) for x, y, z in zip(*(t.tolist() for t in (a, b, c)), strict=True)]
    got = fma_ref(a, b, c)
    for near in (torch.nextafter(got, got + 1), torch.nextafter(got, got - 1)):
        for value, other, wanted in zip(got.tolist(), near.tolist(), exact, strict=True):
            assert abs(Fraction(value) - wanted) <= abs(Fraction(other) - wanted)


@pytest.mark.parametrize("is_root", [False, True])
@pytest.mark.parametrize("amax", [2.0**-120, 1e-5, 1.0, 3e4, 1e6, 2.0**30])
def test_no_magnitude_of_a_block_passes_the_largest_code(amax, is_root):
    # Above 2^15 the multiplier is subnormal in fp32; noise of all bits is what could carry.
    x = torch.full((256,), amax) * torch.cat([torch.ones(128), torch.linspace(0.9, 1.0, 128)])
    codes, scales = torch.zeros(256, dtype=torch.uint8).view(FP8), torch.zeros(2)
    for noise in (torch.full((256,), 0xFFFF, dtype=torch.int32), torch.zeros(256, dtype=torch.int32), None):
        encode_ref(x, codes, scales, noise, is_root=is_root)
        assert int(codes.view(torch.uint8).max()) <= 126
        back = codes.float() * scales.repeat_interleave(128)
        assert ((back / x - 1).abs() <= 1 / 8 + 2.0**-7).all()


def test_a_block_beyond_the_largest_magnitude_is_nan():
    x = torch.ones(256)
    x[130] = 2.0**31
    codes, scales = torch.zeros(256, dtype=torch.uint8).view(FP8), torch.zeros(2)
    encode_ref(x, codes, scales, None, is_root=False)
    assert scales.isnan().tolist() == [False, True] and not codes.view(torch.uint8)[128:].any()


@pytest.mark.parametrize("magnitude", [300.0, 1.05, 2.0**-6 * 1.01, 2.0**-9 * 1.3, 2.0**-9 * 0.2])
def test_codes_are_right_on_average(magnitude):
    # A normal code, one near the last binade, subnormal ones and one below the smallest: all 2^16 draws once.
    noise = torch.arange(2**16, dtype=torch.int32)
    x = torch.full((2**16,), -magnitude)
    x[::128] = 448.0
    codes, scales = torch.zeros(2**16, dtype=torch.uint8).view(FP8), torch.zeros(2**9)
    encode_ref(x, codes, scales, noise, is_root=False)
    found = (codes.float() * scales.repeat_interleave(128)).view(-1, 128)[:, 1:].double().mean()
    assert float(found) == pytest.approx(-magnitude, rel=1e-2)


# ---- copies of weights ----


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


# ---- refusals ----


def _slot(**changes):
    zeros = torch.zeros(256, dtype=BF16)
    return Slot(**{"param": zeros, "exp_avg": zeros.clone(), "exp_avg_sq": zeros.clone(), **changes})


@pytest.mark.parametrize(
    "slot, error, message",
    [
        (_slot(param=torch.zeros(256, dtype=torch.float16)), ConfigError, "param has dtype torch.float16"),
        (_slot(param=torch.zeros(512, dtype=BF16)[::2]), UnsupportedError, "gaps or overlaps"),
        (_slot(exp_avg=torch.zeros(256)), ConfigError, "moments of torch.float32 and torch.bfloat16"),
        (_slot(exp_avg=torch.zeros(128, dtype=BF16)), ConfigError, "exp_avg is laid out"),
        (_slot(master=torch.zeros(256, dtype=BF16)), ConfigError, "a master copy is float32"),
        (_slot(exp_avg_scales=torch.ones(2)), ConfigError, "only for them"),
    ],
)
def test_refuses_a_wrong_slot_by_name(slot, error, message):
    with pytest.raises(error, match=message):
        FusedAdamW([slot], steps=torch.zeros(1, dtype=torch.int64))


def test_refuses_a_wrong_gradient_by_name():
    fused = FusedAdamW([_slot()], steps=torch.zeros(1, dtype=torch.int64))
    groups = torch.tensor(GROUPS, dtype=torch.float64)
    for grad, error, message in (
        (torch.zeros(256).to_sparse(), UnsupportedError, r"grads\[0\] is sparse"),
        (torch.zeros(256, dtype=torch.float16), ConfigError, r"grads\[0\] has dtype torch.float16"),
        (torch.zeros(128), ConfigError, r"grads\[0\] is laid out \(128,\)"),
    ):
        with pytest.raises(error, match=message):
            fused.step([grad], groups)


def test_refuses_copies_that_do_not_fit():
    weight = torch.zeros((64, 32), dtype=BF16)
    with pytest.raises(UnsupportedError, match="has no copies with the update"):
        Copies.empty_like(weight, "nvfp4")
    with pytest.raises(ConfigError, match="matrices or stacks"):
        Copies.empty_like(weight[0], "mxfp8")
    other = Copies.empty_like(weight.T.contiguous(), "mxfp8")
    with pytest.raises(ConfigError, match=r"slots\[0\].copies.row must be"):
        FusedAdamW(
            [_slot(param=weight, exp_avg=weight.clone(), exp_avg_sq=weight.clone(), copies=other)],
            steps=torch.zeros(1, dtype=torch.int64),
        )


def test_scalars_are_those_of_the_reference(device):
    # Steps far apart: powers by squaring must agree product for product.
    kernel, _, grads, groups = make(Case(), [(16,), (16,), (16,)], device)
    kernel.steps.copy_(torch.tensor([0, 999, 123_456]))
    kernel.step(grads[0], groups)
    for i, slot in enumerate(kernel.slots):
        hyper = adamw_scalars.Hyper.at_step(int(kernel.steps[i]), GROUPS[slot.group], 1.0)
        wanted = [getattr(hyper, name) for name in hyper.__slots__]
        assert kernel._hyper[i].tolist() == wanted
