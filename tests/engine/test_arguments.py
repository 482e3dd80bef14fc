"""What `dw.compile` and its sisters take: what is wrong is named, and nothing that was said is silently dropped."""

import logging

import pytest
import torch
from torch import nn

import deepwell as dw
from deepwell.engine.arguments import notes_on_hardware
from deepwell.engine.binding import Target
from deepwell.errors import ConfigError


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))


# ---- hw ----


@pytest.mark.parametrize(
    ("hw", "message"),
    [
        (5, "hw is a int; pass dw.probe"),
        (torch.device("cpu"), "hw is a device; pass dw.probe"),
        ("8xB2000", "hw: .*did you mean B200"),
        ("", "hw: .*an empty name"),
    ],
)
def test_what_is_no_hardware_is_named(model, hw, message) -> None:
    with pytest.raises(ConfigError, match=message):
        dw.compile(model, hw)


def test_a_plan_in_the_place_of_the_hardware_is_pointed_to_its_own(model) -> None:
    plan = dw.autoplan(dw.capture(model), hw="8xB200", seq_len=64, global_batch=8)
    with pytest.raises(ConfigError, match=r"hw is a Plan; .*plan=\.\.\."):
        dw.compile(model, plan)


@pytest.mark.parametrize("hw", ["8xB200", "object"])
def test_other_hardware_than_the_models_device_is_a_note(model, hw) -> None:
    engine = dw.compile(model, dw.probe("8xB200") if hw == "object" else hw)
    (note,) = [note for note in engine.report().notes if note.startswith("hw is")]
    assert "8xB200" in note and "the device that the model is on, cpu" in note and "nvfp4" in note


def test_the_models_own_device_needs_no_note() -> None:
    hopper, blackwell = Target(kind="cuda", capability=(9, 0)), Target(kind="cuda", capability=(10, 0))
    assert notes_on_hardware(None, Target(kind="cpu")) == []
    assert notes_on_hardware("64x8xH100", hopper) == []  # how many there are is the plan's business
    assert "sm_100" in notes_on_hardware("H100", blackwell)[0]


# ---- precision ----


@pytest.mark.parametrize("name", ["nvfp4", "fp8"])
def test_a_policy_may_be_a_recipes_name(model, name) -> None:
    by_policy, by_name = dw.compile(model, precision_policy=name), dw.compile(model, precision=name)
    assert by_policy.policy.to_dict() == by_name.policy.to_dict()


WRONG_PRECISION = [
    ({"precision": ""}, "precision is '': .*mxfp8"),
    ({"precision": 8}, "precision is 8: .*mxfp8"),
    ({"precision_policy": "mxfp9"}, "precision_policy is 'mxfp9': .*did you mean"),
    ({"precision_policy": {"default": "mxfp8"}}, r"precision_policy is a dict; .*PrecisionPolicy\.recipe"),
    ({"precision_policy": 0}, "precision_policy is a int"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG_PRECISION)
def test_a_wrong_precision_is_named_by_its_argument(model, arguments, message) -> None:
    with pytest.raises(ConfigError, match=message):
        dw.compile(model, **arguments)


@pytest.mark.parametrize(("options", "message"), WRONG_PRECISION)
def test_torch_compile_names_it_too(model, options, message) -> None:
    with pytest.raises(Exception, match=f"ConfigError: {message}"):
        torch.compile(model, backend="deepwell", options=options)(torch.randn(4, 32))


def test_torch_compile_takes_a_recipes_name_as_its_policy(model) -> None:
    from deepwell.engine.torch_backend import last_report

    torch.compile(model, backend="deepwell", options={"precision_policy": "fp8"})(torch.randn(4, 32))
    assert {row.format for row in last_report().bindings} == {"fp8"}


# ---- the others ----


@pytest.mark.parametrize(
    "flag", ["inductor", "cuda_graphs", "fuse_head", "cache_weights", "use_cutlass", "measure", "recompute"]
)
def test_a_flag_is_true_or_false(model, flag) -> None:
    with pytest.raises(ConfigError, match=f"{flag} is 1; it takes True"):
        dw.compile(model, **{flag: 1})


@pytest.mark.parametrize("sizes", [{"batch_size": True}, {"batch_size": 0}, {"seq_len": -1}, {"seq_len": 2.0}])
def test_sizes_are_whole_numbers_from_one_on(model, sizes) -> None:
    (name,) = sizes
    with pytest.raises(ConfigError, match=f"{name} is .*; it must be a whole number of at least 1"):
        dw.optimize_for_blackwell(model, **sizes)


def test_what_no_model_can_be_called_with_is_named(model) -> None:
    with pytest.raises(ConfigError, match="example_inputs is a str, 'hi'; pass a dict"):
        dw.compile(model, example_inputs="hi")
    with pytest.raises(ConfigError, match="batch is a int, '3'; pass a dict"):
        dw.compile(model).check_fragile(3)


def test_an_engine_is_not_compiled_again(model) -> None:
    engine = dw.compile(model)
    for again in (dw.compile, dw.optimize_for_blackwell, lambda e: dw.compile(dw.capture(e))):
        with pytest.raises(ConfigError, match=r"already an Engine; engine\.deepwell\.model"):
            again(engine)
    with pytest.raises(ConfigError, match="holds an Engine at '1'"):
        dw.compile(nn.Sequential(nn.Linear(32, 32), engine))
    x = torch.randn(4, 32)
    torch.testing.assert_close(dw.compile(engine.deepwell.model, precision="bf16")(x), model(x))


def test_a_model_whose_inputs_cannot_be_guessed_is_compiled_without_tracebacks() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 6 * 6, 64))
    heard: list[logging.LogRecord] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = heard.append  # type: ignore[method-assign]
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addHandler(handler)
    try:
        engine = dw.compile(model)
    finally:
        logger.removeHandler(handler)
    assert heard == [] and not logger.disabled
    assert any(note.startswith("not traced") for note in engine.report().notes)
    assert engine(torch.randn(2, 3, 8, 8)).shape == (2, 64) and engine.options.rewritten == {"2"}
