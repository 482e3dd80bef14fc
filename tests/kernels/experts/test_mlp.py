"""Experts as one function: every choice's own products, in all shapes that routers make."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deepwell.errors import ConfigError
from deepwell.formats.metrics import assert_bitwise_equal, assert_no_worse_than, sqnr_db
from deepwell.kernels.experts.mlp import FP8_SCHEME, experts_mlp, schemes_of
from deepwell.kernels.experts.reference import ExpertActivation, experts_mlp_ref, parse_activation

H, F, E, K = 32, 24, 4, 2
GPT_OSS = ExpertActivation(interleaved=True, limit=0.7, alpha=1.702, up_shift=1.0)
ACTIVATIONS = {
    "swiglu": ExpertActivation(), "plain_relu2": ExpertActivation(function="relu2", gated=False), "gpt_oss": GPT_OSS,
    "clamped": ExpertActivation(limit=0.5), "geglu": ExpertActivation(function="gelu_tanh"),
}  # fmt: skip


def operands(tokens, activation, *, is_kn=False, bias=False, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    g = F * (1 + activation.gated)
    x = torch.randn(tokens, H).to(dtype).requires_grad_()
    shapes = [(E, H, g), (E, F, H)] if is_kn else [(E, g, H), (E, H, F)]
    stored = [(torch.randn(shape) / 4).to(dtype).requires_grad_() for shape in shapes]
    biases = [torch.randn(E, n).to(dtype).requires_grad_() for n in (g, H)] if bias else [None, None]
    index = torch.stack([torch.randperm(E)[:K] for _ in range(tokens)]) if tokens else torch.zeros(0, K).long()
    weight = torch.rand(tokens, K).to(dtype).requires_grad_()
    return x, stored, biases, index, weight


def one_by_one(x, stored, biases, index, weight, activation, is_kn=False):
    """Each choice by itself, in fp64."""
    w1, w2 = (w.double().mT if is_kn else w.double() for w in stored)
    rows = []
    for t in range(len(x)):
        total = x.new_zeros(H, dtype=torch.float64)
        for j in range(index.shape[1]):
            e = int(index[t, j])
            if e < 0:
                continue
            h = w1[e] @ x[t].double() + (0 if biases[0] is None else biases[0][e].double())
            y = w2[e] @ activation.of_rows(h) + (0 if biases[1] is None else biases[1][e].double())
            total = total + weight[t, j].double() * y
        rows.append(total)
    return torch.stack(rows) if rows else x.new_zeros(0, H, dtype=torch.float64)


def views(stored, is_kn):
    return [w.transpose(1, 2) if is_kn else w for w in stored]


@pytest.mark.parametrize("is_kn", [False, True], ids=["nk", "kn"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_values_and_all_gradients_are_those_of_each_choice_by_itself(name, is_kn):
    how, bias = ACTIVATIONS[name], name in ("gpt_oss", "plain_relu2")
    x, stored, biases, index, weight = operands(11, how, is_kn=is_kn, bias=bias)
    index[3] = -1  # a token that nobody takes
    index[5, 1] = -1
    index[index == 2] = 1  # an expert that nobody chose; some choose one twice
    leaves = [x, *stored, *(b for b in biases if b is not None), weight]
    dy = torch.randn(11, H)
    got = experts_mlp(x, *views(stored, is_kn), index, weight, biases=tuple(biases), activation=how)
    wanted = one_by_one(x, stored, biases, index, weight, how, is_kn)
    assert sqnr_db(wanted, got) > 120
    for ref, made in zip(
        torch.autograd.grad(wanted, leaves, dy.double()), torch.autograd.grad(got, leaves, dy), strict=True
    ):
        assert sqnr_db(ref, made) > 120


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spread", ["none", "one token", "all to one", "nobody"])
def test_any_distribution(spread, dtype):
    how = ExpertActivation()
    x, stored, biases, index, weight = operands({"none": 0, "one token": 1}.get(spread, 9), how, dtype=dtype)
    if spread == "all to one":
        index = torch.full_like(index, 3)
    if spread == "nobody":
        index = torch.full_like(index, -1)
    y = experts_mlp(x, *stored, index, weight)
    grads = torch.autograd.grad(y.float().sum(), (x, *stored, weight))
    assert y.shape == x.shape and y.dtype == dtype and all(g.isfinite().all() for g in (y, *grads))
    wanted = one_by_one(x, stored, biases, index, weight, how)
    if y.numel() and spread != "nobody":
        assert sqnr_db(wanted, y) > (120 if dtype == torch.float32 else 40)
    chosen = set(index[index >= 0].tolist())
    assert {e for e in range(E) if grads[1][e].any()} == chosen


class _Counts(TorchDispatchMode):
    """How often each op runs that reads weights."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().removeprefix("deepwell::")
        if name in ("expert_scales", "quantize_experts", "quantize_experts_transposed"):
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("is_kn", "forward", "backward"), [
    (False, {"quantize_experts": 2}, {"quantize_experts_transposed": 2}),
    (True, {"expert_scales": 2, "quantize_experts_transposed": 2}, {"quantize_experts": 2}),
])  # fmt: skip
def test_no_codes_of_weights_are_made_that_nobody_reads(is_kn, forward, backward):
    how = ExpertActivation()
    x, stored, _, index, weight = operands(9, how, is_kn=is_kn, dtype=torch.bfloat16)
    with _Counts() as counts:
        y = experts_mlp(x, *views(stored, is_kn), index, weight, precision="fp8")
    assert counts.found == forward
    with _Counts() as counts:
        torch.autograd.grad(y.float().sum(), (x, *stored, weight))
    assert counts.found == backward


