"""GEMMs that a format would spoil on a batch stay in bf16, measured and with the figures in the report."""

import math

import pytest
import torch
import zoo_models
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import deepwell as dw
from deepwell.engine.binding import Fragile, Target
from deepwell.engine.fragile import FragileReport, _together, check_fragile
from deepwell.errors import ConfigError, UnsupportedError

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
Q_PROJ = "model.layers.0.self_attn.q_proj"


def _llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2, vocab_size=64))


def _with_an_outlier(model):
    """One channel of every token is 2^30 times the others, and layer 0's q_proj does not read it."""
    with torch.no_grad():
        model.model.embed_tokens.weight *= 2.0**-30
        model.model.embed_tokens.weight[:, 5] = 1.0
        model.get_submodule(Q_PROJ).weight[:, 5] = 0
        model.model.norm.eps = model.model.layers[0].input_layernorm.eps = 0.0
    return model


def _batch():
    tokens = torch.randint(0, 64, (2, 32), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens}


def _policy(kept=None):
    # One scale per tensor: nothing but the outlier is left of x.
    policy = dw.PrecisionPolicy("fp8")
    if kept is not None:
        policy.set_layer_precision(kept[0], "bf16", gemms=kept[1])
    return policy


def _bindings(engine, path):
    return {row.gemm: row for row in engine.report().bindings if row.path == path}


def test_a_gemm_that_its_format_spoils_stays_in_bf16_with_the_figures():
    engine = dw.compile(dw.capture(_with_an_outlier(_llama())), precision_policy=_policy())
    assert _bindings(engine, Q_PROJ)["fwd"].scheme != "bf16"
    found = engine.check_fragile(_batch())
    row = next(row for row in found.fragile if (row.path, row.gemm) == (Q_PROJ, "fwd"))
    assert row.sqnr_db < 1 and row.floor_db == 27
    bound = _bindings(engine, Q_PROJ)["fwd"]
    assert (bound.scheme, bound.binding) == ("bf16", "substitute")
    assert bound.reason == f"fragile: fwd {row.sqnr_db:.1f} dB below floor 27 dB"
    assert bound.reason.split(" dB below")[0] in " ".join(str(engine.report()).split())
    # Its neighbours read the outlier too: the others' loss does not show in their products.
    assert _bindings(engine, Q_PROJ.replace("q_proj", "v_proj"))["fwd"].scheme != "bf16"


def test_the_engine_then_computes_as_if_the_policy_had_said_so():
    # The same model, once found fragile and once told.
    batch = _batch()
    told_rows = []
    engine = dw.compile(dw.capture(_with_an_outlier(_llama())), precision_policy=_policy())
    found = engine.check_fragile(batch)
    policy = _policy()
    for row in found.fragile:
        policy.set_layer_precision(row.path, "bf16", gemms=row.gemm)
        told_rows.append((row.path, row.gemm))
    told = dw.compile(dw.capture(_with_an_outlier(_llama())), precision_policy=policy)
    assert engine.bound.schemes == told.bound.schemes
    losses = []
    for each in (engine, told):
        loss = each(**batch).loss
        loss.backward()
        losses.append((float(loss.detach()), each.get_submodule(Q_PROJ).weight.grad.clone()))
    assert losses[0][0] == losses[1][0]
    assert torch.equal(losses[0][1], losses[1][1])
    assert (Q_PROJ, "fwd") in told_rows


def test_example_inputs_check_when_the_engine_is_made_and_nothing_runs_without_them():
    model = _with_an_outlier(_llama())
    calls = []
    handle = model.register_forward_hook(lambda *_: calls.append(1))
    ir = dw.capture(model)
    calls.clear()
    plain = dw.compile(ir, precision_policy=_policy())
    assert not calls and _bindings(plain, Q_PROJ)["fwd"].scheme != "bf16"
    checked = dw.compile(ir, precision_policy=_policy(), example_inputs=_batch())
    assert len(calls) == 1 and _bindings(checked, Q_PROJ)["fwd"].scheme == "bf16"
    handle.remove()


