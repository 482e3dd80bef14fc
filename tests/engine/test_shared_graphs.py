"""Graphs that Dynamo runs for several layers: each layer computes in its own formats, and the report says which ran."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

import deepwell as dw
from deepwell.engine import shared_graphs
from deepwell.engine.backend import BackendOptions, compile_graph
from deepwell.engine.binding import Target
from deepwell.engine.engine import Engine
from deepwell.engine.passes import work
from deepwell.engine.torch_backend import forget_reports, last_report
from deepwell.errors import CaptureError
from deepwell.formats.metrics import assert_bitwise_equal
from deepwell.kernels.experts.autograd import batched_linear
from deepwell.kernels.gemm.linear import low_precision_linear

WIDTH = 32
LAYERS = 5
FP8, MXFP6, MXFP8 = ("|".join([how] * 3) for how in ("fp8_row", "emulate:mxfp6", "emulate:mxfp8"))


class Layer(nn.Module):
    """Two linears behind a graph break: Dynamo compiles what follows it once for all layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 48, bias=False), nn.Linear(48, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x + self.down(torch.tanh(self.up(x)))


class Whole(Layer):
    """The same without the break."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self, layer: Callable[[], nn.Module] = Layer, *, checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(layer() for _ in range(LAYERS))
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return x


def alternating(first: str = "bf16", second: str = "mxfp6") -> dw.PrecisionPolicy:
    policy = dw.PrecisionPolicy(second)
    for i in range(LAYERS):
        for name in ("up", "down"):
            policy.set_layer_precision(f"path:layers.{i}.{name}", second if i % 2 else first)
    return policy


def engine_of(model: nn.Module, policy: dw.PrecisionPolicy, **more: Any) -> Engine:
    return dw.compile(dw.capture(model, torch.randn(8, WIDTH)), precision_policy=policy, **more)


def batch(rows: int = 16) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows)).requires_grad_()


def by_layer(model: Model, schemes: Mapping[str, str], x: Tensor) -> Tensor:
    """The model computed outside of any compiler, each linear as its scheme says."""

    def linear(module: nn.Linear, path: str, x: Tensor) -> Tensor:
        if path not in schemes:
            return module(x)
        return low_precision_linear(x, [module.weight], module.bias, schemes[path])

    for i, layer in enumerate(model.layers):
        hidden = torch.tanh(linear(layer.up, f"layers.{i}.up", x))
        x = x + linear(layer.down, f"layers.{i}.down", hidden)
    return x


def assert_runs_as(run: Callable[[Tensor], Tensor], model: Model, schemes: Mapping[str, str], x: Tensor) -> None:
    """Output and all gradients are bit for bit those of the schemes, layer by layer."""
    inputs = [x, *(p for p in model.parameters() if p.requires_grad)]
    got, wanted = run(x), by_layer(model, schemes, x)
    assert_bitwise_equal(got, wanted)
    pairs = zip(*(torch.autograd.grad(y.square().sum(), inputs) for y in (got, wanted)), strict=True)
    for mine, theirs in pairs:
        assert_bitwise_equal(mine, theirs)


def options_of(model: nn.Module, schemes: Mapping[str, str], **more: Any) -> BackendOptions:
    return BackendOptions(schemes=schemes, parameters=lambda: model.named_parameters(remove_duplicate=False), **more)


def compiled(model: nn.Module, options: BackendOptions) -> Callable[..., Any]:
    return torch.compile(model, backend=lambda graph, inputs: compile_graph(graph, inputs, options))


# ---- each layer in its own formats ----


@pytest.mark.parametrize("first", ["bf16", "mxfp8"])
def test_layers_behind_a_break_run_in_their_own_formats(first) -> None:
    model = Model()
    engine = engine_of(model, alternating(first))
    assert len(set(engine.options.schemes.values())) == (1 if first == "bf16" else 2)
    for _ in range(2):  # also when all is compiled
        assert_runs_as(engine, model, engine.options.schemes, batch())
    # One graph for each kind of formats: layers of the same share one.
    assert engine.options.graphs == 2


def test_gemms_of_one_layer_that_differ_are_enough() -> None:
    # Only a backward differs: a layer's forward would not show it.
    model, policy = Model(), dw.PrecisionPolicy("mxfp8")
    policy.set_layer_precision("path:layers.3.up", "bf16", gemms="wgrad")
    engine = engine_of(model, policy)
    assert_runs_as(engine, model, engine.options.schemes, batch())
    assert engine.options.graphs == 2


@pytest.mark.parametrize("rows", [(16, 24, 7, 16), (7, 8, 9, 10, 16)], ids=str)
def test_other_batches_change_no_formats(rows) -> None:
    model = Model()
    engine = engine_of(model, alternating("mxfp8"))
    for number in rows:
        assert_runs_as(engine, model, engine.options.schemes, batch(number))


class Checkpointed(Layer):
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x + checkpoint(self.inner, x, use_reentrant=False)

    def inner(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


def test_checkpointed_layers_are_computed_again_in_their_own_formats() -> None:
    model = Model(Checkpointed)
    engine = engine_of(model, alternating("mxfp8"))
    assert_runs_as(engine, model, engine.options.schemes, batch())
    assert engine.options.graphs == 2


def test_a_model_that_nothing_of_was_compiled_says_so() -> None:
    # A break inside of what is checkpointed: torch runs all of it as it is written.
    model = Model(checkpointed=True)
    engine = engine_of(model, alternating("mxfp8"))
    assert "call the engine once" in str(engine.report()) and not _notes_on_formats(engine)
    assert_runs_as(engine, model, {}, batch())
    first, second = _notes_on_formats(engine)
    assert first == "nothing was compiled: Dynamo ran the model as it was written, in fp32"
    assert second.startswith("not met as a product") and "layers.0.up" in second
    assert "call the engine once" not in str(engine.report())


def _notes_on_formats(engine: Engine) -> list[str]:
    return [note for note in engine.report().notes if note.startswith(("nothing was", "not met"))]


def test_evaluation_and_frozen_layers_keep_their_formats() -> None:
    model = Model()
    engine = engine_of(model, alternating("mxfp8"))
    schemes = engine.options.schemes
    with torch.no_grad():
        assert_bitwise_equal(engine.eval()(batch()), by_layer(model, schemes, batch()))
    assert_runs_as(engine.train(), model, schemes, batch())
    for layer in model.layers[2:4]:
        layer.requires_grad_(False)
    assert_runs_as(engine, model, schemes, batch())


def test_steps_change_the_formats_of_layers_that_share_a_graph() -> None:
    model, policy = Model(), dw.PrecisionPolicy("mxfp8")
    for name in ("up", "down"):
        policy.set_layer_precision(f"path:layers.1.{name}", "mxfp6", steps=":10")
        policy.set_layer_precision(f"path:layers.2.{name}", "mxfp6", steps="10:")
    engine = engine_of(model, policy)
    seen = []
    for step in (0, 10, 5):
        engine.at_step(step)
        schemes = engine.options.schemes
        seen.append([schemes[f"layers.{i}.up"].partition("|")[0] for i in (1, 2)])
        assert_runs_as(engine, model, schemes, batch())
    assert seen == [["emulate:mxfp6", "emulate:mxfp8"], ["emulate:mxfp8", "emulate:mxfp6"], seen[0]]


def test_a_fragile_layer_stays_in_bf16_by_itself() -> None:
    model = Model()
    engine = engine_of(model, dw.PrecisionPolicy("mxfp8"))
    assert_runs_as(engine, model, engine.options.schemes, batch())
    example = batch().detach()
    rows = sorted(engine.check_fragile(example, floor_db=-1e9).rows, key=lambda row: row.sqnr_db)
    found = engine.check_fragile(example, floor_db=(rows[0].sqnr_db + rows[1].sqnr_db) / 2)
    assert [row.path for row in found.fragile] == [rows[0].path]
    assert len(set(engine.options.schemes.values())) == 2
    assert_runs_as(engine, model, engine.options.schemes, batch())


def test_a_copy_of_an_engine_has_the_same_formats() -> None:
    engine = engine_of(Model(), alternating("mxfp8"))
    assert_runs_as(engine, engine.deepwell.model, engine.options.schemes, batch())
    other = copy.deepcopy(engine)
    assert_runs_as(other, other.deepwell.model, other.options.schemes, batch())
    assert other.options.graphs == 2 and other.deepwell.model is not engine.deepwell.model


def test_new_parameters_have_the_formats_of_their_places() -> None:
    model = Model()
    engine = engine_of(model, alternating("mxfp8"))
    schemes = engine.options.schemes
    assert_runs_as(engine, model, schemes, batch())
    engine.load_state_dict({k: v.clone() * 1.5 for k, v in model.state_dict().items()}, assign=True)
    assert_runs_as(engine, model, schemes, batch())
    for layer in model.layers:
        layer.up.weight = nn.Parameter(layer.up.weight.detach() * 0.5)
    assert_runs_as(engine, model, schemes, batch())


def test_tensors_that_stand_in_for_parameters_have_the_formats_of_their_places() -> None:
    model = Model()
    engine = engine_of(model, alternating("mxfp8"))
    wanted = by_layer(model, engine.options.schemes, batch())
    for stands_in in (lambda p: p.detach().clone(), lambda p: nn.Parameter(p.detach().clone())):
        for _ in range(2):
            given = {name: stands_in(p) for name, p in model.named_parameters()}
            assert_bitwise_equal(torch.func.functional_call(engine, given, (batch(),)), wanted)
        assert_bitwise_equal(engine(batch()), wanted)


def test_inductors_graphs_are_distinguished_too(cxx_compiler) -> None:
    engine = engine_of(Model(), alternating("bf16", "mxfp6"), inductor=True)
    other = engine_of(Model(Whole), alternating("bf16", "mxfp6"), inductor=True)
    assert_bitwise_equal(engine(batch()), other(batch()))


def _product(x: Tensor, weight: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return F.linear(x, weight)


class Handed(nn.Module):
    """Weights that are handed to a function: Dynamo reaches them through no module."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return _product(_product(_product(x, self.a), self.b), self.c)


def test_weights_that_are_passed_around_are_distinguished() -> None:
    model, x = Handed(), batch()
    options = options_of(model, {"a": MXFP8, "c": MXFP6})
    out = compiled(model, options)(x)
    wanted = low_precision_linear(x, [model.a], None, MXFP8)
    wanted = low_precision_linear(F.linear(wanted, model.b), [model.c], None, MXFP6)
    assert_bitwise_equal(out, wanted)
    assert options.rewritten == {"a", "c"}


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / 8)

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x + torch.bmm(x, self.weight)


