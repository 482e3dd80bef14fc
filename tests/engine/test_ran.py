"""Calls that Dynamo leaves to Python, wholly or in part: a warning, and a report that says how often it was so."""

import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import deepwell as dw
from deepwell.engine.calls.ran import Calls
from deepwell.engine.engine import Engine


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor, few: bool = False) -> Tensor:
        for layer in self.layers[:1] if few else self.layers:
            x = layer(x)
        return x


X = torch.randn(4, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()


class OfTorchsModules(Model):
    """Dynamo compiles no module of torch's by itself: behind a break in the loop there is no graph at all."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(2))


def make(kind: type[Model] = Model) -> tuple[Any, Engine]:
    torch.manual_seed(0)
    model = kind()
    return model, dw.compile(model, precision="mxfp8")


def warned(run: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run()
    return [str(one.message) for one in seen if "run as they were written" in str(one.message)]


def schemes(engine: Engine) -> dict[str, str]:
    return {row.path: row.scheme for row in engine.report().bindings if row.gemm == "fwd"}


def said(engine: Engine) -> str:
    return " ".join(str(engine.report()).split())


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def _replaced(model: Any, engine: Engine) -> Tensor:
    model.forward = torch.compiler.disable(model.forward)
    return engine(X)


def _under_a_mode(_model: Any, engine: Engine) -> Tensor:
    with Mode():
        return engine(X)


BARE = {"a forward that Dynamo is not to see": _replaced, "a dispatch mode": _under_a_mode}


@pytest.mark.parametrize("how", BARE)
def test_a_later_call_without_a_graph_warns_once_and_is_counted(how: str) -> None:
    model, engine = make()
    assert not warned(lambda: engine(X)) and "calls" not in said(engine).replace("of the calls so far", "")
    (text,) = warned(lambda: torch.testing.assert_close(BARE[how](model, engine), model(X), rtol=0, atol=0))
    assert "of 4 linears of Model with a format, 4 run" in text and "no compiled graph ran in this call" in text
    assert not warned(lambda: BARE[how](model, engine))
    assert said(engine).count("at times as the model has it, in fp32: no compiled graph ran in 2 of 3 calls") == 1
    assert "note: no compiled graph ran in 2 of 3 calls: all in fp32" in said(engine)


@pytest.mark.parametrize("how", BARE)
def test_a_first_call_without_a_graph_warns_and_has_no_format(how: str) -> None:
    model, engine = make()
    (text,) = warned(lambda: BARE[how](model, engine))
    assert "nothing was compiled" in text and set(schemes(engine).values()) == {"fp32"}


def test_a_layer_that_dynamo_is_not_to_see_is_a_warning_too() -> None:
    model, engine = make()
    model.layers[0].forward = torch.compiler.disable(model.layers[0].forward)
    (text,) = warned(lambda: engine(X))
    assert "of 4 linears of Model with a format, 2 run" in text and "disable" in text
    found = schemes(engine)
    assert found["layers.0.up"] == "fp32" and found["layers.1.up"] == "emulate:mxfp8"


@pytest.mark.parametrize("hooked", [False, True], ids=["first hooks", "further hooks"])
def test_a_backward_hook_that_leaves_a_linear_to_python_is_a_warning(hooked: bool) -> None:
    model, engine = make()
    if hooked:  # from then on Dynamo has guards on hooks, and nothing is compiled anew as a whole
        model.layers[1].register_forward_hook(lambda *_: None)
    assert not warned(lambda: engine(X))
    grads: list[Any] = []
    model.layers[0].up.register_full_backward_hook(lambda *given: grads.append(given[2][0]))
    (text,) = warned(lambda: engine(X).sum().backward())
    # What was compiled of a layer around the break serves the other, too.
    assert "of 4 linears of Model with a format, 2 run" in text and "backwards hooks" in text and len(grads) == 1
    if hooked:
        assert "in up to 1 of 2 calls no graph had a product of layers.0.up, layers.1.up: where such" in said(engine)
    else:
        assert schemes(engine)["layers.0.up"] == "fp32"
    assert not warned(lambda: engine(X))


def test_a_forward_that_dynamo_gave_up_for_a_hook_is_compiled_again_without_it() -> None:
    model, engine = make(OfTorchsModules)
    engine(X)
    hook = model.layers[0].register_full_backward_hook(lambda *_: None)
    (text,) = warned(lambda: engine(X))
    assert "backwards hooks" in text and set(schemes(engine).values()) == {"fp32"}
    hook.remove()
    model, engine = make(OfTorchsModules)  # its forward is the same code
    (text,) = warned(lambda: engine(X))
    assert "nothing was compiled; the next call tries again" in text
    assert not warned(lambda: engine(X))
    assert set(schemes(engine).values()) == {"emulate:mxfp8"}
    assert engine.deepwell.options.calls_made.bare == 1


@pytest.mark.parametrize("of", ["", "layers.0"])
def test_a_backward_hook_around_what_is_compiled_changes_no_format(of: str) -> None:
    model, engine = make()
    grads: list[Any] = []
    model.get_submodule(of).register_full_backward_hook(lambda *given: grads.append(given[2][0]))
    assert not warned(lambda: engine(X).sum().backward())
    assert len(grads) == 1 and set(schemes(engine).values()) == {"emulate:mxfp8"}


def test_a_call_that_does_not_need_a_layer_is_a_note() -> None:
    _, engine = make()
    assert not warned(lambda: (engine(X), engine(X, few=True), engine(X)))
    assert "in up to 1 of 3 calls no graph had a product of layers.1.up, layers.1.down" in said(engine)
    assert "at times" not in said(engine)


def test_threads_count_their_own_calls() -> None:
    _, engine = make()
    engine(X)
    threads = [threading.Thread(target=lambda: [engine(X) for _ in range(20)]) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert engine.deepwell.options.calls_made.bare == 0 and not engine.deepwell.options.calls_made.missed


def test_a_call_within_a_call_leaves_the_outer_one_uncounted() -> None:
    calls = Calls()
    calls.begin()
    calls.begin()  # by a hook, say
    calls.ran(frozenset({"up"}))
    assert calls.end({"up"}) == (True, frozenset())
    assert calls.end({"up"}) == (True, frozenset())
    assert (calls.count, calls.bare, calls.missed) == (1, 0, {})


def test_a_model_without_formats_has_no_such_calls() -> None:
    model = Model()
    engine = dw.compile(model, precision="bf16", inductor=False)
    model.layers[0].forward = torch.compiler.disable(model.layers[0].forward)
    assert not warned(lambda: (engine(X), _under_a_mode(model, engine)))
    assert "no compiled graph ran" not in said(engine)
