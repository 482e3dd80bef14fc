"""Calls of an engine: from threads, inside torch.compile, of many engines of one class, and of a model that changed."""

import copy
import gc
import threading
import warnings
import weakref

import pytest
import torch
import zoo_models
from torch import Tensor, nn

import deepwell as dw
from deepwell.formats.metrics import assert_bitwise_equal


class Layers(nn.Module):
    def __init__(self, count: int = 2, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def test_threads_share_an_engine_that_recomputes_layers() -> None:
    x = torch.randn(8, 32)
    engine = dw.compile(dw.capture(Layers(), x), recompute=True)
    ref, errors = engine(x).detach(), []

    def run() -> None:
        try:
            for _ in range(40):
                assert torch.equal(engine(x), ref)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert not any("forward" in vars(layer) for layer in engine.layers)  # by itself the model is as it was


def test_a_compiled_engine_and_one_in_a_compiled_model_run_their_formats() -> None:
    x = torch.randn(4, 32)
    engine = dw.compile(dw.capture(nn.Sequential(nn.Linear(32, 32)), x), precision="mxfp8")
    ref = engine(x)
    assert_bitwise_equal(torch.compile(engine, backend="aot_eager")(x), ref)
    assert_bitwise_equal(torch.compile(nn.Sequential(engine, nn.ReLU()), backend="aot_eager")(x), ref.relu())
    assert engine.deepwell.options.graphs == 1


def test_engines_of_one_class_do_not_count_against_each_other_and_leave_no_weights_behind(monkeypatch) -> None:
    from deepwell.engine import backend

    monkeypatch.setattr(backend, "MOST_GRAPHS", 2)
    x, weights = torch.randn(4, 32), []
    for _ in range(4):
        engine = dw.compile(dw.capture(Layers(1), x), precision="mxfp8")
        engine(x)
        weights.append(weakref.ref(engine.layers[0][0].weight))
        del engine
    gc.collect()
    assert [weight() for weight in weights] == [None] * 4


class Adapter(nn.Module):
    """Around a linear, as LoRA puts it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(base.in_features, 4, bias=False), nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def test_linears_keep_their_formats_when_adapters_are_put_around_them() -> None:
    x = torch.randn(8, 32)
    model = Layers()
    engine = dw.compile(dw.capture(model, x), precision_policy=dw.PrecisionPolicy("mxfp8"))
    engine(x)
    for layer in model.layers:
        layer[0] = Adapter(layer[0])
    before = engine.deepwell.options.counts["linear"]
    out = engine(x)
    assert engine.deepwell.options.counts["linear"] - before == 2
    assert not torch.equal(out, model(x))  # not what the model computes in fp32
    report = engine.report()
    assert all(row.binding != "as the model has it" for row in report.bindings)
    assert any("came after dw.compile" in note and "layers.0.0.down.weight" in note for note in report.notes)
    # A copy of the wrapped model knows them, too.
    deep = copy.deepcopy(engine)
    assert_bitwise_equal(deep(x), out)
    assert deep.deepwell.options.counts["linear"] == 2


def test_a_linear_that_was_replaced_is_reported_as_it_runs() -> None:
    x = torch.randn(8, 32)
    model = Layers()
    engine = dw.compile(dw.capture(model, x), precision_policy=dw.PrecisionPolicy("mxfp8"))
    engine(x)
    model.layers[1] = nn.Identity()
    engine(x)
    rows = {row.path: row for row in engine.report().bindings}
    assert "replaced" in rows["layers.1.0"].reason and "replaced" not in rows["layers.0.0"].reason


class Broken(nn.Module):
    """A break in the loop over the layers: Dynamo runs the whole function as it was written."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
            torch._dynamo.graph_break()
        return x


def test_a_model_that_a_graph_break_leaves_in_high_precision_is_a_warning_at_the_first_call() -> None:
    x = torch.randn(4, 32)
    policy = dw.PrecisionPolicy("mxfp8")
    engine = dw.compile(dw.capture(Broken(), x), precision_policy=policy)
    with pytest.warns(UserWarning, match="of 3 linears of Broken with a format, 3 run as they were written, in fp32"):
        engine(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine(x)
        dw.compile(dw.capture(Layers(), x), precision_policy=policy)(x)


def test_threads_generate_with_the_engine_and_call_the_model_as_it_is() -> None:
    class Counter(nn.Module):
        """Its own `generate`: feeds what it computed back to itself."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).tanh()

        def generate(self, x: Tensor, steps: int) -> Tensor:
            for _ in range(steps):
                x = self(x)
            return x

    model, x = Counter(), torch.randn(4, 32)
    engine = dw.compile(dw.capture(model, x), precision_policy=dw.PrecisionPolicy("mxfp8"))
    ours, plain = engine(engine(x)), model(x)
    assert not torch.equal(engine(x), plain)
    wrong: list[str] = []

    def generate() -> None:
        for _ in range(20):
            if not torch.equal(engine.generate(x, steps=2), ours):
                wrong.append("generated")

    def call() -> None:
        for _ in range(60):
            if not torch.equal(model(x), plain):
                wrong.append("called")

    threads = [threading.Thread(target=target) for target in (generate, generate, call)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and "forward" not in vars(model)


@pytest.mark.parametrize("precision", ["bf16", "mxfp8"])
def test_hooks_that_come_and_go_after_the_first_call_run(precision) -> None:
    model, x = Layers(), torch.randn(8, 32)
    engine = dw.compile(dw.capture(model, x), precision=precision)
    ways = (
        lambda m: m.register_forward_hook(lambda module, given, out: 2 * out),
        lambda m: m.register_forward_pre_hook(lambda module, given: (0.5 * given[0],)),
    )

    def gradient(call: nn.Module) -> Tensor:
        leaf = x.clone().requires_grad_()
        call(leaf).square().sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    plain = gradient(engine)
    for way in (*ways, *ways):  # what was compiled when one had left must see the next
        handle = way(model.layers[1][0])
        torch.testing.assert_close(gradient(engine), gradient(model), rtol=0.1, atol=0.5)
        assert (gradient(engine) - plain).norm() > 0.1 * plain.norm()
        handle.remove()
        assert_bitwise_equal(gradient(engine), plain)
    model.layers[0].register_full_backward_hook(lambda module, grads, given: (3 * grads[0],))
    torch.testing.assert_close(gradient(engine), gradient(model), rtol=0.1, atol=0.5)
    assert (gradient(engine) - plain).norm() > 0.1 * plain.norm()


def test_labels_that_are_the_ids_follow_labels_that_are_not(batch: dict[str, Tensor]) -> None:
    model = zoo_models.tiny_model("llama", num_hidden_layers=1)
    engine, ids = dw.compile(model, precision="bf16"), batch["input_ids"]
    positions = torch.arange(37).expand(2, -1).contiguous()
    engine(input_ids=ids, labels=ids.clone(), attention_mask=torch.ones_like(ids).tril(30))
    for call in ({"labels": ids}, {"labels": ids.clone()}):
        torch.testing.assert_close(
            engine(input_ids=ids, position_ids=positions, **call).loss, model(**batch, position_ids=positions).loss
        )
    assert engine.report().graphs == 2  # one for both calls


class Counting(nn.Module):
    """Counts its calls, and what it returns depends on how many there were."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(32, 32), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x) * (1 + self.calls)


def test_a_number_that_the_model_counts_up_does_not_compile_it_at_each_call() -> None:
    model, x = Counting(), torch.randn(4, 32)
    engine = dw.compile(model, precision="bf16", inductor=False)
    for call in range(1, 16):
        assert_bitwise_equal(engine(x), model.layer(x) * (1 + call))
    assert model.calls == 15 and type(model.calls) is int
    assert engine.report().graphs < 8


@pytest.mark.parametrize("precision", ["bf16", "mxfp8"])
def test_a_tensor_that_is_passed_twice_may_be_written_into(precision) -> None:
    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(32, 32)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            a.mul_(2)
            return self.layer(a) * 0 + b

    x = torch.randn(4, 32)
    given = x.clone()
    engine = dw.compile(Written(), precision=precision, inductor=False)
    assert_bitwise_equal(engine(given, given), 2 * x)
    assert_bitwise_equal(given, 2 * x)