@pytest.mark.parametrize("is_kn", [False, True], ids=["nk", "kn"])
@pytest.mark.parametrize("name", ["swiglu", "gpt_oss"])
def test_gradients_in_fp64_are_the_functions_slopes(name, is_kn):
    how = ACTIVATIONS[name]
    x, stored, biases, index, weight = operands(5, how, is_kn=is_kn, bias=True, dtype=torch.float64)
    index[1] = -1

    def run(x, weight, *rest):
        return experts_mlp(x, *views(rest[:2], is_kn), index, weight, biases=rest[2:], activation=how)

    assert torch.autograd.gradcheck(run, (x, weight, *stored, *biases), fast_mode=True)


@pytest.mark.parametrize("precision", ["bf16", "fp8", "|".join(["emulate:mxfp8"] * 3), "autocast"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gate_and_up_may_be_two_weights(dtype, precision):
    how, how_gemms = ACTIVATIONS["clamped"], "bf16" if precision == "autocast" else precision
    x, (w1, w2), _, index, weight = operands(11, how, dtype=dtype)
    index[3] = -1
    pair = tuple(half.detach().clone().requires_grad_() for half in w1.chunk(2, dim=1))
    given, dy = (w2, index, weight), torch.randn(11, H).to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
        y = experts_mlp(x, pair, *given, activation=how, precision=how_gemms)
        if precision == "autocast":
            wanted = experts_mlp(x, w1, *given, activation=how)
        else:  # FP8 of one weight is another op, fused
            wanted = experts_mlp_ref(x, w1, *given, activation=how, schemes=schemes_of(how_gemms))
    assert_bitwise_equal(y, wanted)
    gate, up, *others = torch.autograd.grad(y, (*pair, x, w2, weight), dy)
    whole, *own = torch.autograd.grad(wanted, (w1, x, w2, weight), dy)
    assert_bitwise_equal(torch.cat([gate, up], 1), whole)
    for made, ref in zip(others[1:], own[1:], strict=True):
        assert_bitwise_equal(made, ref)
    # Both halves of dx are rounded by themselves.
    floor = 24 if "fp8" in how_gemms else 110 if (dtype, precision) == (torch.float32, "bf16") else 45
    assert sqnr_db(own[0], others[0]) > floor


def test_rows_in_bf16_meet_weights_in_fp32():
    x, stored, _, index, weight = operands(9, ExpertActivation())
    y = experts_mlp(x.bfloat16(), *stored, index, weight)
    y.float().square().sum().backward()
    wanted = experts_mlp(x, *(w.bfloat16().float() for w in stored), index, weight)
    assert y.dtype == torch.bfloat16 and stored[0].grad.dtype == torch.float32 and sqnr_db(wanted, y.float()) > 40


def test_bf16_is_no_worse_than_torch_and_widths_need_no_alignment():
    torch.manual_seed(0)
    x, index, weight = torch.randn(13, 10), torch.randint(0, 3, (13, 2)), torch.rand(13, 2)
    w1, w2 = torch.randn(3, 14, 10) / 3, torch.randn(3, 10, 7) / 3
    wanted = experts_mlp(x, w1, w2, index, weight)
    own = torch.zeros(13, 10)
    for t in range(13):
        for j, e in enumerate(index[t]):
            h = w1[e].bfloat16() @ x[t].bfloat16()
            own[t] += weight[t, j] * (w2[e].bfloat16() @ ExpertActivation().of_rows(h)).float()
    got = experts_mlp(x.bfloat16(), w1.bfloat16(), w2.bfloat16(), index, weight)
    assert_no_worse_than(got.float(), own.bfloat16().float(), wanted)


@pytest.mark.parametrize("is_kn", [False, True], ids=["nk", "kn"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_fp8_is_one_op_and_rounds_no_more_than_its_products_one_by_one(name, is_kn):
    how, bias = ACTIVATIONS[name], name in ("gpt_oss", "plain_relu2")
    x, stored, biases, index, weight = operands(60, how, is_kn=is_kn, bias=bias, dtype=torch.bfloat16)
    index[4, 0] = -1
    index[index == 2] = 1  # an expert that nobody chose
    given = (x, *views(stored, is_kn), index, weight)
    leaves = [x, *stored, *(b for b in biases if b is not None), weight]
    dy = torch.randn(60, H).bfloat16()
    exact = one_by_one(x, stored, biases, index, weight, how, is_kn)
    fused = experts_mlp(*given, biases=tuple(biases), activation=how, precision="fp8")
    apart = experts_mlp_ref(*given, biases=tuple(biases), activation=how, schemes=(FP8_SCHEME, FP8_SCHEME))
    assert fused.grad_fn.name().startswith("_FusedExperts")
    wanted = (exact, *torch.autograd.grad(exact, leaves, dy.double()))
    ways = [(y, *torch.autograd.grad(y, leaves, dy)) for y in (fused, apart)]
    # Where a clamp is near, FP8 puts a number on its other side, whatever runs it: no floor.
    floor = 20.0 if how.limit is None else 0.0
    for i, (ref, one, other) in enumerate(zip(wanted, *ways, strict=True)):
        assert sqnr_db(ref, one) > max(floor, sqnr_db(ref, other) - 1.2), i
    assert not ways[0][2][2].any() and not ways[0][3][2].any()


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_compiled_without_breaks_it_is_the_same(precision):
    x, stored, _, index, weight = operands(12, GPT_OSS, dtype=torch.bfloat16)
    compiled = torch.compile(experts_mlp, backend="aot_eager", fullgraph=True)
    index[0] = -1
    dy = torch.randn(12, H).bfloat16()
    results = []
    for function in (experts_mlp, compiled):
        y = function(x, *stored, index, weight, activation=GPT_OSS, precision=precision)
        results.append((y, *torch.autograd.grad(y, (x, *stored, weight), dy)))
    for eager, made in zip(*results, strict=True):
        assert_bitwise_equal(made, eager)


def test_wrong_arguments_are_named_and_words_round_trip():
    x, stored, _, index, weight = operands(3, ExpertActivation())
    with pytest.raises(ConfigError, match="w_gate_up is"):
        experts_mlp(x, stored[0][:, :-2], stored[1], index, weight)
    with pytest.raises(ConfigError, match="top_weight"):
        experts_mlp(x, *stored, index, weight[:, :1])
    with pytest.raises(ConfigError, match="precision"):
        experts_mlp(x, *stored, index, weight, precision="int4")
    with pytest.raises(ConfigError, match="no gate"):
        ExpertActivation(gated=False, limit=1.0)
    assert all(parse_activation(str(how)) == how for how in ACTIVATIONS.values())