def test_strict_raises_instead():
    engine = dw.compile(dw.capture(_with_an_outlier(_llama())), precision_policy=_policy())
    with pytest.raises(UnsupportedError, match=r"fragile: .* dB below floor .*fallback='safe' keeps bf16"):
        engine.check_fragile(_batch(), strict=True)
    # What was asked for stays bound.
    assert _bindings(engine, Q_PROJ)["fwd"].scheme != "bf16"


# Conv1D keeps its weights transposed: taken the wrong way round no product would come near a floor.
@pytest.mark.parametrize(
    "make", [_llama, lambda: GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=64, n_positions=32))]
)
def test_ordinary_numbers_are_not_fragile(make):
    torch.manual_seed(0)
    engine = dw.compile(dw.capture(make()), precision="mxfp8")
    found = engine.check_fragile(_batch())
    assert found.fragile == () and found.skipped == ()
    assert {row.gemm for row in found.rows} == {"fwd", "dgrad", "wgrad"}
    assert {row.path for row in found.rows} == set(engine.bound.schemes)


def test_floors_are_those_of_the_formats():
    engine = dw.compile(dw.capture(_llama()), precision_policy=_policy())
    floors = {(row.gemm, row.floor_db) for row in engine.check_fragile(_batch()).rows}
    # Gradients of FP8 by tensors are E5M2.
    assert floors == {("fwd", 27.0), ("dgrad", 24.0), ("wgrad", 24.0)}
    fp4 = dw.compile(dw.capture(_llama()), precision_policy=dw.PrecisionPolicy("nvfp4"))
    assert {row.floor_db for row in fp4.check_fragile(_batch()).rows} == {14.0}


def test_leaves_gradients_and_random_numbers_alone():
    model = _llama()
    engine = dw.compile(dw.capture(model), precision="mxfp8")
    weight = model.get_submodule(Q_PROJ).weight
    weight.grad = torch.ones_like(weight)
    state = torch.get_rng_state()
    engine.check_fragile(_batch())
    assert torch.equal(weight.grad, torch.ones_like(weight))
    assert model.lm_head.weight.grad is None
    assert torch.equal(torch.get_rng_state(), state)


class _Counting(nn.Module):
    """BatchNorm writes into its buffers; `seen` is replaced, and `last` has no tensor before the first call."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Linear(32, 32)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("last", None)

    def forward(self, x):
        self.seen = self.seen + 1
        self.last = x.detach().mean()
        return self.second(self.norm(self.first(x))).square().mean()


def test_leaves_buffers_as_they_were():
    model = _Counting()
    before, seen = {name: value.clone() for name, value in model.state_dict().items()}, model.seen
    x = torch.randn(4, 32)
    engine = dw.compile(dw.capture(model, x), precision_policy=_policy(), example_inputs=(x,))
    engine.check_fragile((x,))
    assert model.seen is seen and model.last is None
    assert model.state_dict().keys() == before.keys()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_without_a_loss_only_the_forward_is_checked():
    engine = dw.compile(dw.capture(_llama()), precision="mxfp8")
    found = engine.check_fragile({"input_ids": _batch()["input_ids"]})
    assert {row.gemm for row in found.rows} == {"fwd"}


def test_a_floor_of_ones_own_replaces_the_formats():
    engine = dw.compile(dw.capture(_llama()), precision="mxfp8")
    assert len(engine.check_fragile(_batch(), floor_db=60.0).fragile) == len(engine.bound.bindings) - 3  # but the head
    assert engine.bound.schemes == {}
    # A second look with the formats' floors takes it back.
    assert engine.check_fragile(_batch()).fragile == ()
    assert len(engine.bound.schemes) == 14


def test_says_when_the_model_itself_is_not_finite():
    model = _llama()
    with torch.no_grad():
        model.get_submodule(Q_PROJ).weight[0, 0] = math.inf
    engine = dw.compile(dw.capture(model), precision="mxfp8")
    with pytest.raises(ConfigError, match=r"q_proj fwd is not finite in the model's own dtype"):
        engine.check_fragile(_batch())


class Twice(nn.Module):
    """One linear that runs twice, the second time on numbers that one scale cannot hold."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(32, 32, bias=False)

    def forward(self, x):
        y = self.proj(x)
        spoilt = torch.cat([x[:, :1] * 2.0**40, x[:, 1:]], dim=1)
        return (y.square() + self.proj(spoilt).square()).sum()


