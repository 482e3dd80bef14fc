"""What `dw.compile` takes beside a fixed policy: formats that change with the step, recomputed layers, plans."""

from dataclasses import replace

import pytest
import torch
import zoo_models
from torch import Tensor, nn

import deepwell as dw
from deepwell.engine.report import EngineReport
from deepwell.errors import ConfigError, UnsupportedError
from deepwell.formats.metrics import assert_bitwise_equal
from deepwell.planner.layout import Recompute


def _two_phases() -> dw.PrecisionPolicy:
    """bf16 for ten steps, then MXFP8."""
    policy = dw.PrecisionPolicy("mxfp8")
    for path in ("path:up", "path:down"):
        policy.set_layer_precision(path, "bf16", steps=":10")
    return policy


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def _as(policy: str, model: nn.Module, x: Tensor) -> Tensor:
    torch._dynamo.reset()
    return dw.compile(model, precision_policy=dw.PrecisionPolicy(policy))(x)


# ---- steps ----


def test_formats_change_at_their_step_and_not_before() -> None:
    model, x = MLP(), torch.randn(8, 32)
    low, high = _as("mxfp8", model, x), _as("bf16", model, x)
    assert not torch.equal(low, high)
    torch._dynamo.reset()
    engine = dw.compile(model, precision_policy=_two_phases())
    formats = {}
    for step in (0, 1, 9, 10, 11, 500):
        out = engine.at_step(step)(x)
        assert_bitwise_equal(out, high if step < 10 else low)
        formats[step] = {row.format for row in engine.report().bindings}
    assert formats == {step: {"bf16"} if step < 10 else {"mxfp8"} for step in formats}
    # Back to the first phase, whose graphs are still there: two compilations in all.
    first = engine.options
    assert_bitwise_equal(engine.at_step(3)(x), high)
    assert [first.graphs, engine.options.graphs] == [1, 1] and engine.options is not first


def test_spans_of_equal_formats_share_what_was_compiled() -> None:
    policy = dw.PrecisionPolicy("mxfp8")
    policy.set_layer_precision("path:up", "bf16", steps="5:10")
    policy.set_layer_precision("path:up", "bf16", steps="20:30")
    engine, x = dw.compile(MLP(), precision_policy=policy), torch.randn(8, 32)
    seen = {}
    for step in range(0, 40, 5):
        engine.at_step(step)(x)
        seen[step] = id(engine.options)
    assert len(set(seen.values())) == 2
    assert seen[5] == seen[20] == seen[25] and seen[0] == seen[10] == seen[35] != seen[5]
    assert engine.options.graphs == 1