def test_experts_behind_a_break_run_in_their_own_formats() -> None:
    model = nn.Sequential(*(Experts() for _ in range(4)))
    x = torch.randn(4, 8, WIDTH, requires_grad=True)
    options = options_of(model, {"0": MXFP8, "1": MXFP6, "3": MXFP6})
    out = compiled(model, options)(x)
    wanted = x
    for path, module in model.named_children():
        scheme = options.schemes.get(path)
        wanted = wanted + (
            torch.bmm(wanted, module.weight) if scheme is None else batched_linear(wanted, module.weight, True, scheme)
        )
    assert_bitwise_equal(out, wanted)
    inputs = [x, *model.parameters()]
    pairs = zip(*(torch.autograd.grad(y.square().sum(), inputs) for y in (out, wanted)), strict=True)
    for mine, theirs in pairs:
        assert_bitwise_equal(mine, theirs)
    assert options.rewritten == {"0", "1", "3"} and options.graphs == 3


def test_the_backend_by_name_is_the_same_for_all_layers() -> None:
    # It sees no model: behind a break a path begins at the layer, so that no rule can mean one of them.
    model = Model()
    torch._dynamo.reset()
    forget_reports()
    run = torch.compile(model, backend="deepwell", options={"precision": "mxfp8"})
    schemes = {f"layers.{i}.{name}": MXFP8 for i in range(LAYERS) for name in ("up", "down")}
    assert_runs_as(run, model, schemes, batch())
    assert {row.path for row in last_report().bindings} == {"up", "down"}


