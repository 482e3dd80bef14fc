"""Attention inside documents, windows and under a soft cap: FlexAttention against the reference, and its blocks."""

import itertools
import shutil
from dataclasses import replace

import pytest
import torch

from deepwell.formats.metrics import assert_no_worse_than
from deepwell.kernels.attention import flex
from deepwell.kernels.attention.flash import NO_WINDOW
from deepwell.kernels.attention.flex import FLEX, NO_CAP, FlexShape, flex_attention, flex_attention_ref
from deepwell.kernels.tune.choose import check, known_choice, proof_of
from deepwell.kernels.tune.problem import Problem


def _masked(q, k, v, documents, scale, window, cap):
    """Pair by pair, as the rule says."""
    size, times = q.shape[2], q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
    scores = q @ k.mT * scale
    scores = scores if not cap else torch.tanh(scores / cap) * cap
    shut = torch.ones(q.shape[0], 1, size, size, dtype=torch.bool, device=q.device)
    for b, i in itertools.product(range(q.shape[0]), range(size)):
        first = 0 if window == NO_WINDOW else max(0, i - window + 1)
        for j in range(first, i + 1):
            shut[b, 0, i, j] = documents is not None and bool(documents[b, i] != documents[b, j])
    return scores.masked_fill(shut, -torch.inf).softmax(-1) @ v


DOCUMENTS = {
    "none": lambda at: None,
    "packed": lambda at: (at + torch.tensor([[0], [3]])) // 9,
    "one": torch.zeros_like,
    "in any order": lambda at: (at * 7) % 3 - 1,  # numbers come back: no document is a stretch of tokens
}


@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("window", [NO_WINDOW, 1, 11])
@pytest.mark.parametrize("cap", [NO_CAP, 2.0])
def test_the_reference_and_flex_attention_are_masked_attention(monkeypatch, documents, window, cap) -> None:
    monkeypatch.setattr(flex, "BLOCK", 8)  # several blocks, the last of them ragged
    size = 29
    numbers = DOCUMENTS[documents](torch.arange(size).expand(2, -1))
    q, k, v = (torch.randn(2, n, size, w, dtype=torch.float64).requires_grad_() for n, w in ((4, 8), (2, 8), (2, 6)))
    grad = torch.randn(2, 4, size, 6, dtype=torch.float64)
    wanted = _masked(q, k, v, numbers, 0.3, window, cap)
    wanted = wanted, *torch.autograd.grad(wanted, (q, k, v), grad)
    for function in (flex_attention_ref, flex_attention):
        out = function(q, k, v, numbers, 0.3, window, cap)
        for mine, theirs in zip((out, *torch.autograd.grad(out, (q, k, v), grad)), wanted, strict=True):
            torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("window", [NO_WINDOW, 1, 8, 11, 20])
