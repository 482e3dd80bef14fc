"""On a CPU an engine with nothing in low precision is the model itself: no slower, and the same to the bit."""

import pytest
import torch
import zoo_models

import deepwell as dw
import deepwell.engine.compile as compiling
from deepwell.formats.metrics import assert_bitwise_equal


@pytest.fixture(autouse=True)
def _as_users_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "PLAIN_ON_CPU", True)


def test_a_bf16_engine_on_a_cpu_is_not_compiled_and_says_so(batch: dict[str, torch.Tensor]) -> None:
    model = zoo_models.tiny_model("llama")
    engine = dw.compile(model, precision="bf16")
    want = model(**batch)
    want.loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    got = engine(**batch)
    got.loss.backward()
    assert_bitwise_equal(got.loss, want.loss)
    assert_bitwise_equal(got.logits, want.logits)
    for name, p in model.named_parameters():
        assert_bitwise_equal(p.grad, grads[name])
    report = engine.report()
    assert report.graphs == 0 and not any(report.passes.values())
    assert any("as it was written" in note for note in report.notes)


def test_low_precision_or_inductor_false_asks_for_the_passes(batch: dict[str, torch.Tensor]) -> None:
    engine = dw.compile(zoo_models.tiny_model("llama"), precision="bf16", inductor=False)
    engine(**batch)
    assert engine.report().passes["rms_norm"]
    assert not dw.compile(zoo_models.tiny_model("llama")).options.is_as_written