# ---- regions that are compiled once ----


class Region(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 48, bias=False), nn.Linear(48, WIDTH)

    @torch.compiler.nested_compile_region
    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def test_layers_of_one_region_run_in_their_own_formats(monkeypatch) -> None:
    model, bodies = Model(Region), []
    schemes = {f"layers.{i}.{name}": MXFP6 if i % 2 else MXFP8 for i in range(LAYERS) for name in ("up", "down")}
    del schemes["layers.0.up"]  # its neighbour must not take its place
    options = options_of(model, schemes)

    def backend(graph: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        run = compile_graph(graph, inputs, options)
        bodies.extend(module for module in graph.children() if isinstance(module, fx.GraphModule))
        return run

    assert_runs_as(torch.compile(model, backend=backend), model, schemes, batch())
    # One body for each kind: layer 0, layers 2 and 4, layers 1 and 3.
    assert len(bodies) == 3 and options.graphs == 1
    assert options.rewritten == set(schemes) == set(options.products) - {"layers.0.up"}


# ---- kept codes ----


def test_kept_codes_are_those_of_each_layers_own_weights() -> None:
    # Shared, they would be overwritten by the next layer's before the backward reads them.
    model, x = Model(), batch()
    schemes = {f"layers.{i}.{name}": FP8 for i in range(LAYERS) for name in ("up", "down")}
    options = options_of(model, schemes, cache_weights=True)
    run = compiled(model, options)
    with torch._dynamo.config.patch(recompile_limit=64):
        for _ in range(2):
            assert_runs_as(run, model, schemes, x)
    groups = options.weight_cache.groups
    assert [codes.times_quantized for codes in groups.values()] == [1] * (2 * LAYERS)
    assert options.graphs == LAYERS


def test_an_engine_of_many_layers_with_kept_codes_is_not_stopped_by_dynamos_limit(monkeypatch) -> None:
    from deepwell.engine import compile as compile_module

    monkeypatch.setattr(compile_module, "device_of", lambda tensors: Target(kind="cuda", capability=(9, 0)))
    monkeypatch.setattr("deepwell.engine.backend.MOST_GRAPHS", 1)
    model = Model()
    engine = engine_of(model, dw.PrecisionPolicy("mxfp8"), cache_weights=True, measure=False, inductor=False)
    assert set(engine.options.schemes.values()) == {FP8}
    assert_runs_as(engine, model, engine.options.schemes, batch())
    assert engine.options.graphs == LAYERS


# ---- the report ----


def test_the_report_knows_every_layer_that_ran() -> None:
    engine = engine_of(Model(), alternating("mxfp8"))
    engine(batch()).sum().backward()
    report = engine.report(measure=True)
    assert not [note for note in report.notes if "not met" in note]
    assert engine.options.rewritten == set(engine.options.schemes)
    assert {row.shape for row in report.bindings if row.gemm == "fwd"} == {"16x48x32", "16x32x48"}
    assert all(row.us for row in report.bindings)


def test_a_layer_that_did_not_run_is_still_named() -> None:
    class Skips(Model):
        def forward(self, x: Tensor) -> Tensor:
            for layer in list(self.layers)[:-1]:
                x = layer(x)
            return x

    model = Skips()
    engine = engine_of(model, alternating("mxfp8"))
    schemes = {f"layers.{i}.{name}": MXFP6 if i % 2 else MXFP8 for i in range(LAYERS) for name in ("up", "down")}
    engine.deepwell.options.schemes = schemes  # a capture leaves out what does not run
    engine(batch())
    (note,) = [note for note in engine.report().notes if "not met" in note]
    assert note.endswith("layers.4.up, layers.4.down")


def test_measured_gains_are_reported_of_every_layer(monkeypatch) -> None:
    from deepwell.kernels.tune.gain import Gain

    model = Model()
    schemes = {f"layers.{i}.{name}": FP8 for i in range(LAYERS) for name in ("up", "down")}
    gain = Gain(n=32, k=48, tokens=16, fp8_us=2.0, bf16_us=1.0)

    def keep(sites: Any, measure: Any, *, strict: bool) -> Any:
        return [s for s in sites if s.path.endswith("up")], {s.path: gain for s in sites if s.path.endswith("down")}

    monkeypatch.setattr(work, "keep_gaining", keep)
    options = options_of(model, schemes, measure="safe")
    compiled(model, options)(batch())
    assert options.rewritten == {f"layers.{i}.up" for i in range(LAYERS)}
    assert options.gains == {f"layers.{i}.down": gain for i in range(LAYERS)}


# ---- what it costs ----


@pytest.fixture
def asked(monkeypatch) -> list[str]:
    """What is asked of names, guards and modules from here on."""
    calls: list[str] = []

    def counted(owner: Any, name: str) -> None:
        before = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return before(*args, **kwargs)

        monkeypatch.setattr(owner, name, wrapped)

    counted(shared_graphs.KnownParameters, "_find")
    counted(shared_graphs._HoldsTheSame, "__call__")
    counted(shared_graphs, "_met")
    counted(shared_graphs, "_install")
    return calls


def test_a_model_without_breaks_costs_nothing(asked) -> None:
    model = Model(Whole)
    engine = engine_of(model, alternating("mxfp8"))
    assert_runs_as(engine, model, engine.options.schemes, batch())
    assert not {"_install", "_met", "__call__"} & set(asked)
    asked.clear()
    engine(batch())
    assert not asked


def test_layers_that_were_met_ask_for_one_module_each(asked) -> None:
    engine = engine_of(Model(), alternating("mxfp8"))
    engine(batch())
    engine(batch())
    asked.clear()
    engine(batch())
    # Dynamo may try both graphs for a layer; it may also know that nothing in a module changed.
    assert set(asked) <= {"__call__"} and len(asked) <= 2 * LAYERS


def test_a_graph_that_is_run_for_other_formats_raises() -> None:
    # As it would be where Dynamo's guards are switched off.
    model = Model()
    options = options_of(model, {"layers.1.up": MXFP8})
    graphs: list[tuple[Callable[..., Any], list[Any]]] = []

    def backend(graph: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graphs.append((compile_graph(graph, inputs, options), list(inputs)))
        return graphs[-1][0]

    torch.compile(model, backend=backend)(batch())
    (run, inputs), (_, others) = graphs
    run(*inputs)
    where = next(i for i, value in enumerate(inputs) if value is model.layers[0].up.weight)
    assert others[where] is model.layers[1].up.weight
    with pytest.raises(CaptureError, match=r"compiled for layers.0.up.weight was run for layers.1.up.weight"):
        run(*inputs[:where], others[where], *inputs[where + 1 :])


def test_a_part_of_the_model_that_hides_the_rest_is_not_the_whole_of_it() -> None:
    """A pipeline's stage shows one layer at a time: its graph may be run for another layer, and is guarded."""
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    shown = ["a", "b"]
    known = shared_graphs.KnownParameters(
        lambda: [(f"{name}.{key}", p) for name in shown for key, p in model[name].named_parameters()],
        {"a": MXFP8, "b": FP8},
    )
    assert known.are_all([model["a"].weight, model["b"].weight])
    assert not known.are_all([model["a"].weight])
    shown.remove("b")
    assert not known.are_all([model["a"].weight])
