"""Cross entropy: loss and gradient no worse than torch, FP8 rows those of the exact gradient up to fp32's rounding."""

import pytest
import torch
import torch.nn.functional as F

import aot
from deepwell.errors import ConfigError
from deepwell.formats.metrics import assert_bitwise_equal, assert_no_worse_than
from deepwell.formats.quantize import quantize
from deepwell.kernels.head import cross_entropy as C

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SMALL = C.LossConfig(block=1024, num_warps=4)
# One entry, fewer than a block, a whole block, several and a ragged end.
VOCABULARIES = [1, 50, 1024, 3001]


@pytest.fixture
def device(everywhere):
    """Interpreted, by the reference, and on a GPU where there is one."""
    return everywhere


def make(t, v, device):
    """Rows from flat to certain, a target that is the largest logit by far and one that is the smallest."""
    x = torch.randn(t, v) * torch.logspace(-1, 1.3, t)[:, None]
    targets = torch.randint(0, v, (t,))
    x[0, targets[0]] = 60.0
    x[1, targets[1]] = -60.0
    return x.bfloat16().to(device), targets.to(device)


def gradient(x, targets, scale, dtype):
    x = x.to(dtype, copy=True).requires_grad_()
    loss = F.cross_entropy(x, targets, reduction="none")
    return loss.detach(), torch.autograd.grad(loss, x, torch.full_like(loss, scale))[0]


@pytest.mark.parametrize("v", VOCABULARIES)
def test_loss_and_gradient_are_no_worse_than_torch(device, v):
    x, targets = make(6, v, device)
    scale = torch.tensor(0.125, device=device)
    got = C.cross_entropy(x, targets, grad_scale=scale, options=C.LossOptions(gradient="new"), config=SMALL)
    exact = gradient(x, targets, 0.125, torch.float64)
    # torch's loss at its best is fp32; its gradient at the logits' dtype.
    assert_no_worse_than(got.loss, gradient(x, targets, 0.125, torch.float32)[0], exact[0])
    assert_no_worse_than(got.grad, gradient(x, targets, 0.125, torch.bfloat16)[1], exact[1])


def test_a_loss_near_zero_keeps_its_digits(device):
    # The true loss is 1.1e-4; lse - x_target would carry the rounding of 16, about one percent of it.
    x = torch.zeros(1, 1000, device=device)
    x[0, 7] = 16.0
    loss = C.cross_entropy(x, torch.tensor([7], device=device), options=C.LossOptions(gradient="none")).loss
    exact = torch.log1p(999 * torch.exp(torch.tensor(-16.0, dtype=torch.float64)))
    assert loss.item() == pytest.approx(exact.item(), rel=1e-3)  # 1 + 1.1e-4 itself is rounded by 6e-8


def assert_rows_of(got, exact, targets, dtype, cancelled):
    """Codes and scales between those of a gradient a little smaller and a little larger than the exact one.

    `cancelled` is what the gradient at a target, its probability minus 1, may be off by in fp32.
    """
    places = torch.arange(len(targets), device=exact.device), targets.clamp(min=0)
    slack = 8e-6 * exact.abs()
    slack[places] += cancelled
    fmt = f"fp8_{'e4m3' if dtype == E4M3 else 'e5m2'}_row_pow2"
    others = exact.clone()
    others[places] = 0
    low, high = (
        quantize(rows.float(), fmt).scales[:, 0] for rows in ((others.abs() - slack).clamp(min=0), exact.abs() + slack)
    )
    assert bool(((low <= got.scale) & (got.scale <= high)).all())
    largest = torch.finfo(dtype).max
    low, high = (
        (moved / got.scale[:, None].double()).clamp(-largest, largest).float().to(dtype).float()
        for moved in (exact - slack, exact + slack)
    )
    codes = got.q.float()
    assert bool(((low <= codes) & (codes <= high)).all())
    # The bounds are narrow: nearly everywhere they are one number.
    narrow = low == high
    narrow[places] = True
    assert narrow.float().mean() > 0.99


