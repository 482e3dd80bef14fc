"""An engine is a drop-in for its model: the same call, outputs, parameters and keys, whatever is done to it."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import zoo_models
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import deepwell as dw
from deepwell.engine.backend import BackendOptions, compile_graph
from deepwell.engine.deferred import DeferredLogits
from deepwell.engine.engine import Engine
from deepwell.engine.report import EngineReport
from deepwell.errors import CaptureError, ConfigError, NumericsError, UnsupportedError
from deepwell.formats.metrics import assert_bitwise_equal, assert_no_worse_than

# fp32 sums in another order: a few last bits.
FP32 = {"rtol": 2e-5, "atol": 2e-6}


@pytest.fixture
def model() -> nn.Module:
    return zoo_models.tiny_model("llama", num_key_value_heads=2)


class MLP(nn.Module):
    """The smallest model with a linear to bind: 16 -> 48 -> 8, sizes that no FP8 GEMM takes as they are."""

    def __init__(self, k: int = 20, hidden: int = 36, n: int = 10) -> None:
        super().__init__()
        self.up = nn.Linear(k, hidden)
        self.down = nn.Linear(hidden, n, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)))


def _gradients(module: nn.Module) -> dict[str, Tensor]:
    out = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad(set_to_none=True)
    return out


# ---- saved, copied, taken apart ----


def test_a_pickled_engine_is_an_error_that_says_what_to_save() -> None:
    model, x = MLP(), torch.randn(4, 20)
    engine = dw.compile(model)
    for save in (pickle.dumps, lambda e: torch.save(e, io.BytesIO()), lambda e: torch.save({"e": e}, io.BytesIO())):
        with pytest.raises(UnsupportedError, match=r"save engine\.state_dict\(\)"):
            save(engine)
    file = io.BytesIO()
    torch.save(engine.state_dict(), file)
    file.seek(0)
    other = MLP()
    other.load_state_dict(torch.load(file))
    assert_bitwise_equal(dw.compile(other)(x), engine(x))


def test_copies_still_work() -> None:
    model, x = nn.Sequential(nn.Linear(32, 32), nn.ReLU()), torch.randn(4, 32)
    engine = dw.compile(model)
    shallow, deep = copy.copy(engine), copy.deepcopy(engine)
    assert shallow.deepwell.model is model and deep.deepwell.model is not model
    assert_bitwise_equal(shallow(x), engine(x))
    assert_bitwise_equal(deep(x), engine(x))
    assert len(shallow) == len(deep) == 2


def test_parts_are_the_models() -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    engine = dw.compile(model)
    assert len(engine) == 3 and engine[0] is model[0] and engine[-1] is model[2] and list(engine) == list(model)
    assert isinstance(engine, Engine) and len(engine[:2]) == 2
    plain = dw.compile(MLP())
    assert bool(plain) and not hasattr(plain, "__len__") and not hasattr(plain, "__iter__")
    with pytest.raises(TypeError, match="not subscriptable"):
        plain[0]


# ---- the same outputs ----


def test_an_fp32_model_under_bf16_policy_computes_what_it_did(model, batch) -> None:
    ref = model(**batch)
    ref.loss.backward()
    ref_grads = _gradients(model)
    engine = dw.compile(model, precision="bf16")
    out = engine(**batch)
    out.loss.backward()
    torch.testing.assert_close(out.loss, ref.loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(out.logits, ref.logits, **FP32)
    grads = _gradients(model)
    assert grads.keys() == ref_grads.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(grad, ref_grads[name], **FP32, msg=name)


def test_a_bf16_model_is_no_less_accurate_than_eager(model, batch) -> None:
    # Against the fp32 model with the same weights: the engine's error is at most twice eager bf16's.
    model.bfloat16()
    exact = zoo_models.tiny_model("llama", num_key_value_heads=2)
    exact.load_state_dict(model.state_dict())
    ref, own = exact(**batch).logits, model(**batch).logits
    engine = dw.compile(model, precision="bf16")
    assert_no_worse_than(engine(**batch).logits.detach(), own.detach(), ref.detach())


def test_output_types_and_keys_are_the_models(model, batch) -> None:
    engine = dw.compile(model, precision="mxfp8")
    ref, out = model(**batch), engine(**batch)
    assert type(out) is type(ref)
    assert list(out.keys()) == list(ref.keys())
    assert isinstance(out.logits, Tensor)
    assert out.logits.shape == ref.logits.shape and out.logits.dtype == ref.logits.dtype
    # Without labels there is no loss to fuse with, and the logits are plain.
    plain = engine(input_ids=batch["input_ids"])
    assert plain.loss is None
    assert type(plain.logits) is Tensor


# ---- the same parameters ----


def test_parameters_and_keys_are_the_models_own(model) -> None:
    engine = dw.compile(model, precision="mxfp8")
    assert list(engine.state_dict()) == list(model.state_dict())
    assert [name for name, _ in engine.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert all(a is b for a, b in zip(engine.parameters(), model.parameters(), strict=True))
    assert [name for name, _ in engine.named_modules()] == [name for name, _ in model.named_modules()]
    assert engine.config is model.config
    assert isinstance(engine, nn.Module)


def test_a_saved_checkpoint_loads_into_the_plain_model_and_back(model, batch, tmp_path) -> None:
    engine = dw.compile(model, precision="bf16")
    engine.save_pretrained(tmp_path)
    plain = type(model).from_pretrained(tmp_path)
    assert list(plain.state_dict()) == list(model.state_dict())
    assert_bitwise_equal(plain(**batch).loss, model(**batch).loss)
    other = zoo_models.tiny_model("llama", num_key_value_heads=2, seed=1)
    other_engine = dw.compile(other, precision="bf16")
    assert other_engine(**batch).loss != engine(**batch).loss
    other_engine.load_state_dict(plain.state_dict())
    assert_bitwise_equal(other_engine(**batch).loss, engine(**batch).loss)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.AdamW(p, lr=1e-2),
        lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9),
        lambda p: torch.optim.Adafactor(p, lr=5e-2),
    ],
    ids=["AdamW", "SGD", "Adafactor"],
)
def test_any_optimizer_trains_it(model, batch, optimizer) -> None:
    engine = dw.compile(model, precision="mxfp8")
    step = optimizer(engine.parameters())
    losses = []
    for _ in range(6):
        loss = engine(**batch).loss
        loss.backward()
        step.step()
        step.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.3
    assert engine.options.graphs == 1


# ---- weights that change under it ----


def _edit_in_place(model: nn.Module) -> None:
    with torch.no_grad():
        model.up.weight.mul_(-2)


def _load(model: nn.Module) -> None:
    model.load_state_dict({name: -2 * value for name, value in model.state_dict().items()})


def _swap_data(model: nn.Module) -> None:
    model.up.weight.data = -2 * model.up.weight.data


def _replace_parameter(model: nn.Module) -> None:
    model.up.weight = nn.Parameter(-2 * model.up.weight.detach())


def _foreign_optimizer(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = torch.full_like(p, 3.0)
    torch.optim.SGD(model.parameters(), lr=0.1).step()


@pytest.mark.parametrize("change", [_edit_in_place, _load, _swap_data, _replace_parameter, _foreign_optimizer])
@pytest.mark.parametrize("scheme", ["fp8_row", "emulate:mxfp8"])
def test_the_next_forward_uses_changed_weights(change, scheme) -> None:
    # A quantized copy that outlives its weight would go unnoticed for thousands of steps.
    model = MLP()
    options = BackendOptions(schemes=dict.fromkeys(("up", "down"), "|".join([scheme] * 3)))
    compiled = torch.compile(model, backend=lambda graph, inputs: compile_graph(graph, inputs, options))
    x = torch.randn(8, 20)
    before = compiled(x)
    change(model)
    after = compiled(x)
    torch._dynamo.reset()
    fresh = torch.compile(model, backend=lambda graph, inputs: compile_graph(graph, inputs, options))(x)
    assert not torch.equal(before, after)
    assert_bitwise_equal(after, fresh)


def _copy_through_the_engine(model: nn.Module, engine: nn.Module) -> None:
    engine.load_state_dict({name: -2 * value for name, value in model.state_dict().items()})


def _swap_in_optimizer(model: nn.Module, engine: nn.Module) -> None:
    class Swapping(torch.optim.Optimizer):
        """Gives parameters new memory instead of writing into theirs, as sharded optimizers do."""

        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

        def step(self, closure: Any = None) -> None:
            for p in self.param_groups[0]["params"]:
                p.data = p.data * -2

    Swapping(engine.parameters()).step()


def _write_through_a_view(model: nn.Module, engine: nn.Module) -> None:
    with torch.no_grad():
        model.up.weight.view(-1)[:7].fill_(3.0)


def _write_through_numpy(model: nn.Module, engine: nn.Module) -> None:
    # No version counter moves: only quantizing what lies there now is safe.
    model.up.weight.detach().numpy()[:] *= -2


@pytest.mark.parametrize(
    "change",
    [
        lambda model, engine: _edit_in_place(model),
        lambda model, engine: _load(model),
        lambda model, engine: _swap_data(model),
        lambda model, engine: _replace_parameter(model),
        lambda model, engine: _foreign_optimizer(model),
        _copy_through_the_engine,
        _swap_in_optimizer,
        _write_through_a_view,
        _write_through_numpy,
    ],
    ids=["in place", "load", "data", "replaced", "optimizer", "engine", "swapped", "view", "numpy"],
)
def test_an_engine_never_multiplies_by_a_weight_that_is_gone(change) -> None:
    model, x = MLP(k=32, hidden=64, n=32), torch.randn(8, 32, requires_grad=True)
    engine = dw.compile(model, precision_policy=dw.PrecisionPolicy("mxfp8"))
    engine(x).sum().backward()
    before = engine(x).detach()
    change(model, engine)
    x.grad = None
    out = engine(x)
    out.sum().backward()
    got = x.grad.clone()  # the backward, too, multiplies by what is there now
    torch._dynamo.reset()
    fresh, x.grad = dw.compile(model, precision_policy=dw.PrecisionPolicy("mxfp8")), None
    ref = fresh(x)
    ref.sum().backward()
    assert not torch.equal(out, before)
    assert_bitwise_equal(out, ref)
    assert_bitwise_equal(got, x.grad)


# ---- ways of training ----


def test_evaluation_without_gradients_computes_no_gradients(model, batch, monkeypatch) -> None:
    from deepwell.kernels.head import torch_ops as library_head

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("gradients of the head were computed")

    ref = model.eval()(**batch).loss
    engine = dw.compile(model, precision="bf16")
    monkeypatch.setattr(library_head, "linear_cross_entropy", refuse)
    with torch.no_grad():
        loss = engine(**batch).loss
    assert not loss.requires_grad
    torch.testing.assert_close(loss, ref, rtol=1e-6, atol=0)
    with torch.inference_mode():
        torch.testing.assert_close(engine(**batch).loss, ref.detach(), rtol=1e-6, atol=0)
    with pytest.raises(AssertionError, match="gradients of the head"):
        engine(**batch)  # with gradients wanted, the same patch is met


def test_several_shapes_share_one_graph(model) -> None:
    engine = dw.compile(model, precision="mxfp8").eval()
    for batch_size, length in ((2, 24), (3, 40), (2, 33), (5, 17), (4, 64)):
        ids = torch.randint(3, zoo_models.VOCAB, (batch_size, length))
        loss = engine(input_ids=ids, labels=ids).loss
        torch.testing.assert_close(loss, model(input_ids=ids, labels=ids).loss, rtol=2e-3, atol=0)
    # One graph for the first shape, at most two more as Dynamo opens batch and length; none for the others.
    assert engine.options.graphs <= 3
    # The causal mask is recognised in each, symbolic or not.
    assert engine.options.counts["causal_mask"] == 2 * engine.options.graphs
    assert engine.options.counts["linear"] == 14 * engine.options.graphs


def test_too_many_graphs_are_an_error_not_a_slow_model(monkeypatch) -> None:
    # Past its limit Dynamo runs the model as it was written, in high precision, and says so in a log at best.
    from deepwell.engine import backend as module

    engine, x = dw.compile(MLP(), precision="mxfp8"), torch.randn(4, 20)
    engine(x)
    monkeypatch.setattr(module, "MOST_GRAPHS", 1)
    with pytest.raises(CaptureError, match="was compiled 1 times"), torch.no_grad():
        engine(x)


def test_gradients_accumulate_over_micro_batches(model, batch) -> None:
    engine = dw.compile(model, precision="bf16")
    halves = [{name: value[i : i + 1] for name, value in batch.items()} for i in range(2)]
    for half in halves:
        (engine(**half).loss / 2).backward()
    accumulated = _gradients(model)
    model(**batch).loss.backward()
    for name, grad in _gradients(model).items():
        torch.testing.assert_close(accumulated[name], grad, **FP32, msg=name)


def test_accumulation_in_low_precision_is_the_sum_of_the_micro_batches(model, batch) -> None:
    engine = dw.compile(model, precision="mxfp8")
    halves = [{name: value[i : i + 1] for name, value in batch.items()} for i in range(2)]
    apart = []
    for half in halves:
        engine(**half).loss.backward()
        apart.append(_gradients(model))
        model.zero_grad(set_to_none=True)
    for half in halves:
        engine(**half).loss.backward()
    for name, grad in _gradients(model).items():
        torch.testing.assert_close(grad, apart[0][name] + apart[1][name], **FP32, msg=name)
    assert engine.options.graphs == 1


def test_training_and_evaluation_take_turns_without_compiling_again(model, batch) -> None:
    engine = dw.compile(model, precision="mxfp8")
    losses = []
    for _ in range(3):
        engine.train()
        engine(**batch).loss.backward()
        engine.eval()
        with torch.no_grad():
            losses.append(engine(**batch).loss.item())
    assert engine.options.graphs == 2  # one with gradients, one without
    assert losses[0] == losses[1] == losses[2]


@pytest.mark.parametrize("precision", [pytest.param("bf16", marks=pytest.mark.slow), "mxfp8"])
def test_activation_checkpointing_of_hugging_face_changes_nothing(model, batch, precision) -> None:
    engine = dw.compile(model, precision=precision)
    loss = engine(**batch).loss
    loss.backward()
    grads, counts = _gradients(model), dict(engine.options.counts)
    torch._dynamo.reset()
    model.gradient_checkpointing_enable()
    again = dw.compile(model, precision=precision)
    loss_again = again(**batch).loss
    loss_again.backward()
    assert_bitwise_equal(loss_again, loss)
    for name, grad in _gradients(model).items():
        torch.testing.assert_close(grad, grads[name], **FP32, msg=name)
    # The layers lie in nested graphs now; the passes find them there.
    for name in ("causal_mask", "kv_heads", "rms_norm", "linear", "swiglu", "cross_entropy"):
        assert again.options.counts[name] == counts[name], name


def test_torch_checkpoint_inside_a_plain_model(batch) -> None:
    class Checkpointed(MLP):
        def forward(self, x: Tensor) -> Tensor:
            return self.down(checkpoint(lambda t: F.relu(self.up(t)), x, use_reentrant=False))

    model, x = Checkpointed(k=32, hidden=64, n=32), torch.randn(8, 32)
    plain = MLP(k=32, hidden=64, n=32)
    plain.load_state_dict(model.state_dict())
    engines = [dw.compile(one, precision="mxfp8") for one in (model, plain)]
    for engine in engines:
        engine(x).square().sum().backward()
        assert engine.options.rewritten == {"up", "down"}
    for got, ref in zip(model.parameters(), plain.parameters(), strict=True):
        assert_bitwise_equal(got.grad, ref.grad)


def test_frozen_parameters_get_no_gradient(model, batch) -> None:
    model.requires_grad_(False)
    model.model.layers[0].mlp.requires_grad_(True)
    engine = dw.compile(model, precision="mxfp8")
    engine(**batch).loss.backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None}
    assert trained == {name for name, _ in model.named_parameters() if "layers.0.mlp" in name}
    # A trainable head on a frozen body, and the other way round.
    for head, body in ((True, False), (False, True)):
        model.zero_grad(set_to_none=True)
        model.requires_grad_(body)
        model.lm_head.requires_grad_(head)
        engine(**batch).loss.backward()
        assert (model.lm_head.weight.grad is not None) == head
        assert (model.model.embed_tokens.weight.grad is not None) == body


def test_training_mode_is_the_models(model) -> None:
    engine = dw.compile(model, precision="bf16")
    assert engine.training and model.training
    engine.eval()
    assert not model.training and not model.model.layers[0].training and not engine.training
    model.train()
    assert engine.training


def test_dropout_follows_the_mode() -> None:
    class Dropped(MLP):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(F.dropout(x, 0.5, self.training))

    engine, x = dw.compile(Dropped(), precision="bf16"), torch.ones(8, 20)
    assert not torch.equal(engine(x), engine(x))
    engine.eval()
    assert_bitwise_equal(engine(x), engine(x))


# ---- logits that are computed when looked at ----


@pytest.fixture
def outputs(model, batch) -> tuple[Tensor, Tensor, nn.Module]:
    """(the model's logits, the engine's deferred ones, the model), in fp32."""
    engine = dw.compile(model, precision="bf16")
    out = engine(**batch)
    assert isinstance(out.logits, DeferredLogits)
    return model(**batch).logits, out.logits, model


def test_facts_about_deferred_logits_cost_nothing(outputs) -> None:
    ref, logits, _ = outputs
    assert logits.shape == ref.shape and logits.size(-1) == ref.size(-1) and logits.ndim == 3
    assert logits.dtype == ref.dtype and logits.device == ref.device and logits.numel() == ref.numel()
    assert "DeferredLogits" in repr(logits) and len(logits) == len(ref)
    assert logits.is_floating_point() and not logits.is_cuda
    assert logits._value is None  # nobody looked


def test_deferred_logits_are_the_models(outputs) -> None:
    ref, logits, _ = outputs
    torch.testing.assert_close(logits, ref, **FP32)
    value = logits.materialize()
    for function in (
        lambda t: t.argmax(-1),
        lambda t: t.softmax(-1),
        lambda t: t[:, -1, :5],
        lambda t: t[..., :-1, :].contiguous(),
        lambda t: torch.topk(t, 3).values,
        lambda t: t.detach(),
        lambda t: t.float() * 2 + 1,
        lambda t: 1 - t,
        lambda t: torch.cat([t, t]),
        lambda t: t.cpu(),
        lambda t: t.view(-1, t.shape[-1]),
        lambda t: torch.stack(t.unbind(0)),
        lambda t: torch.from_numpy(t.detach().numpy()),
        lambda t: t.to(torch.bfloat16),
        lambda t: F.log_softmax(t, -1),
        lambda t: torch.tensor(t.tolist()),
        lambda t: t.data,
    ):
        got = function(logits)
        assert type(got) is Tensor or got is logits  # as `cpu()` is on a CPU
        assert_bitwise_equal(got.detach(), function(value))


def test_gradients_flow_through_deferred_logits(model, batch) -> None:
    engine = dw.compile(model, precision="bf16")
    for net in (model, engine):
        out = net(**batch)
        (out.loss + out.logits.square().mean()).backward()
        if net is model:
            ref = _gradients(model)
    for name, grad in _gradients(model).items():
        torch.testing.assert_close(grad, ref[name], **FP32, msg=name)
    assert out.logits.requires_grad


def test_deferred_logits_are_saved_and_copied_as_plain_tensors(outputs) -> None:
    import copy

    _, logits, _ = outputs
    file = io.BytesIO()
    torch.save({"logits": logits.detach()}, file)
    file.seek(0)
    assert_bitwise_equal(torch.load(file)["logits"], logits.materialize().detach())
    assert_bitwise_equal(copy.deepcopy(logits.detach()), logits.materialize().detach())


def test_logits_of_a_weight_that_is_gone_are_an_error_not_wrong_numbers(model, batch) -> None:
    engine = dw.compile(model, precision="bf16")
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.1)
    seen, unseen = engine(**batch), engine(**batch)
    before = seen.logits.argmax(-1)
    seen.loss.backward()
    optimizer.step()
    assert torch.equal(seen.logits.argmax(-1), before)  # computed in time, kept
    assert unseen.logits.shape == seen.logits.shape
    with pytest.raises(NumericsError, match=r"before optimizer\.step"):
        unseen.logits.argmax(-1)


def test_an_evaluation_loop_reads_loss_and_accuracy(model, batch) -> None:
    engine = dw.compile(model, precision="mxfp8").eval()
    right = total = 0
    with torch.no_grad():
        for _ in range(2):
            out = engine(**batch)
            shifted = out.logits[:, :-1].argmax(-1)
            right += (shifted == batch["labels"][:, 1:]).sum().item()
            total += shifted.numel()
            assert torch.isfinite(out.loss)
    assert 0 <= right <= total == 2 * 2 * 36


def test_without_fusing_the_head_logits_are_plain(model, batch) -> None:
    engine = dw.compile(model, precision="bf16", fuse_head=False)
    out = engine(**batch)
    assert type(out.logits) is Tensor
    assert engine.report().passes.get("cross_entropy", 0) == 0


# ---- Inductor on a CPU ----


@pytest.mark.parametrize(
    "make", [MLP, lambda: zoo_models.tiny_model("llama", num_hidden_layers=1)], ids=["mlp", "llama"]
)
@pytest.mark.usefixtures("cxx_compiler")
def test_inductor_compiles_what_no_pass_touches(make, batch) -> None:
    model = make().eval()
    inputs = {"x": torch.randn(8, 20)} if isinstance(model, MLP) else batch
    engines = [dw.compile(model, precision="mxfp8", inductor=inductor) for inductor in (False, True)]
    outputs = [engine(**inputs) for engine in engines]
    eager, compiled = (out if isinstance(out, Tensor) else out.loss for out in outputs)
    torch.testing.assert_close(compiled, eager, rtol=1e-3, atol=1e-4)
    compiled.sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    notes = [" ".join(engine.report().notes) for engine in engines]
    assert "AOT eager" in notes[0] and "AOT eager" not in notes[1]


# ---- bad input ----


def test_strict_raises_where_a_format_is_not_native(model) -> None:
    with pytest.raises(UnsupportedError, match=r"q_proj fwd: mxfp8 is emulated here.*cpu"):
        dw.compile(model, precision="mxfp8", fallback="strict")
    assert dw.compile(model, precision="bf16", fallback="strict") is not None


def test_wrong_arguments_name_what_is_accepted(model) -> None:
    with pytest.raises(ConfigError, match=r"mxfp9.*mxfp8"):
        dw.compile(model, precision="mxfp9")
    with pytest.raises(ConfigError, match=r"fallback is 'strictly'.*strict"):
        dw.compile(model, fallback="strictly")
    with pytest.raises(ConfigError, match="ir is a str"):
        dw.compile("llama")
    with pytest.raises(ConfigError, match="seq_len is 0"):
        dw.optimize_for_blackwell(model, seq_len=0)


def test_a_meta_model_cannot_be_compiled() -> None:
    with pytest.raises(ConfigError, match="meta device"):
        dw.compile(zoo_models.tiny_model("llama", device="meta"))


def test_inputs_on_another_device_are_named(model, batch) -> None:
    engine = dw.compile(model, precision="bf16")
    with pytest.raises(ConfigError, match=r"input_ids is on meta and the engine on cpu"):
        engine(**{name: value.to("meta") for name, value in batch.items()})
    with pytest.raises(ConfigError, match=r"argument 0 is on meta"):
        engine(batch["input_ids"].to("meta"))


def test_a_model_that_moved_is_noticed(batch) -> None:
    model = MLP()
    engine = dw.compile(model, precision="bf16")
    model.to("meta")
    with pytest.raises(ConfigError, match=r"compiled for cpu and its model is on meta"):
        engine(torch.randn(2, 20))


@pytest.mark.parametrize("precision", ["fp8", "mxfp8", "nvfp4"])
def test_sizes_that_no_block_divides_work(precision) -> None:
    # 20 x 36 x 10 with 7 rows: nothing is a multiple of 16.
    model = MLP()
    policy = dw.PrecisionPolicy(precision)
    engine = dw.compile(model, precision_policy=policy)
    x = torch.randn(7, 20, requires_grad=True)
    engine(x).sum().backward()
    assert x.grad is not None and torch.isfinite(x.grad).all()
    assert engine.options.rewritten == {"up", "down"}


@pytest.mark.parametrize("scheme", ["fp8_row", "emulate:mxfp8", "emulate:nvfp4", "emulate:fp8"])
def test_nan_and_inf_in_the_input_stay_visible(scheme) -> None:
    model = nn.Linear(32, 32, bias=False)
    options = BackendOptions(schemes={"": "|".join([scheme] * 3), "linear": "|".join([scheme] * 3)})
    wrapped = nn.Sequential()
    wrapped.add_module("linear", model)
    compiled = torch.compile(wrapped, backend=lambda graph, inputs: compile_graph(graph, inputs, options))
    for bad in (float("nan"), float("inf")):
        x = torch.randn(4, 32)
        x[1, 3] = bad
        out = compiled(x)
        assert options.counts["linear"] >= 1
        assert not out[1].isfinite().any()
        if scheme in ("fp8_row", "emulate:mxfp8"):  # scales of rows and blocks keep it in its row
            assert out[[0, 2, 3]].isfinite().all()


@pytest.mark.parametrize("precision", ["bf16", "fp8", "mxfp8", "nvfp4"])
def test_nan_in_a_weight_reaches_the_loss(precision, batch) -> None:
    # Clamping to a format's range must not make a number of it.
    model = zoo_models.tiny_model("llama")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[3, 5] = float("nan")
    loss = dw.compile(model, precision=precision)(**batch).loss
    assert loss.isnan()


@pytest.mark.parametrize("sizes", [(20, 36, 10), (17, 33, 5), (16, 48, 32)], ids=str)
@pytest.mark.parametrize("tokens", [1, 7, 16])
def test_fp8_rows_take_any_size(sizes, tokens) -> None:
    # Hopper's GEMMs want multiples of 16 in K and N, and in T for the weight's gradient: zeros fill up.
    k, hidden, n = sizes
    model = MLP(k=k, hidden=hidden, n=n)
    options = BackendOptions(schemes=dict.fromkeys(("up", "down"), "fp8_row|fp8_row|fp8_row"))
    compiled = torch.compile(model, backend=lambda graph, inputs: compile_graph(graph, inputs, options))
    x = torch.randn(tokens, k)
    out = compiled(x)
    out.square().sum().backward()
    assert options.rewritten == {"up", "down"} and out.shape == (tokens, n)
    assert (out - model(x)).norm() < 0.15 * model(x).norm()
    assert all(p.grad.shape == p.shape and p.grad.isfinite().all() for p in model.parameters())


def test_a_module_without_linears_runs_as_it_is() -> None:
    model, x = nn.Sequential(nn.Conv1d(3, 4, 3), nn.ReLU()), torch.randn(2, 3, 9)
    engine = dw.compile(model, precision="mxfp8")
    torch.testing.assert_close(engine(x), model(x))
    assert not engine.options.rewritten


def test_what_is_no_module_is_named() -> None:
    for bad in (3, None, torch.randn(2, 2), nn.Linear):
        with pytest.raises(ConfigError, match="ir is a"):
            dw.compile(bad)


# ---- the report ----


def test_the_report_folds_equal_layers_and_json_keeps_every_row(batch) -> None:
    model = zoo_models.tiny_model("llama", num_hidden_layers=6)
    engine = dw.compile(model, precision="mxfp8")
    report = engine.report()
    assert len(report.bindings) == (6 * 7 + 1) * 3
    text = str(report)
    assert "layers 0-5" in text and len(text.splitlines()) < 25
    assert max(map(len, text.splitlines())) <= 120
    assert "call the engine once" in text
    engine(**batch)
    after = engine.report()
    assert "rms_norm 13" in str(after) and after.graphs == 1
    assert EngineReport.from_json(after.to_json()) == after
    with pytest.raises(ConfigError, match="not the report"):
        EngineReport.from_json("{}")


def test_the_report_shows_layers_that_differ(model) -> None:
    policy = dw.PrecisionPolicy("mxfp8")
    policy.set_layer_precision("layers 1-1 mlp.down", "bf16", gemms="wgrad")
    text = str(dw.compile(model, precision_policy=policy).report())
    assert "layer 0" in text and "layer 1" in text
    assert "fwd dgrad" in text and "wgrad" in text


def test_a_linear_that_no_graph_holds_is_a_note() -> None:
    class Hidden(MLP):
        def forward(self, x: Tensor) -> Tensor:
            return torch.einsum("tk,nk->tn", F.relu(self.up(x)), self.down.weight)

    engine = dw.compile(Hidden(k=32, hidden=32, n=32), precision="mxfp8")
    engine(torch.randn(4, 32))
    if "down" in engine.bound.schemes:
        assert any("down" in note for note in engine.report().notes)
    assert engine.options.rewritten == {"up"}
    assert not any("up" in note and "not met" in note for note in engine.report().notes)


def test_a_graph_break_is_compiled_in_pieces_and_reported() -> None:
    class Broken(MLP):
        def forward(self, x: Tensor) -> Tensor:
            h = F.relu(self.up(x))
            torch._dynamo.graph_break()
            return self.down(h)

    model, x = Broken(), torch.randn(8, 20)
    plain = MLP()
    plain.load_state_dict(model.state_dict())
    engine = dw.compile(model, precision="mxfp8")
    out = engine(x)
    assert engine.options.graphs == 2 and engine.options.rewritten == {"up", "down"}
    assert any("broke the graph" in note for note in engine.report().notes)
    assert_bitwise_equal(out, dw.compile(plain, precision="mxfp8")(x))


def test_experts_have_the_policys_format_and_routers_stay_high_precision(batch) -> None:
    model = zoo_models.tiny_model("qwen3_moe")
    report = dw.compile(model, precision="mxfp8").report()
    experts = [row for row in report.bindings if "experts" in row.path]
    assert experts and all(row.scheme == "emulate:mxfp8" and "mxfp8" in row.reason for row in experts)
    routers = [row for row in report.bindings if row.path.endswith("mlp.gate")]
    assert routers and all(row.format == "bf16" for row in routers)
