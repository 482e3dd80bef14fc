"""Layers compiled by themselves: the same numbers and passes as one graph, and what does not go with it is said."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import deepwell as dw
from deepwell.bench import llama
from deepwell.engine.engine import Engine
from deepwell.engine.regions import find_glue
from deepwell.errors import ConfigError, UnsupportedError

IDS = torch.randint(0, 128, (2, 32), generator=torch.Generator().manual_seed(0))


def _hf(**changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, "num_hidden_layers": 2, "vocab_size": 128, **changes}))


def _plain() -> llama.Llama:
    sizes = {"width": 64, "num_heads": 4, "num_kv_heads": 2, "hidden": 96, "num_layers": 2, "vocab": 128}
    return llama.Llama(llama.LlamaConfig(**sizes, max_positions=64)).init_weights()


def _step(engine: Engine) -> tuple[float, dict[str, Tensor], Any]:
    engine.zero_grad()
    out = engine(input_ids=IDS, labels=IDS) if hasattr(engine, "config") and "lm_head" in engine._modules else None
    loss = engine(IDS, IDS.roll(-1, 1)) if out is None else out.loss
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in engine.named_parameters()}, out


@pytest.mark.parametrize(("make", "recompute"), [(_hf, False), (_plain, True)], ids=["hf", "plain recomputed"])
def test_regions_compute_what_one_graph_does(make: Any, recompute: bool) -> None:
    whole = dw.compile(make(), precision="mxfp8")
    loss, grads, _ = _step(whole)
    torch._dynamo.reset()
    engine = dw.compile(make(), precision="mxfp8", recompute=recompute)
    regions = engine.use_regions()
    found, others, out = _step(engine)
    assert (found, others.keys()) == (loss, grads.keys())
    assert all(torch.equal(others[name], grad) for name, grad in grads.items())
    assert out is None or out.logits._value is None
    report, before = engine.report(), whole.report()
    assert report.graphs == 3  # the layers', the norm's, head's and loss's
    assert not [note for note in report.notes if "broke" in note or "not met" in note]
    halves = ("linear", "rope", "swiglu")
    assert [report.passes[name] for name in halves] == [before.passes[name] / 2 for name in halves]
    assert (report.passes["cross_entropy"], report.passes["residual_norm"], report.passes["rms_norm"]) == (1, 1, 3)
    assert {b.binding for b in report.bindings} == {b.binding for b in before.bindings}
    # A capture of the model sees the model, not its regions.
    assert dw.capture(engine.deepwell.model) == engine.ir
    assert _step(engine)[0] == loss
    assert regions.glue == ("model" if make is _hf else "")


def test_formats_change_between_steps_in_regions() -> None:
    """Each phase has its graphs, and a phase that was there before is not compiled again."""
    policy = dw.PrecisionPolicy("mxfp8")
    for kind in ("attention", "mlp"):
        policy.set_layer_precision(kind, "bf16", steps=":1")
    engine = dw.compile(_hf(), precision_policy=policy)
    high = _step(dw.compile(_hf(), precision="bf16"))[0]
    low = _step(dw.compile(_hf(), precision="mxfp8"))[0]
    assert high != low
    engine.use_regions()
    assert _step(engine.at_step(0))[0] == high
    assert _step(engine.at_step(1))[0] == low
    graphs = engine.report().graphs
    assert _step(engine.at_step(0))[0] == high
    assert _step(engine.at_step(1))[0] == low
    assert engine.report().graphs == graphs


def test_training_fills_no_cache_and_evaluation_may() -> None:
    model = _hf(use_cache=True)
    engine = dw.compile(model, precision="bf16")
    engine.use_regions()
    _step(engine)
    assert engine.report().graphs == 3  # a cache would give each layer its own
    assert model.config.use_cache is True
    model.eval()
    with torch.no_grad():
        assert engine(input_ids=IDS).past_key_values is not None


def test_what_regions_do_not_go_with() -> None:
    engine = dw.compile(_plain(), precision="bf16")
    engine.use_regions()
    with pytest.raises(ConfigError, match="has its regions already"):
        engine.use_regions()
    with pytest.raises(UnsupportedError, match="cannot be copied"):
        copy.deepcopy(engine)
    with pytest.raises(ConfigError, match="no repeated layers"):
        dw.compile(nn.Sequential(nn.Linear(32, 32)), precision="bf16", example_inputs=torch.randn(4, 32)).use_regions()
    called = dw.compile(_plain(), precision="bf16")
    with torch.no_grad():
        called(IDS)
    with pytest.raises(ConfigError, match="was called already"):
        called.use_regions()
    recorded = dw.compile(_plain(), precision="bf16")
    recorded.options.cuda_graphs = True
    with pytest.raises(UnsupportedError, match="cuda_graphs=True records the whole model"):
        recorded.use_regions()
    with pytest.raises(ConfigError, match="inner has 'norm', which is in none of the model's layers"):
        dw.compile(_plain(), precision="bf16").use_regions(inner=["norm"])


def test_the_glue_is_the_innermost_module_around_all_layers() -> None:
    model = nn.Module()
    model.body = nn.Module()
    model.body.towers = nn.ModuleList(nn.ModuleList(nn.Linear(1, 1) for _ in range(2)) for _ in range(2))
    assert find_glue(model, ["body.towers.0.0", "body.towers.0.1"]) == "body"
    assert find_glue(model, ["body.towers.0.0", "body.towers.1.1"]) == "body"
    assert find_glue(model, ["body.towers", "other"]) == ""


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_ddp_of_several_buckets(group: Any) -> None:
    model = _hf()
    loss, grads, _ = _step(dw.compile(copy.deepcopy(model), precision="mxfp8"))
    engine = dw.compile(model, precision="mxfp8")
    wrapped = DistributedDataParallel(engine, bucket_cap_mb=0.02)
    for _ in range(2):  # torch makes the buckets after the first step, in the order of its gradients
        model.zero_grad()
        out = wrapped(input_ids=IDS, labels=IDS)
        out.loss.backward()
        assert out.loss.item() == loss
        assert all(torch.equal(p.grad, grads[name]) for name, p in model.named_parameters())
    assert len(wrapped.reducer._get_zeros_like_grad_buckets()) > 2
    assert (engine.report().graphs, out.logits._value) == (1, None)


def test_a_sharded_model_can_be_captured_and_recomputes_in_regions(group: Any) -> None:
    """Capture leaves FSDP2's state alone; recomputation under it is compiled, not run as it was written."""
    from torch.distributed.fsdp import fully_shard

    model = _hf()
    loss, _, _ = _step(dw.compile(copy.deepcopy(model), precision="mxfp8"))
    whole = dw.capture(model)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    ir = dw.capture(model)
    assert (ir, ir.name) == (whole, whole.name)
    engine = dw.compile(ir, precision="mxfp8", recompute=True)
    out = engine(input_ids=IDS, labels=IDS)
    out.loss.backward()
    assert out.loss.item() == loss
    assert engine.regions is not None
    assert out.logits._value is None
    report = engine.report()
    assert report.passes["linear"] == 7
    assert not [note for note in report.notes if "not met" in note]