@pytest.mark.parametrize("far", [1e4, -3e5])
def test_logits_far_from_zero_keep_their_digits(device, far):
    # Their distance counts. A product of each with log2(e), rounded, would be off by more than a percent here.
    x = (torch.randn(4, 3001) * 5 + far).to(device)
    targets = torch.tensor([0, 7, 1500, 3000], device=device)
    got = C.cross_entropy(x, targets, options=C.LossOptions(gradient="new"), config=SMALL)
    exact = gradient(x, targets, 1.0, torch.float64)
    single = gradient(x, targets, 1.0, torch.float32)
    assert_no_worse_than(got.loss, single[0], exact[0])
    assert_no_worse_than(got.grad, single[1], exact[1])


@pytest.mark.parametrize(("v", "dtype"), [*((v, E5M2) for v in VOCABULARIES), (3001, E4M3)])
def test_fp8_rows_are_the_gradient_rounded_once(device, v, dtype):
    # The scale is foretold from the sums, without a pass over the gradient: it must be the one that pass would find.
    x, targets = make(9, v, device)
    scale = torch.tensor(1 / 9, device=device)
    exact = gradient(x, targets, 1 / 9, torch.float64)[1]
    targets[4], exact[4] = -100, 0
    options = C.LossOptions(gradient="fp8", fp8=dtype)
    got = C.cross_entropy(x, targets, grad_scale=scale, options=options, config=SMALL)
    assert_rows_of(got, exact, targets, dtype, cancelled=2e-7 / 9)


@pytest.mark.parametrize("gradient", ["none", "new", "in_place", "fp8"])
@pytest.mark.parametrize("soft_cap", [None, 30.0])
def test_padding_behind_the_vocabulary_counts_for_nothing(device, gradient, soft_cap):
    x, targets = make(9, 1016, device)
    targets = targets % 1001
    targets[4] = -100
    x[:, 1001:] = 50.0  # would be the largest of all
    options = C.LossOptions(gradient=gradient, soft_cap=soft_cap)
    bias = torch.randn(1001).to(x)
    words = C.cross_entropy(x[:, :1001].contiguous(), targets, bias_V=bias, options=options, config=SMALL)
    got = C.cross_entropy(x, targets, vocab=1001, bias_V=bias, options=options, config=SMALL)
    assert_bitwise_equal(got.loss, words.loss)
    for made, wanted in ((got.grad, words.grad), (got.q, words.q)):
        assert (made is None) == (wanted is None)
        if made is not None:
            assert_bitwise_equal(made[:, :1001].contiguous(), wanted)
            assert not made[:, 1001:].float().any()
    assert gradient != "in_place" or got.grad.data_ptr() == x.data_ptr()
    assert gradient != "fp8" or torch.equal(got.scale, words.scale)


@pytest.mark.parametrize("vocab", [-1, 9])
def test_a_vocabulary_lies_within_the_columns(vocab):
    with pytest.raises(ConfigError, match=f"vocab is {vocab}; logits_TV has 8 columns"):
        C.cross_entropy(torch.randn(2, 8), torch.zeros(2, dtype=torch.int64), vocab=vocab)


def test_fp8_rows_of_a_row_that_is_sure_of_its_target(device):
    # e^-80 to the others: the row's multiplier times anything but such small numbers is beyond fp32, and of a gradient
    # of 8 beyond it by a factor.
    x = torch.zeros(2, 1000, device=device)
    x[:, 7] = 80.0
    x[1, :500] = -float("inf")
    x[1, 7] = 80.0
    options = C.LossOptions(gradient="fp8", fp8=E5M2)
    targets, scale = torch.tensor([7, 7], device=device), torch.tensor(8.0, device=device)
    got = C.cross_entropy(x, targets, grad_scale=scale, options=options, config=SMALL)
    made = got.q.double() * got.scale[:, None]
    wanted = 8 * x.double().softmax(1)
    wanted[:, 7] = 0
    torch.testing.assert_close(made, wanted, rtol=0.13, atol=0.0)  # half a step of E5M2


# A bias, a factor, a soft cap near and far from its bend, all together.
BENT = {
    "bias": (True, {}),
    "scale": (False, {"logit_scale": 0.0625}),
    "cap": (False, {"soft_cap": 30.0}),
    "small cap": (False, {"soft_cap": 2.0, "logit_scale": -0.5}),
    "all": (True, {"soft_cap": 5.0, "logit_scale": 1.5}),
}