def test_no_open_pair_is_in_a_block_that_is_skipped(monkeypatch, documents, window) -> None:
    # FlexAttention's kernels read nothing else; in eager mode it does not look at blocks.
    monkeypatch.setattr(flex, "BLOCK", 8)
    size, count = 45, 6
    numbers = DOCUMENTS[documents](torch.arange(size).expand(2, -1))
    is_open = flex._is_open(numbers, size, window, torch.device("cpu"))
    *_, queries, keys = is_open.shape
    padded = torch.zeros(is_open.shape[0], count * 8, count * 8, dtype=torch.bool)
    padded[:, :queries, :keys] = is_open[:, 0]
    inside = torch.zeros_like(padded)
    inside[:, :queries, :keys] = True
    pairs, there = (t.unflatten(2, (count, 8)).unflatten(1, (count, 8)).transpose(2, 3) for t in (padded, inside))
    some, whole = pairs.flatten(3).any(-1), (pairs | ~there).flatten(3).all(-1)
    lists = flex.open_blocks(numbers, size, window, torch.device("cpu"))
    found = [_dense(*lists[2:4]), _dense(*lists[4:6])]
    assert not (found[0] & found[1]).any()  # each block once
    assert not (some & ~(found[0] | found[1])).any()  # none forgotten
    assert not (found[1] & ~whole).any()  # none without its mask that needs it
    if documents in ("none", "one", "packed"):
        assert torch.equal(found[0] | found[1], some.expand_as(found[0]))  # and none too many
    for at in (6, 8):  # the same lists by blocks of keys, for the backward
        assert torch.equal(_dense(*lists[at : at + 2]).mT, found[(at - 6) // 2])


def _dense(counts, indices):
    """[B, queries' blocks, keys' blocks] of FlexAttention's lists."""
    made = torch.zeros(indices.shape[0], indices.shape[2], indices.shape[2], dtype=torch.bool)
    for b, i in itertools.product(range(indices.shape[0]), range(indices.shape[2])):
        made[b, i, indices[b, 0, i, : counts[b, 0, i]].long()] = True
    return made


@pytest.mark.parametrize("wrong", ["window", "cap", "documents"])
def test_flex_attention_that_is_wrong_does_not_run(monkeypatch, wrong) -> None:
    problem = Problem(op="flex_attention", precision="bf16", device="cpu")
    candidate = next(c for c in flex.built_in("flex_attention") if c.name == FLEX)
    assert check(candidate, problem).is_passed

    def off(q, k, v, documents, scale, window, cap):
        documents = documents if wrong != "documents" or documents is None else documents * 0
        window = window + (wrong == "window" and window != NO_WINDOW)
        return flex_attention_ref(q, k, v, documents, scale, window, cap * (1.2 if wrong == "cap" else 1))

    monkeypatch.setattr(flex, "flex_attention", off)
    assert "dB" in check(candidate, problem).reason


def test_what_is_written_stays_unless_flex_attention_gains(monkeypatch) -> None:
    shape = FlexShape(B=1, H=2, G=1, S=40, D=16, V=16, has_documents=True)
    monkeypatch.setattr(flex, "sources_hash", lambda *modules: "wrong on purpose")  # its proof is not the real one's
    monkeypatch.setattr(flex, "flex_attention", lambda q, *given: q * 0)
    assert not flex.gains(shape, torch.bfloat16, "cpu")  # never a wrong one
    assert known_choice(flex._problem(shape, torch.bfloat16, "cpu"), flex.built_in("flex_attention")).kernel != FLEX
    seen = []

    def choose(problem, candidates, setup, *, rules):
        seen.append((problem.key, [c.name for c in candidates], rules.default))
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(flex, "choose", choose)
    shape = replace(shape, S=41)
    assert not flex.gains(shape, torch.bfloat16, "cpu")
    assert seen == [("flex_attention 41x16x16 bf16 bfloat16 1x2x1 w-1 c0 d1", ["as_written", FLEX], "as_written")]


def test_it_is_timed_in_a_process_of_its_own(monkeypatch) -> None:
    # As on a GPU, where the engine asks while its graph is compiled.
    shape = FlexShape(B=1, H=2, G=1, S=40, D=16, V=16, cap=5.0)
    choice, reason = flex.measured_apart(shape, torch.bfloat16, "cpu")
    assert choice is not None, reason
    assert {verdict.name for verdict in choice.verdicts} == {"as_written", FLEX}
    assert [verdict.reason for verdict in choice.verdicts] == ["", ""]
    monkeypatch.setattr(flex, "_ENTRY", "raise SystemExit(3)")
    assert flex.measured_apart(shape, torch.bfloat16, "cpu") == (None, "ended its process with status 3")


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="Inductor on a CPU needs a compiler")
def test_what_inductor_makes_of_a_candidate_has_its_gradients() -> None:
    # FlexAttention itself has no backward on a CPU: what is written stands for it.
    q, k, v = (torch.randn(1, heads, 20, 8).requires_grad_() for heads in (4, 2, 2))
    mask = torch.zeros(20, 20).masked_fill(torch.ones(20, 20).triu(1).bool(), -torch.inf)
    run = flex.compiled(flex.as_written, [q, k, v], (mask, 0.3, 5.0), by_inductor=True)
    results = []
    for out in (run(q, k, v), flex_attention_ref(q, k, v, None, 0.3, NO_WINDOW, 5.0)):
        results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs)


GPU_SHAPES = [
    FlexShape(B=2, H=8, G=2, S=1024, D=128, V=128, has_documents=True),
    FlexShape(B=1, H=4, G=4, S=700, D=64, V=64, window=200, has_documents=True),
    FlexShape(B=1, H=4, G=2, S=1024, D=256, V=256, cap=50.0),
    FlexShape(B=2, H=4, G=2, S=640, D=256, V=256, window=300, cap=50.0),
]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", GPU_SHAPES, ids=str)
def test_compiled_flex_attention_is_the_reference_on_a_gpu(shape) -> None:
    candidate = next(c for c in flex.built_in("flex_attention") if c.name == FLEX)
    proof = proof_of(candidate, Problem(op="flex_attention", precision="bf16", device="cuda:0"))
    assert proof.is_passed, proof.reason
    given = shape.operands("cuda", torch.bfloat16, lengths=333)
    mine = candidate.fn(*given, shape.window, shape.cap)

    def run(dtype):
        leaves = [t.detach().to(dtype).requires_grad_() for t in given[:3]]
        out = flex.as_written(*leaves, given[4], shape.D**-0.5, shape.cap) if dtype == torch.bfloat16 else None
        if out is None:
            out = flex_attention_ref(*leaves, given[3], shape.D**-0.5, shape.window, shape.cap)
        return out, *torch.autograd.grad(out, leaves, given[5].to(dtype))

    for got, theirs, ref in zip(mine, run(torch.bfloat16), run(torch.float64), strict=True):
        assert_no_worse_than(got, theirs, ref.float())


@pytest.mark.gpu
def test_flex_attention_is_timed_on_a_gpu() -> None:
    shape = FlexShape(B=1, H=8, G=2, S=2048, D=128, V=128, has_documents=True)
    assert flex.gains(shape, torch.bfloat16, "cuda:0") in (True, False)
