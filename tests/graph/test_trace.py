"""Tracing: every architecture as one graph that computes what the model computes, and the model left as it was."""

import importlib.util
import logging
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo
from torch import nn

from deepwell.errors import CaptureError, ConfigError
from deepwell.graph.capture import capture
from deepwell.graph.dedupe import layer_kinds
from deepwell.graph.example_inputs import distinctive_length, guess_inputs, resolve_inputs
from deepwell.graph.preserve import choose_traceable_implementations, preserved
from deepwell.graph.trace import TraceError, trace

transformers = pytest.importorskip("transformers")


def _load_zoo_models():
    spec = importlib.util.spec_from_file_location("zoo_models", Path(__file__).with_name("zoo_models.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


zoo = _load_zoo_models()

# Dense with and without GQA, biases, tied heads, parallel blocks, ALiBi, learned positions, Conv1D (gpt2), soft caps
# and sliding windows (gemma), fused projections (phi3, falcon), routed experts of five designs, latent attention, state
# space.
ARCHITECTURES = (
    "llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "mistral", "phi3", "gpt2", "gpt_neox", "opt", "bloom", "falcon",
    "olmo2", "cohere", "stablelm", "mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "granitemoe", "falcon_h1",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _quiet_and_single_threaded(monkeypatch):
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    # pytest attaches its log capture to loggers that do not propagate, and Dynamo's structured trace, one of them,
    # writes every graph as text as soon as anybody listens: most of the time of a test.
    listened = logging.getLogger("torch.__trace")
    monkeypatch.setattr(listened, "propagate", True)
    monkeypatch.setattr(listened, "handlers", [])


def eager(model, inputs=None, *, training=True):
    """What the model returns eagerly with the implementations that trace chooses, and the weights its Linears use."""
    used = set()
    call = resolve_inputs(model, inputs, 2, None)
    with preserved(model, values=True):
        choose_traceable_implementations(model)
        model.train(training)
        for name, module in model.named_modules():
            if isinstance(module, (nn.Linear, transformers.pytorch_utils.Conv1D)):
                module.register_forward_pre_hook(lambda _module, _args, name=name: used.add(f"{name}.weight"))
        torch.manual_seed(1)
        return model(*call.args, **call.kwargs), used


def computed(model, traced, inputs=None):
    """The tensors that the graph returns for the call it was traced with and the model's own weights."""
    call = resolve_inputs(model, inputs, 2, None)
    tensors = {**call.named_tensors(model), **dict(model.named_parameters()), **dict(model.named_buffers())}
    known = {**call.kwargs, **tensors}
    with preserved(model, values=True):
        torch.manual_seed(1)
        return traced.graph_module(*(known[p.name] for p in traced.placeholders))


def shapes_under(traced, path):
    """Op, target and shape of each node that belongs to the module at `path`."""
    found = []
    for node in traced.graph.nodes:
        if node.op != "placeholder" and (node.meta["module_path"] + ".").startswith(path + "."):
            value = node.meta.get("example_value")
            found.append((node.op, str(node.target), tuple(value.shape) if isinstance(value, torch.Tensor) else None))
    return found


# ---- architectures ----


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_an_architecture_is_one_graph_with_every_linear_and_the_eager_outputs(model_type):
    model = zoo.tiny_model(model_type)
    traced = trace(model, tracers=("dynamo", "eval"), deduplicate=False)
    assert traced.tracer == "dynamo" and not traced.specialized
    expected, used = eager(model, training=traced.training)
    assert used and used <= traced.parameter_names
    loss, logits = computed(model, traced)[:2]
    torch.testing.assert_close(logits, expected.logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(loss, expected.loss, rtol=1e-5, atol=1e-5)
    assert [p.name for p in traced.inputs] == ["input_ids", "labels"]


def test_layers_that_are_dropped_are_traced_in_evaluation_mode():
    model = zoo.tiny_model("opt")
    model.model.decoder.layerdrop = 0.1  # compared with a random number for each layer in training mode
    assert trace(model, tracers=("dynamo", "eval")).tracer == "eval"


# gpt_oss makes tensors on the model's own device in its mask, mixtral counts tokens by histogram: both were trouble on
# meta.
@pytest.mark.parametrize("model_type", ["llama", "gpt_oss", "mixtral"])
def test_a_meta_model_gives_the_graph_of_the_real_one(model_type):
    real = trace(zoo.tiny_model(model_type))
    meta = trace(zoo.tiny_model(model_type, device="meta"))
    assert meta.tracer == "dynamo"
    assert shapes_under(meta, "model") == shapes_under(real, "model")
    assert meta.parameter_names == real.parameter_names


@pytest.mark.parametrize("tracer", ["export", "record"])
def test_the_other_tracers_give_a_graph_that_computes_the_same(tracer):
    model = zoo.tiny_model("qwen3_moe")
    expected, used = eager(model)
    traced = trace(model, tracers=(tracer,), deduplicate=False)
    assert traced.tracer == tracer and used <= traced.parameter_names
    loss, logits = computed(model, traced)[:2]
    torch.testing.assert_close(logits, expected.logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(loss, expected.loss, rtol=1e-5, atol=1e-5)
    assert [p.name for p in traced.inputs] == ["input_ids", "labels"]
    gate = [n for n in traced.graph.nodes if n.meta.get("module_path") == "model.layers.1.self_attn.q_proj"]
    assert gate and gate[0].meta["example_value"].shape == (2, 37, 64)


def test_tied_parameters_keep_all_their_names():
    traced = trace(zoo.tiny_model("gpt2", device="meta"))
    tied = [p for p in traced.placeholders if "lm_head.weight" in p.names]
    assert len(tied) == 1 and set(tied[0].names) == {"transformer.wte.weight", "lm_head.weight"}


def test_expert_weights_feed_one_grouped_gemm_each():
    traced = trace(zoo.tiny_model("mixtral", device="meta"))
    grouped = [n for n in traced.graph.nodes if n.op == "call_function" and "grouped_mm" in str(n.target)]
    assert len(grouped) == 2 * 2  # up and down in each of two layers
    assert all(n.meta["module_path"].endswith("mlp.experts") for n in grouped)


# ---- inputs ----


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.left = nn.Linear(8, 12)
        self.right = nn.Linear(6, 12)

    def forward(self, x, y, scale=1.0):
        return self.left(x) * scale + self.right(y)


def test_a_tensor_a_tuple_and_a_dict_are_accepted_and_named_by_the_forward():
    x, y = torch.randn(3, 5, 8), torch.randn(3, 5, 6)
    single = trace(nn.Linear(8, 4), x)
    assert [p.names for p in single.inputs] == [("input",)] and (single.batch, single.seq_len) == (3, 5)
    assert {p.name for p in trace(TwoInputs(), (x, y)).inputs} == {"x", "y"}
    assert {p.name for p in trace(TwoInputs(), {"y": y, "x": x, "scale": 2.0}).inputs} == {"x", "y"}


def test_nested_inputs_are_named_by_their_path():
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj = nn.Linear(8, 8)

        def forward(self, state):
            return self.proj(state["h"]) + state["rest"][1]

    traced = trace(Nested(), {"state": {"h": torch.randn(2, 8), "rest": [torch.randn(2, 8), torch.randn(2, 8)]}})
    assert {p.name for p in traced.inputs} == {"state.h", "state.rest.1"}


def test_a_sequential_needs_no_inputs():
    traced = trace(nn.Sequential(nn.Linear(768, 3072), nn.GELU(), nn.Linear(3072, 768)))
    assert {"0.weight", "0.bias", "2.weight", "2.bias"} == traced.parameter_names
    last = [n for n in traced.graph.nodes if n.meta["module_path"] == "2"][-1]
    assert last.meta["example_value"].shape == (2, traced.seq_len, 768)


def test_inputs_are_guessed_for_embeddings_and_convolutions_and_targets_are_given():
    # The shape of many a home-made language model: without targets it would give one position only.
    class Tiny(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(50, 16), nn.Linear(16, 50)

        def forward(self, idx, targets=None):
            hidden = self.embed(idx)
            if targets is None:
                return self.head(hidden[:, [-1]]), None
            logits = self.head(hidden)
            return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    assert [p.name for p in trace(Tiny()).inputs] == ["idx", "targets"]
    assert trace(nn.Sequential(nn.Conv1d(3, 4, 3), nn.ReLU())).batch == 2


def test_what_cannot_be_guessed_says_to_pass_example_inputs():
    with pytest.raises(CaptureError, match="pass example_inputs"):
        trace(TwoInputs())
    with pytest.raises(CaptureError, match="pass example_inputs"):
        trace(nn.Sequential(nn.ReLU()))


def test_wrong_arguments_are_named():
    with pytest.raises(ConfigError, match="example_inputs is a str"):
        trace(nn.Linear(2, 2), "x")
    with pytest.raises(ConfigError, match="model is a function"):
        trace(lambda x: x)
    with pytest.raises(ConfigError, match="tracers"):
        trace(nn.Linear(2, 2), tracers=("magic",))


def test_the_sequence_length_equals_no_dimension_and_fits_the_positions():
    model = zoo.tiny_model("llama", device="meta", hidden_size=148, intermediate_size=37, head_dim=37, vocab_size=82)
    assert distinctive_length(model, 2) not in (37, 41)  # 37 is a head, 82 = 2 * 41 is the vocabulary
    short = zoo.tiny_model("gpt2", device="meta", n_positions=16)
    assert guess_inputs(short).seq_len <= 16


def test_a_model_that_refuses_the_first_length_is_given_another():
    class Chunks(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.mix = nn.Embedding(50, 8), nn.Linear(16, 16)

        def forward(self, ids):
            if ids.shape[1] % 16:
                raise ValueError(f"length {ids.shape[1]} is no multiple of 16")
            return self.mix(self.embed(ids).transpose(1, 2).unflatten(-1, (-1, 16)))

    assert trace(Chunks()).seq_len == 64
    with pytest.raises(TraceError, match="no multiple of 16"):
        trace(Chunks(), seq_len=37)  # asked for by name, it is not replaced


# ---- the model afterwards ----


def snapshot(model):
    return {
        "tensors": {n: (id(t), t.detach().clone()) for n, t in (*model.named_parameters(), *model.named_buffers())},
        "attributes": [(id(m), sorted(vars(m)), m.training) for m in model.modules()],
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules()],
        "grads": [p.grad for p in model.parameters()],
        "random": (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()),
        "grad_mode": torch.is_grad_enabled(),
        "dynamo": {k: getattr(torch._dynamo.config, k) for k in ("capture_scalar_outputs", "suppress_errors")},
    }


def assert_same(before, after):
    for key in before:
        if key != "tensors":
            assert before[key] == after[key], key
    assert before["tensors"].keys() == after["tensors"].keys()
    for name, (identity, value) in before["tensors"].items():
        assert after["tensors"][name][0] == identity and torch.equal(after["tensors"][name][1], value), name


@pytest.mark.parametrize("tracer", ["dynamo", "export", "record"])
def test_a_hugging_face_model_is_left_as_it_was(tracer):
    model = zoo.tiny_model("mixtral", num_hidden_layers=7)  # seven layers: the stubs must come off too
    model.config._attn_implementation_internal = "eager"
    model.config._experts_implementation_internal = "eager"
    model.model.layers[0].eval()
    before, config = snapshot(model), model.config.to_dict()
    trace(model, tracers=(tracer,))
    assert_same(before, snapshot(model))
    assert model.config.to_dict() == config and model.config.use_cache
    assert (model.config._attn_implementation, model.config._experts_implementation) == ("eager", "eager")


class Restless(nn.Module):
    """Everything a forward should not do: counts, draws, registers buffers, updates statistics."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.proj = nn.Linear(8, 8)
        self.calls = []

    def forward(self, x):
        self.calls.append(len(self.calls))
        self.register_buffer("cache", torch.ones(8), persistent=False)
        return self.proj(nn.functional.dropout(self.norm(x))) + self.cache * float(x.detach().sum() > 0)


def test_a_model_that_changes_itself_is_put_back():
    model, x = Restless(), torch.randn(4, 8)
    before = snapshot(model)
    traced = trace(model, x, tracers=("record",))
    assert traced.specialized
    assert_same(before, snapshot(model))
    assert model.calls == []


# ---- failures ----


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.small, self.large = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.small(x) if x.sum() > 0 else self.large(x)


def test_control_flow_by_values_is_recorded_and_says_so():
    traced = trace(Branches(), torch.ones(2, 8))
    assert traced.tracer == "record" and traced.specialized
    assert "small.weight" in traced.parameter_names
    assert [a.tracer for a in traced.attempts] == ["dynamo", "eval", "export"]
    assert all(a.error and a.reason for a in traced.attempts)
    assert "test_trace.py" in traced.attempts[0].where and "forward" in traced.attempts[0].where


def test_control_flow_by_values_on_meta_is_an_error_with_every_reason():
    with pytest.raises(TraceError, match="meta device") as caught:
        trace(Branches().to("meta"), torch.ones(2, 8, device="meta"))
    assert [a.tracer for a in caught.value.attempts] == ["dynamo", "eval", "export", "record"]
    assert isinstance(caught.value, CaptureError)


def test_a_models_own_error_is_the_reason():
    with pytest.raises(TraceError, match=r"mat1 and mat2|shapes"):
        trace(nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 5))


def test_a_recording_follows_in_place_writes_and_several_outputs():
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj = nn.Linear(6, 6)

        def forward(self, x):
            y = self.proj(x).clone()
            y[:, 0] = 2 - x[:, 1]
            y += 1
            values, index = y.topk(2, dim=-1)
            first, second = values.unbind(-1)
            return {"sum": first + 3 * second, "index": index, "mask": (y > 0) & ~(x > 0)}

    model, x = Writes(), torch.randn(5, 6)
    expected, traced = model(x), trace(model, x, tracers=("record",))
    assert not traced.specialized
    outputs = computed(model, traced, x)
    assert len(outputs) == len(expected) and all(map(torch.equal, expected.values(), outputs))


# ---- repeated layers ----


@pytest.mark.parametrize(("model_type", "layers"), [("llama", {"num_hidden_layers": 8}), ("gemma3_text", {
    "num_hidden_layers": 12, "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 2,
})])  # fmt: skip
def test_a_deduplicated_trace_has_the_nodes_of_the_full_one_in_each_traced_layer(model_type, layers):
    model = zoo.tiny_model(model_type, device="meta", **layers)
    full, short = trace(model, deduplicate=False), trace(model)
    assert full.stubbed == {} and short.stubbed
    representatives = set(short.stubbed.values())
    for path in representatives:
        assert shapes_under(short, path) == shapes_under(full, path) != []
    traced_paths = {n.meta["module_path"] for n in short.graph.nodes}
    assert not any((path + ".").startswith(stub + ".") for stub in short.stubbed for path in traced_paths)
    # Every layer is accounted for, and a stub stands for a layer of the same shape.
    assert len(short.stubbed) + len(representatives) == layers["num_hidden_layers"]
    for stub, path in short.stubbed.items():
        assert [(o, t, s) for o, t, s in shapes_under(full, stub)] == shapes_under(full, path)


def test_layers_that_differ_in_a_setting_or_a_shape_are_not_merged():
    class Layer(nn.Module):
        def __init__(self, index, window, width):
            super().__init__()
            self.layer_idx, self.window = index, window
            self.up, self.down = nn.Linear(8, width), nn.Linear(width, 8)

        def forward(self, x):
            return x + self.down(self.up(x))

    class Stack(nn.Module):
        def __init__(self, layers):
            super().__init__()
            self.layers = nn.ModuleList(layers)

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    alike = Stack([Layer(i, 4, 16) for i in range(8)])
    assert [len(kind.duplicates) for kind in layer_kinds(alike)] == [7]
    windows = Stack([Layer(i, 4 if i % 2 else 8, 16) for i in range(8)])
    assert [len(kind.duplicates) for kind in layer_kinds(windows)] == [3, 3]
    widths = Stack([Layer(i, 4, 16 if i < 2 else 32) for i in range(8)])
    assert [kind.representative for kind in layer_kinds(widths)] == ["layers.0", "layers.2"]
    traced = trace(widths, torch.randn(2, 3, 8))
    assert set(traced.stubbed.values()) == {"layers.0", "layers.2"}


class Odd(nn.Module):
    """A layer whose forward decides by its number: equal in all attributes, different in what it does."""

    def __init__(self, index):
        super().__init__()
        self.layer_idx, self.proj = index, nn.Linear(8, 8)

    def forward(self, x):
        return self.proj(x) if self.layer_idx % 2 else torch.tanh(self.proj(x))


class Pair(nn.Module):
    """A layer that hands on more than its hidden state."""

    def __init__(self, index):
        super().__init__()
        self.proj = nn.Linear(8, 8)

    def forward(self, x):
        hidden = self.proj(x)
        return hidden, hidden.mean()


class Stack(nn.Module):
    def __init__(self, layer_class):
        super().__init__()
        self.layers = nn.ModuleList(layer_class(i) for i in range(8))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            x = x[0] * x[1] if isinstance(x, tuple) else x
        return x


@pytest.mark.parametrize("layer_class", [Odd, Pair])
def test_layers_that_a_pass_through_cannot_stand_for_are_traced_in_full(layer_class):
    traced = trace(Stack(layer_class), torch.randn(2, 3, 8), deduplicate=True)
    assert traced.stubbed == {}
    assert len([n for n in traced.graph.nodes if "linear" in str(n.target)]) == 8


def test_what_a_trace_cannot_do_is_in_its_attempts_and_not_printed(capfd, caplog):
    unguessable = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 6 * 6, 16))
    assert capture(unguessable).source == "static"
    assert trace(Branches(), torch.randn(2, 8)).attempts  # torch.export prints what it has of a graph
    assert capfd.readouterr() == ("", "")
    # Where torch's own handler writes to depends on who asked for it first.
    assert [one.name for one in caplog.records if one.levelno >= logging.WARNING] == []


class Calls(nn.Module):
    """Assigns its buffer anew and reads it, which torch.export cannot follow."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x):
        self.calls = self.calls + 1
        return x if self.calls.item() > 5 else 2 * x


def test_after_an_export_that_failed_the_model_assigns_its_buffers():
    model, x = Calls(), torch.randn(2, 8)
    with pytest.raises(TraceError, match="data-dependent"):
        trace(model, x, tracers=("export",))
    model(x)
    assert model.calls.item() == 1


def test_few_layers_are_traced_in_full_unless_asked_otherwise():
    model = zoo.tiny_model("llama", device="meta", num_hidden_layers=3)
    assert trace(model).stubbed == {}
    assert len(trace(model, deduplicate=True).stubbed) == 2


def test_126_layers_on_meta_are_traced_in_seconds():
    model = zoo.tiny_model("llama", device="meta", num_hidden_layers=126)
    start = time.process_time()  # not wall time: other tests may share the machine
    traced = trace(model)
    assert time.process_time() - start < 20
    assert len(traced.stubbed) == 125 and set(traced.stubbed.values()) == {"model.layers.0"}
    assert len(traced.graph.nodes) < 200


def test_a_capture_leaves_what_others_compiled_and_shows_dynamo_no_sizes() -> None:
    # The same class, as in a process that trains one model and plans another: torch._dynamo.reset() would recompile it.
    def backend_into(symbols: list[tuple[Any, ...]]) -> Any:
        def backend(graph_module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
            symbols.append(tuple(size for tensor in inputs for size in tensor.shape if not isinstance(size, int)))
            return graph_module.forward

        return backend

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.ReLU())

    before: list[tuple[Any, ...]] = []
    after: list[tuple[Any, ...]] = []
    first = torch.compile(build(), backend=backend_into(before))
    first(torch.randn(4, 8))
    for length in (3, 5, 7):
        trace(build(), (torch.randn(length, 8),))
    first(torch.randn(4, 8))
    assert before == [()]  # compiled once
    torch.compile(build(), backend=backend_into(after))(torch.randn(4, 8))
    assert after == [()]  # no size became a symbol by what the captures saw