def bent_gradient(x, bias, targets, scale, how, dtype):
    x = x.to(dtype, copy=True).requires_grad_()
    z = (x if bias is None else x + bias.to(dtype)) * how.get("logit_scale", 1.0)
    cap = how.get("soft_cap")
    loss = F.cross_entropy(z if cap is None else torch.tanh(z / cap) * cap, targets, reduction="none")
    return loss.detach(), torch.autograd.grad(loss, x, torch.full_like(loss, scale))[0]


@pytest.mark.parametrize(("name", "v"), [*((name, 3001) for name in BENT), ("all", 50)])
def test_bias_scale_and_cap_are_no_worse_than_torch(device, name, v):
    has_bias, how = BENT[name]
    x, targets = make(6, v, device)
    bias = torch.randn(v, device=device).bfloat16() if has_bias else None
    scale = torch.tensor(0.125, device=device)
    options = C.LossOptions(gradient="new", **how)
    got = C.cross_entropy(x, targets, bias_V=bias, grad_scale=scale, options=options, config=SMALL)
    exact = bent_gradient(x, bias, targets, 0.125, how, torch.float64)
    assert_no_worse_than(got.loss, bent_gradient(x, bias, targets, 0.125, how, torch.float32)[0], exact[0])
    assert_no_worse_than(got.grad, bent_gradient(x, bias, targets, 0.125, how, torch.bfloat16)[1], exact[1])


@pytest.mark.parametrize("name", BENT)
def test_fp8_rows_of_bent_logits_are_the_quantized_gradient(device, name):
    # Under a cap the largest gradient need not lie at the largest logit: it is written, then quantized.
    has_bias, how = BENT[name]
    x, targets = make(9, 1100, device)
    bias = torch.randn(1100, device=device).bfloat16() if has_bias else None
    exact = bent_gradient(x, bias, targets, 1 / 9, how, torch.float64)[1]
    targets[4], exact[4] = -100, 0
    scale = torch.tensor(1 / 9, device=device)
    arguments = {"bias_V": bias, "grad_scale": scale, "config": SMALL}
    got = C.cross_entropy(x, targets, options=C.LossOptions(gradient="fp8", **how), **arguments)
    if "soft_cap" not in how:
        assert_rows_of(got, exact, targets, E4M3, cancelled=2e-7 / 9)
        return
    high = C.cross_entropy(x, targets, options=C.LossOptions(gradient="new", **how), **arguments).grad
    wanted = quantize(high, "fp8_e4m3_row_pow2")
    assert_bitwise_equal(got.q, wanted.data, "codes")
    assert_bitwise_equal(got.scale, wanted.scales[:, 0], "scales")


def test_a_cap_keeps_small_and_large_logits_exact(device):
    # tanh of a small number is that number: its error must be relative to it, not to 1. A cap of inf is a mistake.
    x = torch.tensor([[1e-4, -1e-4, 40.0, -40.0, float("inf"), -float("inf")]], device=device)
    target = torch.tensor([0], device=device)
    got = C.cross_entropy(x, target, options=C.LossOptions(gradient="new", soft_cap=30.0))
    z = 30 * torch.tanh(x.double() / 30)
    exact = F.cross_entropy(z, target)
    assert got.loss.item() == pytest.approx(exact.item(), rel=1e-6)
    grad = (z.softmax(1) - F.one_hot(target, 6)) * (1 - (z / 30) ** 2)
    torch.testing.assert_close(got.grad, grad.float(), rtol=1e-5, atol=1e-12)
    assert (got.grad[0, 4:] == 0).all()


def test_nan_shows_through_bias_and_cap(device):
    x, targets = make(3, 70, device)
    x[1, 5] = float("nan")
    bias = torch.zeros(70, device=device)
    got = C.cross_entropy(x, targets, bias_V=bias, options=C.LossOptions(gradient="new", soft_cap=30.0), config=SMALL)
    assert got.loss.isnan().tolist() == [False, True, False]
    assert got.grad.isnan().any(1).tolist() == [False, True, False]


