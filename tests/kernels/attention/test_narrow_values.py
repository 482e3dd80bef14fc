"""Attention whose values are narrower than its keys: every way against the reference, and which of them may run."""

import pytest
import torch
import torch.nn.functional as F

from deepwell.errors import UnsupportedError
from deepwell.formats.metrics import assert_no_worse_than
from deepwell.kernels.attention import narrow_values
from deepwell.kernels.attention.narrow_values import SDPA, WAYS, NarrowShape, fastest_way, narrow_values_attention
from deepwell.kernels.tune import choose
from deepwell.kernels.tune.choose import check, known_choice, proof_of
from deepwell.kernels.tune.problem import Problem

SHAPE = NarrowShape(B=2, H=4, G=2, S=19, D=24, V=16)


def _written(q, k, v, scale):
    times = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
    future = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
    return (q @ k.mT * scale).masked_fill(future, -torch.inf).softmax(-1) @ v


def _results(function, operands, *given):
    q, k, v, grad = operands
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out = function(*leaves, *given)
    return out, *torch.autograd.grad(out, leaves, grad.to(out.dtype))


@pytest.mark.parametrize("way", WAYS)
def test_each_way_is_attention_written_out(way) -> None:
    operands = SHAPE.tensors("cpu", torch.float64)
    wanted = _results(_written, operands, 0.3)
    for mine, theirs in zip(_results(narrow_values_attention, operands, 0.3, way), wanted, strict=True):
        assert mine.shape == theirs.shape
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)  # flash's lse is fp32


def test_a_way_that_is_wrong_does_not_run(monkeypatch) -> None:
    def values_cut(q, k, v, scale):  # right forward, its gradient of v half
        return F.scaled_dot_product_attention(q, k, v * 0.5 + v.detach() * 0.5, is_causal=True, enable_gqa=True)

    monkeypatch.setitem(narrow_values.WAYS, "padded_flash", values_cut)
    problem = Problem(op="narrow_values", precision="bf16", device="cpu")
    found = {c.name: check(c, problem).reason for c in narrow_values.built_in("narrow_values")}
    assert "dB" in found.pop("padded_flash") and not any(found.values())


def test_the_choice_is_one_of_those_that_are_right(monkeypatch) -> None:
    monkeypatch.setattr(narrow_values, "sources_hash", lambda *modules: "wrong on purpose")
    monkeypatch.setitem(narrow_values.WAYS, "padded_cudnn", lambda q, k, v, scale: v.repeat_interleave(2, 1) * 0)
    shape = NarrowShape(B=1, H=4, G=2, S=40, D=32, V=16)
    choice = fastest_way(shape, torch.bfloat16, "cpu")
    assert choice in WAYS and choice != "padded_cudnn"
    problem = Problem(
        op="narrow_values", m=40, n=32, k=16, precision="bf16", details="1x4x2", exact_m=True, device="cpu"
    )
    kept = known_choice(problem, narrow_values.built_in("narrow_values"))
    assert kept.kernel == choice and [v.name for v in kept.verdicts if v.reason] == ["padded_cudnn"]


def test_torchs_own_way_runs_where_memory_is_short(monkeypatch) -> None:
    def short(*given, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(choose, "choose", short)
    assert fastest_way(SHAPE, torch.bfloat16, "cpu") == SDPA


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "shape",
    [
        NarrowShape(B=2, H=8, G=8, S=512, D=192, V=128),
        NarrowShape(B=1, H=8, G=2, S=300, D=192, V=128),
        NarrowShape(B=2, H=4, G=4, S=257, D=96, V=64),
    ],
    ids=str,
)
def test_each_way_is_the_reference_on_a_gpu_or_says_why_not(way, shape) -> None:
    candidate = next(c for c in narrow_values.built_in("narrow_values") if c.name == way)
    operands = shape.tensors("cuda", torch.bfloat16)
    proof = proof_of(candidate, Problem(op="narrow_values", precision="bf16", device="cuda:0"))
    if proof.reason.startswith("does not take"):
        pytest.skip(proof.reason)
    assert proof.is_passed, proof.reason
    exact = _results(_written, [t.double() for t in operands], shape.D**-0.5)
    own = _results(_written, operands, shape.D**-0.5)
    try:
        mine = candidate.fn(*operands)
    except UnsupportedError as error:  # widths that this torch does not give cuDNN
        assert "cudnn" in way, error
        pytest.skip(str(error))
    for got, theirs, ref in zip(mine, own, exact, strict=True):
        assert_no_worse_than(got, theirs, ref.float())


@pytest.mark.gpu
def test_latent_attention_runs_by_a_way_that_was_measured() -> None:
    shape = NarrowShape(B=1, H=16, G=16, S=2048, D=192, V=128)
    assert fastest_way(shape, torch.bfloat16, "cuda:0") in WAYS