def test_training_goes_on_over_a_change() -> None:
    torch.manual_seed(0)
    model, x, y = MLP(), torch.randn(64, 32), torch.randn(64, 32)
    engine = dw.compile(model, precision_policy=_two_phases())
    optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-2)
    losses = []
    for step in range(20):
        loss = (engine.at_step(step)(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[19] < losses[10] < losses[0]


def test_the_report_says_what_is_bound_and_when_it_changes() -> None:
    engine = dw.compile(MLP(), precision_policy=_two_phases())
    report = engine.report()
    assert report.step == 0 and any(
        "changes at step 10; bound now is what it says of step 0" in n for n in report.notes
    )
    after = engine.at_step(12).report()
    assert after.step == 10 and "from step 10 on" in str(after)
    assert EngineReport.from_json(after.to_json()) == after
    steady = dw.compile(MLP(), precision="mxfp8").at_step(10**6).report()
    assert steady.step == 0 and not any("changes at step" in note for note in steady.notes)


def test_strict_looks_at_every_phase_before_the_first_step() -> None:
    with pytest.raises(UnsupportedError, match="mxfp8 is emulated here"):
        dw.compile(MLP(), precision_policy=_two_phases(), fallback="strict")


@pytest.mark.parametrize("step", [-1, 1.0, "3", True])
def test_a_step_that_is_none_is_named(step) -> None:
    with pytest.raises(ConfigError, match="step is"):
        dw.compile(MLP(), precision="bf16").at_step(step)


# ---- layers that are computed again ----


class Layers(nn.Module):
    """Four equal layers, of which each keeps what its ReLU and its linears need."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MLP() for _ in range(4))
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def _kept(engine: nn.Module, x: Tensor) -> tuple[list[Tensor], int]:
    """Gradients and the bytes of activations that lie between forward and backward."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor.nbytes if not isinstance(tensor, nn.Parameter) else 0
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = engine(x)
    out.sum().backward()
    return [p.grad.clone() for p in engine.parameters()], sum(kept.values())


@pytest.mark.parametrize("precision", ["bf16", "mxfp8"])
def test_recomputed_layers_change_no_gradient_and_keep_less(precision) -> None:
    model, x = Layers(), torch.randn(256, 32)
    grads, kept = _kept(dw.compile(model, precision=precision), x)
    model.zero_grad(set_to_none=True)
    torch._dynamo.reset()
    engine = dw.compile(model, precision=precision, recompute=True)
    again, less = _kept(engine, x)
    assert less < 0.7 * kept
    for mine, theirs in zip(again, grads, strict=True):
        assert_bitwise_equal(mine, theirs)
    assert any("computed again in the backward: 4 of 4 layers" in note for note in engine.report().notes)
    # The model called by itself is as it was.
    assert not any("forward" in vars(layer) for layer in model.layers)


def test_hugging_face_layers_recompute_themselves(batch) -> None:
    model = zoo_models.tiny_model("llama").train()
    reference = model(**batch).loss
    reference.backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    engine = dw.compile(model, precision="bf16", recompute=True)
    loss = engine(**batch).loss
    loss.backward()
    assert model.is_gradient_checkpointing
    torch.testing.assert_close(loss, reference, rtol=1e-5, atol=0)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, wanted[name], rtol=1e-3, atol=1e-5)


def test_a_word_says_which_copies_the_backward_makes_again() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    for asked, word in ((False, "hidden"), ("copies", "copies"), ("hidden", "hidden"), ("nothing", "nothing")):
        engine = dw.compile(model, precision="bf16", recompute=asked)
        assert engine.options.recompute == word and engine.deepwell.recomputed is None
    with pytest.raises(ConfigError, match=r"recompute is 'all'; it takes True \(whole layers\), False, nothing"):
        dw.compile(model, precision="bf16", recompute="all")


def test_a_model_without_layers_cannot_recompute_them() -> None:
    with pytest.raises(ConfigError, match="no repeated layers"):
        dw.compile(nn.Sequential(nn.Linear(8, 8)), precision="bf16", recompute=True)


# ---- plans ----


@pytest.fixture(scope="module")
def plan() -> dw.Plan:
    model = zoo_models.tiny_model("llama")
    return dw.autoplan(dw.capture(model), hw="1xH100", seq_len=64, global_batch=16)


def test_a_plan_brings_its_policy_and_its_layout(plan, batch) -> None:
    model = zoo_models.tiny_model("llama")
    engine = dw.compile(dw.capture(model), plan=plan, fallback="safe")
    report = engine.report()
    assert engine.policy == plan.workload.precision_policy
    assert engine.plan is plan and report.plan == str(plan.layout) and f"plan {plan.layout}" in str(report)
    assert EngineReport.from_json(report.to_json()) == report
    engine(**batch).loss.backward()
    # What is asked for beside it wins.
    explicit = dw.compile(dw.capture(model), plan=plan, precision="bf16")
    assert {row.format for row in explicit.report().bindings} == {"bf16"}


def test_a_plan_of_another_model_is_refused(plan) -> None:
    with pytest.raises(ConfigError, match="plan for this model"):
        dw.compile(zoo_models.tiny_model("llama", num_hidden_layers=3), plan=plan)
    with pytest.raises(ConfigError, match="plan is a dict"):
        dw.compile(zoo_models.tiny_model("llama"), plan={"tp": 1})


def test_the_plans_recomputation_is_done(plan) -> None:
    for kind, layers, expected in (("full", None, [True, True]), ("block", 1, [True, False])):
        model = zoo_models.tiny_model("llama").train()
        chosen = replace(plan.layout, recompute=Recompute(kind=kind, layers=layers))
        engine = dw.compile(model, plan=replace(plan, layout=chosen))
        assert [layer.gradient_checkpointing for layer in model.model.layers] == expected
        assert any(f"{sum(expected)} of 2 layers" in note for note in engine.report().notes)
    chosen = replace(plan.layout, recompute=Recompute(kind="selective", modules=("core_attn", "mlp")))
    report = dw.compile(zoo_models.tiny_model("llama"), plan=replace(plan, layout=chosen)).report()
    assert any("the plan recomputes mlp; the engine keeps them" in note for note in report.notes)


def test_cuda_graphs_need_a_gpu() -> None:
    with pytest.raises(UnsupportedError, match="cuda_graphs=True needs a CUDA GPU"):
        dw.compile(MLP(), precision="bf16", cuda_graphs=True)
    assert dw.compile(MLP(), precision="bf16", cuda_graphs=False).options.cuda_graphs is False