def test_in_place_writes_the_same_gradient_over_the_logits_and_over_nothing_else(device):
    x, targets = make(4, 100, device)
    wanted = C.cross_entropy(x, targets, options=C.LossOptions(gradient="new"), config=SMALL).grad
    buffer = torch.full((4, 120), 5.0, dtype=torch.bfloat16, device=device)
    buffer[:, 8:108] = x
    got = C.cross_entropy(buffer[:, 8:108], targets, config=SMALL)
    assert got.grad.data_ptr() == buffer[:, 8:].data_ptr()
    assert_bitwise_equal(buffer[:, 8:108].contiguous(), wanted, "gradient")
    assert bool((buffer[:, :8] == 5).all())
    assert bool((buffer[:, 108:] == 5).all())


def test_ignored_rows_have_no_loss_and_no_gradient_even_where_their_logits_are_nan(device):
    x, targets = make(3, 70, device)
    targets[1] = 7
    x[1] = float("nan")
    options = C.LossOptions(gradient="new", ignore_index=7)
    targets[0] = targets[2] = 3
    got = C.cross_entropy(x, targets, options=options, config=SMALL)
    assert got.loss[1] == 0
    assert not got.grad[1].any()
    assert got.grad[0].any()
    fp8 = C.cross_entropy(x, targets, options=C.LossOptions(gradient="fp8", ignore_index=7), config=SMALL)
    assert fp8.scale[1] == 2.0**-126  # the scale of a row of zeros
    assert not fp8.q[1].float().any()


def test_nan_and_inf_and_targets_out_of_range_show_in_their_row_alone(device):
    x, targets = make(7, 90, device)
    x[1, 80] = float("nan")
    x[2, 3] = float("inf")
    targets[3], targets[4] = 90, -1
    x[5, (targets[5] + 1) % 90] = -float("inf")  # a masked entry is no error: its probability is 0
    bad = [False, True, True, True, True, False, False]
    got = C.cross_entropy(x, targets, options=C.LossOptions(gradient="fp8"), config=SMALL)
    assert got.loss.isnan().tolist() == bad
    assert got.scale.isnan().tolist() == bad
    high = C.cross_entropy(x, targets, options=C.LossOptions(gradient="new"), config=SMALL).grad
    assert high.isnan().any(1).tolist() == bad
    assert high[5, (targets[5] + 1) % 90] == 0


# ---- factors of rows ----


def assert_same(got, wanted, name):
    """Of equal bits, but for the sign of a NaN."""
    assert torch.equal(got.isnan(), wanted.isnan()), name
    kept = ~got.isnan()
    assert_bitwise_equal(got[kept], wanted[kept], name)


# Scales of quantized rows, from that of a row of zeros on: tiny, none, large. The largest are beyond what the kernel
# takes for the lowest logit there is.
FACTORS = [2.0**n for n in (-127, -126, -100, -9, -1, 0, 1, 6, 60, 100, 119)]


