"""An engine has the attributes of its model, and its own where they hide nothing: read, written, trained, exported."""

import copy
import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import zoo_models
from torch import Tensor, nn

import deepwell as dw
from deepwell.engine.report import EngineReport
from deepwell.formats.metrics import assert_bitwise_equal

# Every name that an engine has beside those of nn.Module.
OWN = ("model", "ir", "policy", "plan", "step", "bound", "options", "overrides", "regions", "breaks", "report", "run",
       "at_step", "override", "set_overrides", "check_fragile", "use_regions", "recompute", "recomputed", "fragile",
       "device_name", "device_type", "engine", "generation", "bind_at", "see", "live", "is_settled",
       "is_replayed")  # fmt: skip


class Shadowing(nn.Module):
    """A decoder whose attributes have all the names that an engine uses, and methods of nn.Module of its own."""

    def __init__(self, vocab: int = 64, width: int = 32) -> None:
        super().__init__()
        for name in OWN:
            setattr(self, name, f"the model's {name}")
        self.model = nn.ModuleDict({"embed": nn.Embedding(vocab, width)})
        self.policy = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(width, 64), "down": nn.Linear(64, width)}) for _ in range(2)
        )
        self.head = nn.Linear(width, vocab, bias=False)
        self.moved = 0

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, *, scale: float = 1.0) -> Any:
        x = self.model["embed"](input_ids)
        for layer in self.policy:
            x = x + layer["down"](F.relu(layer["up"](x)))
        logits = self.head(x) * scale
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def float(self) -> "Shadowing":
        self.moved += 1
        return super().float()


IDS = torch.arange(32).view(2, 16)


def test_a_models_own_names_win_and_the_engines_are_always_at_deepwell() -> None:
    model = Shadowing()
    engine = dw.compile(model, precision="mxfp8")
    assert {name for name in vars(engine.deepwell) if not name.startswith("_")} <= {*OWN}
    assert {name for name in vars(type(engine.deepwell)) if not name.startswith("_")} <= {*OWN}
    for name in OWN:
        assert getattr(engine, name) is getattr(model, name), name
    assert engine.deepwell.model is model and isinstance(engine.deepwell.policy, dw.PrecisionPolicy)
    assert engine.get_submodule("policy.0.up") is model.policy[0]["up"]
    assert engine.get_parameter("head.weight") is model.head.weight
    assert isinstance(engine.deepwell.report(), EngineReport)
    assert engine.deepwell.at_step(3) is engine
    # A method of nn.Module that the model has its own version of, and which returns the model.
    assert engine.float() is engine and engine.moved == model.moved == 1
    plain = dw.compile(nn.Sequential(nn.Linear(32, 32)), precision="mxfp8")
    assert isinstance(plain.report(), EngineReport) and plain.options is plain.deepwell.options
    with pytest.raises(AttributeError, match="'Sequential' object has no attribute 'nowhere'"):
        _ = plain.nowhere


def test_what_is_set_on_an_engine_reaches_the_model() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l, self.scale = nn.Linear(16, 16), 1.0

        def forward(self, x: Tensor) -> Tensor:
            return self.l(x) * self.scale

    model, x = Scaled(), torch.randn(2, 16)
    engine = dw.compile(model, precision="bf16")
    before = engine(x)
    engine.scale = 4.0
    assert model.scale == engine.scale == 4.0
    assert_bitwise_equal(engine(x), before * 4)
    engine.extra = nn.Parameter(torch.ones(3))
    assert model.extra is engine.extra and "extra" in dict(engine.named_parameters())
    engine.step = 7  # the model's from now on; the engine's is where it was
    assert engine.step == model.step == 7 and engine.deepwell.step == 0
    del engine.step, engine.extra
    assert engine.step == 0 and not hasattr(model, "step") and not hasattr(engine, "extra")
    with pytest.raises(AttributeError, match="own"):
        engine.deepwell = None
    # Wrappers put another forward around a model; one that calls the model's own must end.
    inner, seen = engine.forward, []
    engine.forward = lambda *args: seen.append(1) or inner(*args)
    engine(x)
    assert seen == [1] and "forward" not in vars(model)
    del engine.forward
    assert_bitwise_equal(engine(x), before * 4)


def test_an_engine_looks_like_its_model() -> None:
    model = zoo_models.tiny_model("llama", num_key_value_heads=2)
    engine = dw.compile(model, precision="bf16")
    assert inspect.signature(engine.forward) == inspect.signature(model.forward)
    assert {"lm_head", "config", "generate", "report", "deepwell", "save_pretrained"} <= {*dir(engine)}
    assert engine.model is model.model and engine.model.layers is model.model.layers
    assert engine.get_submodule("model.layers.0") is model.model.layers[0]
    assert engine.get_parameter("model.norm.weight") is model.model.norm.weight
    assert not engine.eval().training and not model.training and engine.train().training
    seen: list[str] = []
    engine.register_forward_hook(lambda *_: seen.append("engine"))
    model.register_forward_hook(lambda *_: seen.append("model"))
    engine(input_ids=IDS)
    assert seen == ["model", "engine"]
    assert engine.to(torch.float32) is engine and engine.float() is engine and engine.requires_grad_() is engine
    again = copy.copy(engine)
    assert again.lm_head is model.lm_head and again.deepwell is engine.deepwell


@pytest.mark.parametrize("strict", [False, True])
def test_torch_export_gets_the_model_as_it_was_written(strict: bool) -> None:
    model, x = nn.Sequential(nn.Linear(32, 32), nn.GELU()), torch.randn(4, 32)
    engine = dw.compile(model, precision="mxfp8")
    engine(x)
    program = torch.export.export(engine, (x,), strict=strict)
    assert_bitwise_equal(program.module()(x), model(x))
    assert {*program.state_dict} == {*model.state_dict()}


def test_a_model_with_the_names_of_an_engine_trains_saves_and_exports(tmp_path) -> None:
    engine = dw.compile(Shadowing(), precision="mxfp8", example_inputs={"input_ids": IDS, "labels": IDS})
    data = [{"input_ids": IDS, "labels": IDS}]
    trainer = dw.Trainer.from_engine(engine, optimizer="adamw_dw", dataloader=data, steps=3, run_dir=tmp_path / "run")
    trainer.fit()
    saved = dw.save(engine, tmp_path / "saved")
    assert torch.equal(dw.load(saved if saved else tmp_path / "saved").weights()["head.weight"], engine.head.weight)
    assert dw.dryrun(engine, steps=1, batch={"input_ids": IDS, "labels": IDS}) is not None
    dw.export(engine, path=tmp_path / "model.engine", example_inputs={"input_ids": IDS})
    loaded = dw.load_engine(tmp_path / "model.engine")
    assert_bitwise_equal(loaded(input_ids=IDS), engine.eval()(input_ids=IDS))
