"""Stages without processes: which layers they hold, what they hand on, what is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from cases import make_model
from torch import nn

import deepwell as dw
from deepwell.errors import ConfigError, UnsupportedError
from deepwell.planner.layout import Layout
from deepwell.train.parallel.pipeline import check_micro_batches, check_schedule
from deepwell.train.parallel.stages import Cut, spans


def test_spans_cover_the_layers_in_order() -> None:
    found = spans(Layout(dp=1, pp=2, virtual_stages=2), 7)
    assert [i for span in found for i in span.layers] == list(range(7))
    assert [span.is_first for span in found] == [True, False, False, False]
    assert [span.is_last for span in found] == [False, False, False, True]
    assert [len(s.layers) for s in spans(Layout(dp=1, pp=2, stage_layers=(1, 3)), 4)] == [1, 3]


@pytest.mark.parametrize("schedule", ["zero_bubble", "zbv", "dualpipev"])
def test_schedules_that_split_the_backward_are_refused(schedule: str) -> None:
    with pytest.raises(UnsupportedError, match=f"schedule {schedule} splits the backward.*1f1b"):
        check_schedule(Layout(dp=1, pp=2, schedule=schedule, virtual_stages=2))


def test_other_layouts_that_are_not_executed_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="gpipe has one stage a rank"):
        check_schedule(Layout(dp=1, pp=2, schedule="gpipe", virtual_stages=2))
    check_schedule(Layout(dp=1, pp=2, virtual_stages=2))


def test_the_number_of_micro_batches_is_checked() -> None:
    with pytest.raises(ConfigError, match=r"1f1b of 4 stages has 3 micro-batches a step; raise global_batch"):
        check_micro_batches(Layout(dp=1, pp=4), 3)
    with pytest.raises(ConfigError, match="a step has 5; take a multiple of 2"):
        check_micro_batches(Layout(dp=1, pp=2, virtual_stages=2), 5)
    check_micro_batches(Layout(dp=1, pp=2, virtual_stages=2), 4)
    check_micro_batches(Layout(dp=1, pp=4, schedule="gpipe"), 1)


@pytest.mark.parametrize("name", ["tied:4", "qwen3:4", "plain"])
def test_stages_one_after_another_are_the_model(name: str) -> None:
    """By the model's own forward, eagerly: hidden states go from stage to stage, logits come out of the last."""
    model = make_model(name).eval()
    tokens = torch.randint(0, 128, (2, 8))
    with torch.no_grad():
        wanted = model(tokens)
    wanted = getattr(wanted, "logits", wanted)
    ir = dw.capture(model)
    layers = ir.num_layers
    stages = spans(Layout(dp=1, pp=2, virtual_stages=layers // 2), layers)
    x, names = tokens, {}
    for span in stages:
        part = make_model(name).eval()
        cut = Cut(SimpleNamespace(deepwell=SimpleNamespace(ir=ir, model=part)), (span,))  # nothing is compiled
        assert cut.is_tied == name.startswith("tied")
        names |= dict(part.named_parameters())
        with torch.no_grad(), cut.only(span, x):
            out = part(tokens)
        x = getattr(out, "logits", out)
    torch.testing.assert_close(x, wanted, rtol=0, atol=0)
    own = {key for key, _ in model.named_parameters(remove_duplicate=False)}
    assert set(names) == own


def test_models_that_do_more_than_hand_on_are_refused() -> None:
    first = spans(Layout(dp=1, pp=2), 2)[:1]
    for name, why in (("gpt2", r"pp: GPT2LMHeadModel has transformer\.wpe"), ("gemma2", None)):
        model = make_model(name)
        engine = SimpleNamespace(deepwell=SimpleNamespace(ir=dw.capture(model), model=model))
        if why is None:  # its embedding scales by itself: nothing is between
            Cut(engine, first)
            continue
        with pytest.raises(UnsupportedError, match=why):
            Cut(engine, first)

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(128, 64)
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(2))
            self.head = nn.Linear(64, 128, bias=False)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embed(tokens) * 8.0
            for layer in self.layers:
                x = x + layer(x)
            return self.head(x)

    scaled = Scaled()
    ir = dw.capture(scaled, torch.zeros(1, 16, dtype=torch.int64))
    engine = SimpleNamespace(deepwell=SimpleNamespace(ir=ir, model=scaled))
    with pytest.raises(UnsupportedError, match="pp: Scaled does more between its embedding"):
        Cut(engine, first)
