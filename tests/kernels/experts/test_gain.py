"""Experts in FP8 against bf16: both ways are what the engine runs, right on the operands on which they are timed."""

import pytest
import torch

from deepwell.formats.metrics import sqnr_db
from deepwell.kernels.experts import gain
from deepwell.kernels.experts.gain import Block
from deepwell.kernels.experts.mlp import run_experts
from deepwell.kernels.tune import choose

pytestmark = pytest.mark.usefixtures("no_choices")
SWIGLU = "silu,True,False,None,None,0.0"
GPT_OSS = "silu,True,True,7.0,1.702,1.0"
QWEN3 = Block(experts=128, width=2048, ffn=768, top_k=8, activation=SWIGLU)


@pytest.mark.parametrize(("activation", "biases"), [(SWIGLU, (False, False)), (GPT_OSS, (True, True))])
@pytest.mark.parametrize("stored", ["nk", "kn"])
def test_both_ways_run_and_are_right(activation, biases, stored):
    # On a CPU the figures mean nothing, but the same code runs.
    block = Block(experts=4, width=64, ffn=48, top_k=2, activation=activation, biases=biases, stored=stored)
    before = torch.get_rng_state()
    with torch.inference_mode():
        choice = gain.measure(block, 24, "cpu")
    assert torch.equal(torch.get_rng_state(), before)
    assert {verdict.name for verdict in choice.verdicts} == {"fp8", "bf16"}
    assert all(verdict.us > 0 and verdict.sqnr_db >= 18 for verdict in choice.verdicts)
    assert ("up bias down bias" in choice.problem) == all(biases) and stored in choice.problem
    assert gain.measure(block, 30, "cpu").how == "cached"  # the same bucket


def test_a_way_that_is_wrong_is_rejected_with_its_reason(monkeypatch):
    def doubled(*given):
        return run_experts(*given) * (2.0 if given[-1] == "fp8" else 1.0)

    monkeypatch.setattr(gain, "run_experts", doubled)
    found = gain.experts_would_gain(Block(experts=4, width=64, ffn=48, top_k=2, activation=SWIGLU), 24, "cpu")
    assert not found.gains and "wrong at" in found.rejected
    assert (found.n, found.k, found.tokens) == (96, 64, 32)


def test_every_expert_is_chosen_as_often_and_leaves_learn():
    x, up, down, index, weight, *biases, dy = gain.operands(
        Block(experts=8, width=16, ffn=8, top_k=2, activation=GPT_OSS, biases=(True, False), stored="kn"), 32, "cpu"
    )
    assert torch.bincount(index.flatten()).tolist() == [8] * 8
    assert all(len(set(row)) == 2 for row in index.tolist())
    assert (up.shape, down.shape) == ((8, 16, 16), (8, 16, 8)) and up.transpose(1, 2).is_contiguous()
    assert biases[0].shape == (8, 16) and biases[1] is None
    assert all(leaf.is_leaf and leaf.requires_grad for leaf in (x, up, down, weight, biases[0]))
    assert not dy.requires_grad and dy.shape == x.shape


def test_a_large_block_is_timed_with_fewer_experts_and_as_many_tokens_for_each(monkeypatch):
    monkeypatch.setattr(gain, "_MOST_NUMBERS", 3 * 16 * 24)
    x, up, *_ = gain.operands(Block(experts=8, width=16, ffn=8, top_k=2, activation=SWIGLU), 64, "cpu")
    assert (up.shape[0], x.shape[0]) == (3, 24)
    x, up, *_ = gain.operands(Block(experts=8, width=16, ffn=8, top_k=6, activation=SWIGLU), 64, "cpu")
    assert (up.shape[0], x.shape[0]) == (6, 48)  # a token's choices are different experts


@pytest.mark.gpu
def test_many_rows_an_expert_gain_and_the_choice_is_kept():
    large = gain.experts_would_gain(QWEN3, 32_768, "cuda:0")
    few = gain.experts_would_gain(QWEN3, 512, "cuda:0")
    assert large.gains and not large.rejected and not few.gains
    choose.forget()
    assert gain.experts_would_gain(QWEN3, 32_768, "cuda:0") == large  # from the file


@pytest.mark.gpu
def test_both_ways_are_right_on_a_gpu():
    x, *given, up_bias, down_bias, _ = gain.operands(QWEN3, 1024, "cuda:0")
    plain, fp8 = (run_experts(x, *given, (up_bias, down_bias), SWIGLU, name) for name in ("bf16", "fp8"))
    assert sqnr_db(plain, fp8) > gain.FLOORS_DB["fp8"]