def make_with_factors(v, device):
    """Logits that wait for their factors, the factors, and what they are multiplied."""
    x, targets = make(len(FACTORS), v, "cpu")
    factor = torch.tensor(FACTORS)
    given = (x.float() / factor.clamp(min=2.0**-110)[:, None]).bfloat16()
    given[:2] = 0
    given[1, 0] = -3.0
    given[4, v // 2] = -float("inf")
    return (t.to(device) for t in (given, factor, (given.float() * factor[:, None]).bfloat16(), targets))


# All forms of the gradient; codes with everything else that is done to the logits, and the loss alone. Whole blocks
# and ends, of which what lies beyond the row must not count, however small the factor; a target and nothing beside it.
CASES = [*(("plain", how, 3001) for how in C.GRADIENTS), ("plain", "fp8", 1), ("plain", "fp8", 50)]
CASES += [*((name, "fp8", 1100) for name in BENT), ("all", "none", 1100)]


@pytest.mark.parametrize(("name", "how", "v"), CASES)
def test_a_factor_counts_as_if_the_logits_had_been_multiplied_by_it(device, name, how, v):
    has_bias, bend = BENT.get(name, (False, {}))
    given, factor, x, targets = make_with_factors(v, device)
    targets[5] = -100
    arguments = {
        "bias_V": torch.randn(v, device=device).bfloat16() if has_bias else None,
        "grad_scale": torch.tensor(1 / 9, device=device),
        "options": C.LossOptions(gradient=how, fp8=E5M2, **bend),
        "config": SMALL,
    }
    got = C.cross_entropy(given, targets, factor_T=factor, **arguments)
    wanted = C.cross_entropy(x, targets, **arguments)
    for part, mine, theirs in zip(got._fields, got, wanted, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            assert_same(mine, theirs, part)


def test_a_factor_that_is_no_power_of_two_keeps_the_digits(device):
    x, targets = make(6, 3001, device)
    factor = torch.tensor([0.3, 7.0, 1e-3, 1.1, 0.7, 3.3], device=device)
    got = C.cross_entropy(x, targets, factor_T=factor, options=C.LossOptions(gradient="new"), config=SMALL)
    exact = gradient(x.double() * factor[:, None].double(), targets, 1.0, torch.float64)
    single = gradient(x.float() * factor[:, None], targets, 1.0, torch.float32)
    assert_no_worse_than(got.loss, single[0], exact[0])
    assert_no_worse_than(got.grad, single[1].bfloat16(), exact[1])


def test_a_row_of_a_nan_factor_is_nan_unless_it_is_ignored(device):
    # A row of x that holds inf or NaN has a NaN scale. Where nobody counts it, it must not reach others' gradients.
    x, targets = make(4, 70, device)
    factor = torch.tensor([0.5, float("nan"), float("nan"), 2.0], device=device)
    targets[2] = -100
    for bias in (None, torch.zeros(70, device=device)):
        for how in ("new", "fp8"):
            options = C.LossOptions(gradient=how, fp8=E5M2)
            got = C.cross_entropy(x, targets, bias_V=bias, factor_T=factor, options=options, config=SMALL)
            assert got.loss.isnan().tolist() == [False, True, False, False]
            made = got.grad if how == "new" else got.q.float() * got.scale[:, None]
            assert made.isnan().all(1).tolist() == made.isnan().any(1).tolist() == [False, True, False, False]
            assert got.loss[2] == 0 and not made[2].any()


@pytest.mark.parametrize("config", C.CONFIGS, ids=str)
def test_every_config_agrees(device, config):
    x, targets = make(2, 5000, device)
    got = C.cross_entropy(x, targets, options=C.LossOptions(gradient="new"), config=config)
    exact = gradient(x, targets, 1.0, torch.float64)
    assert_no_worse_than(got.loss, gradient(x, targets, 1.0, torch.float32)[0], exact[0])
    assert_no_worse_than(got.grad, gradient(x, targets, 1.0, torch.bfloat16)[1], exact[1])


def test_int32_targets_and_fp32_logits_and_no_rows_are_taken(device):
    x, targets = make(4, 60, device)
    a = C.cross_entropy(x.float(), targets.int(), options=C.LossOptions(gradient="new"), config=SMALL)
    torch.testing.assert_close(a.grad, gradient(x, targets, 1.0, torch.float32)[1])
    empty = C.cross_entropy(x[:0], targets[:0])
    assert (empty.loss.shape, empty.grad.shape) == ((0,), (0, 60))


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (lambda x, y: C.cross_entropy(x, y[:1]), "targets_T must have shape"),
        (lambda x, y: C.cross_entropy(x, y.float()), "targets_T has dtype"),
        (lambda x, y: C.cross_entropy(x, y, grad_scale=torch.ones(3)), "grad_scale must be one float32 number"),
        (lambda x, y: C.cross_entropy(x[:, :0], y), "no columns"),
        (lambda x, y: C.cross_entropy(x.T, y), "logits_TV has stride"),
        (lambda x, y: C.cross_entropy(x, y, bias_V=torch.zeros(3)), "bias_V must have shape"),
        (lambda x, y: C.cross_entropy(x, y, factor_T=torch.ones(3)), "factor_T must have shape"),
        (lambda x, y: C.cross_entropy(x, y, factor_T=torch.ones(2).half()), "factor_T is torch.float16"),
        (lambda x, y: C.LossOptions(gradient="fp4"), "gradient must be one of"),
        (lambda x, y: C.LossOptions(logit_scale=float("inf")), "logit_scale is inf"),
        (lambda x, y: C.LossOptions(soft_cap=0.0), "soft_cap is 0.0"),
    ],
)
def test_wrong_arguments_are_named(call, names):
    with pytest.raises(ConfigError, match=names):
        call(torch.randn(2, 8), torch.zeros(2, dtype=torch.int64))