def test_a_linear_that_runs_twice_is_judged_by_its_worst_run():
    torch.manual_seed(0)
    model = Twice()
    with torch.no_grad():
        model.proj.weight[:, 0] = 0
    x = torch.randn(16, 32)
    engine = dw.compile(dw.capture(model, x), precision_policy=_policy(), example_inputs=x)
    assert "fragile: fwd" in _bindings(engine, "proj")["fwd"].reason


def test_prints_and_survives_json():
    rows = (
        Fragile(path="a", gemm="fwd", scheme="fp8_row", sqnr_db=14.04, floor_db=18.0),
        Fragile(path="b", gemm="dgrad", scheme="fp8_row", sqnr_db=math.nan, floor_db=18.0),
        Fragile(path="c", gemm="fwd", scheme="fp8_row", sqnr_db=18.0, floor_db=18.0),
        Fragile(path="e", gemm="fwd", scheme="grouped_fp8", sqnr_db=3.0, floor_db=27.0, of="expert 7"),
    )
    report = FragileReport(rows=rows, skipped=("d (did not run)",))
    assert [row.is_fragile for row in rows] == [True, True, False, True]
    assert str(report).splitlines() == [
        "3 of 4 GEMMs are fragile on this batch",
        "  a fragile: fwd 14.0 dB below floor 18 dB",
        "  b fragile: dgrad gives NaN or infinity",
        "  e fragile: fwd of expert 7 3.0 dB below floor 27 dB",
        "  not checked: d (did not run)",
    ]
    assert str(FragileReport.from_json(report.to_json())) == str(report)
    with pytest.raises(ConfigError, match="not a report of fragile GEMMs"):
        FragileReport.from_json("{}")


# ---- experts ----

EXPERTS = "model.layers.1.mlp.experts"


def _moe(model_type, dtype=torch.float32):
    torch.manual_seed(0)
    return zoo_models.tiny_model(model_type).to(dtype)


