"""The fused AdamW kernels against their reference, bit for bit: interpreted, and on a GPU."""

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from adamw_forms import BF16, FP32, GROUPS, Case, assert_same, make
from deepwell.formats.metrics import assert_bitwise_equal, assert_no_worse_than
from deepwell.train.adamw.moments import encode_ref, fma_ref
from deepwell.train.adamw.scalars import hyper_ref
from deepwell.train.adamw.tables import FusedAdamW
from deepwell.train.adamw.update import CONFIGS, FP8, Slot

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


@pytest.mark.parametrize("default", [BF16, torch.float64], ids=str)
def test_scalars_are_fp32_whatever_dtype_torch_makes_by_default(default, device):
    kernel, reference, grads, groups = make(Case(), [(257,)], device)
    torch.set_default_dtype(default)
    try:
        kernel = FusedAdamW(kernel.slots, steps=kernel.steps, seed=5)
        kernel.step(grads[0], groups)
    finally:
        torch.set_default_dtype(FP32)
    reference.step(grads[0], groups)
    assert_same(kernel, reference)


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


def test_scalars_are_those_of_the_reference(device):
    # Steps far apart: powers by squaring must agree product for product.
    kernel, _, grads, groups = make(Case(), [(16,), (16,), (16,)], device)
    kernel.steps.copy_(torch.tensor([0, 999, 123_456]))
    kernel.step(grads[0], groups)
    for i, slot in enumerate(kernel.slots):
        assert kernel._hyper[i].tolist() == hyper_ref(int(kernel.steps[i]), GROUPS[slot.group], 1.0)