# ---- what the compiler makes of it, without a GPU ----


def compiled(arch, bent, gradient, *, has_factor):
    """The kernel for a vocabulary of 128256, and its config."""
    options = C.LossOptions(gradient=gradient, soft_cap=30.0 if bent in ("cap", "all") else None)
    config = C.default_config(128256, options)
    is_fp8 = gradient == "fp8"
    arguments = {
        "x_ptr": torch.bfloat16,
        "target_ptr": torch.int64,
        "b_ptr": torch.bfloat16 if bent in ("bias", "all") else None,
        "factor_ptr": torch.float32 if has_factor else None,
        "loss_ptr": torch.float32,
        "grad_ptr": torch.bfloat16 if gradient == "new" else None,
        "q_ptr": E4M3 if is_fp8 else None,
        "scale_ptr": torch.float32 if is_fp8 else None,
        "c_ptr": torch.float32,
        "V": "i32:any" if bent == "padded" else "i32",
        **dict.fromkeys(("W", "stride_xt", "stride_gt"), "i32"),
        "ignore_index": "i32:any",
        "FP8_MAX": 448.0,
        "SCALE": 0.0625 if bent in ("scale", "all") else 1.0,
        "CAP": options.soft_cap or 0.0,
        "BLOCK": config.block,
        "THREADS": 32 * config.num_warps,
        "PADDED": bent == "padded",
        "ASM": True,
    }
    return aot.compile_kernel(C._cross_entropy_kernel, arguments, arch=arch, num_warps=config.num_warps), config


@pytest.mark.parametrize(("arch", "has_factor"), [(90, True), (90, False), (100, True)])
@pytest.mark.parametrize("is_fp8", [True, False])
@pytest.mark.parametrize("bent", ["plain", "padded", "bias", "scale", "cap", "all"])
def test_the_kernel_compiles_to_vectors_without_spills(arch, has_factor, is_fp8, bent):
    if is_fp8 and bent in ("cap", "all"):
        pytest.skip("under a cap the gradient is written first and quantized by quantize_rows")
    made, config = compiled(arch, bent, "fp8" if is_fp8 else "new", has_factor=has_factor)
    assert made.spill_bytes == made.stack_bytes == 0
    # As many rows are under way as the config says.
    assert made.registers * 32 * config.num_warps <= 65536
    vectors = config.block // (8 * 32 * config.num_warps)
    # Twice over the row; the bias twice beside it.
    assert made.count(r"ld\.global\S*\.v4\.b32") == (4 if bent in ("bias", "all") else 2) * vectors
    assert made.count(r"st\.global\S*\.v[24]\.b32") == vectors
    assert made.count(r"ex2\.approx") > 0
    # The one logarithm of a row is exact to a unit in the last place: lg2.approx would spoil small losses.
    assert made.count(r"lg2\.approx") == 0


@pytest.mark.parametrize("arch", aot.ARCHS)
@pytest.mark.parametrize("gradient", ["none", "new", "fp8"])
def test_a_factor_is_no_instruction_of_a_logit(arch, gradient):
    # Of some 15 a logit, in a kernel that waits for them: a multiplication in both passes would be two more.
    (plain, config), (made, _) = (compiled(arch, "plain", gradient, has_factor=has) for has in (False, True))
    a_pass = config.block // (32 * config.num_warps)
    for instruction in (r"\bfma\.rn\.f32", r"\bmul(\.rn)?\.f32", r"\bex2\.approx", r"\bselp?\.", r"\bcvt\."):
        assert made.count(instruction) < plain.count(instruction) + a_pass // 2, instruction
    assert made.count(r"ld\.global") == plain.count(r"ld\.global") + 1  # once a row
    assert made.registers * 32 * config.num_warps <= 65536  # as many rows are under way