def _tokens(length=64):
    tokens = torch.randint(3, zoo_models.VOCAB, (2, length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens}


def _with_a_fragile_expert(model, expert=2):
    """One number of one expert of layer 1 is 2^30 and meets only zeros: beside it the codes of the others are zeros."""
    with torch.no_grad():
        model.model.layers[1].post_attention_layernorm.weight[3] = 0.0
        model.get_parameter(f"{EXPERTS}.gate_up_proj")[expert, 0, 3] = 2.0**30
    return model


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_one_expert_that_its_format_spoils_keeps_its_gemm_in_bf16(model_type):
    model = _with_a_fragile_expert(_moe(model_type))
    engine = dw.compile(dw.capture(model), precision_policy=_policy())
    found = engine.check_fragile(_tokens())
    spoilt = {row.gemm: row for row in found.fragile if ".experts." in row.path}
    row = spoilt.pop("fwd")
    assert (row.path, row.of) == (f"{EXPERTS}.gate_up_proj", "expert 2")
    # The outlier times one column of dy is all of dx: too few numbers for a mean, so dgrad may be below its floor too.
    assert {(other.path, other.gemm, other.of) for other in spoilt.values()} <= {(row.path, "dgrad", "expert 2")}
    assert row.sqnr_db < 1 and row.floor_db == 27
    # Every other GEMM of experts was judged and is well: all three, in both layers, and the other projection.
    judged = {(row.path, row.gemm) for row in found.rows if ".experts." in row.path}
    assert len(judged) == 12 and found.skipped == ()
    bound = _bindings(engine, row.path)
    assert (bound["fwd"].scheme, bound["fwd"].binding) == ("bf16", "substitute")
    assert bound["fwd"].reason == f"fragile: fwd of expert 2 {row.sqnr_db:.1f} dB below floor 27 dB"
    assert "fragile: fwd of expert 2" in " ".join(str(engine.report()).split())
    assert bound["wgrad"].scheme != "bf16"
    # The engine then runs as if the policy had said so.
    told = _policy()
    for each in found.fragile:
        told.set_layer_precision(f"path:{each.path}", "bf16", gemms=each.gemm)
    assert engine.bound.schemes == dw.compile(dw.capture(model), precision_policy=told).bound.schemes
    loss = engine(**_tokens()).loss
    assert loss.isfinite() and engine.options.counts["experts"] == 4


@pytest.mark.parametrize("precision", ["fp8", "mxfp8"])
# GPT-OSS stores [E, K, N] and adds biases; taken the wrong way round no product would come near a floor. Llama 4 gives
# each expert all tokens, times zero but for those that chose it.
@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss", "llama4_text"])
def test_ordinary_experts_are_not_fragile(model_type, precision):
    model = _moe(model_type, torch.bfloat16)
    engine = dw.compile(dw.capture(model), precision=precision)
    # Many rows: E5M2 keeps 24.5 dB, half a decibel above its floor, and over 20 short rows that strays by as much.
    found = engine.check_fragile(_tokens(128))
    assert [row for row in found.fragile if row.of] == [] and found.skipped == ()
    assert {row.path for row in found.rows} == set(engine.bound.schemes)
    assert {row.gemm for row in found.rows if row.of} == {"fwd", "dgrad", "wgrad"}


def test_an_expert_in_fp8_is_judged_as_the_gpu_multiplies_it(monkeypatch):
    # A scale per row of the weight: the outlier spoils its own row alone, of 2^-30 of the others.
    monkeypatch.setattr("deepwell.engine.compile.device_of", lambda tensors: Target(kind="cuda", capability=(9, 0)))
    monkeypatch.setattr("deepwell.engine.compile.use_inductor", lambda asked, device: False)
    model = _with_a_fragile_expert(_moe("mixtral"))
    engine = dw.compile(dw.capture(model), precision_policy=_policy(), measure=False)
    found = engine.check_fragile(_tokens())
    rows = {(row.path, row.gemm): row for row in found.rows if row.path.startswith(EXPERTS)}
    assert {row.scheme for row in rows.values()} == {"grouped_fp8"}
    spoilt = rows[f"{EXPERTS}.gate_up_proj", "fwd"]
    assert spoilt.is_fragile and spoilt.of == "expert 2" and 5 < spoilt.sqnr_db < 27


def test_experts_with_few_rows_are_judged_together_or_named(monkeypatch):
    engine = dw.compile(dw.capture(_moe("mixtral")), precision="mxfp8")
    # Nobody has so many rows: together they do.
    monkeypatch.setattr("deepwell.engine.fragile._MIN_ROWS", 100)
    together = engine.check_fragile(_tokens())
    assert {row.of for row in together.rows if ".experts." in row.path} == {"experts with fewer than 100 rows"}
    assert together.fragile == () and together.skipped == ()
    monkeypatch.setattr("deepwell.engine.fragile._MIN_ROWS", 1000)
    named = engine.check_fragile(_tokens())
    assert not [row for row in named.rows if ".experts." in row.path]
    reasons = {f"model.layers.{i}.mlp.experts.{name}_proj" for i in (0, 1) for name in ("gate_up", "down")}
    assert {path.partition(" ")[0] for path in named.skipped} == reasons
    assert all("(experts 0, 1, 2, 3: fewer than 1000 rows in all)" in path for path in named.skipped)


def test_a_lost_expert_shows_among_many_that_have_few_rows():
    well = [(e, 2, 28.5) for e in range(60)]
    assert abs(_together(well) - 28.5) < 1e-9
    assert _together([*well, (60, 2, 0.0)]) < 18
    assert math.isnan(_together([*well, (60, 2, math.nan)])) and _together([(0, 3, math.inf)]) == math.inf


def test_experts_that_run_otherwise_are_named():
    # One by one in a loop, as the model's own setting may say: no product of all of them is seen.
    model = _moe("mixtral")
    engine = dw.compile(dw.capture(model), precision="mxfp8")
    model.set_experts_implementation("eager")
    found = check_fragile(model, engine.bound, _tokens())
    assert len(found.skipped) == 4 and all(path.endswith("_proj (no grouped product ran)") for path in found.skipped)
    assert engine.check_fragile(_tokens()).skipped == ()  # the engine groups them
