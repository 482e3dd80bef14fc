"""A model with DeepwellMoE goes the whole way: captured, planned, compiled, trained."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import deepwell as dw
from deepwell import DeepwellMoE
from deepwell.engine.binding import Target
from deepwell.formats.metrics import sqnr_db
from deepwell.graph.ops import Combine, Dispatch, GroupedLinear, TopK
from deepwell.moe.block import DeepwellMoE as Block
from deepwell.report.run.data import read_run
from deepwell.report.run.experts import expert_panel

H, FFN, E, K, VOCAB = 64, 32, 8, 2, 128


class Layer(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(H)
        self.mix = nn.Linear(H, H, bias=False)
        self.mlp = DeepwellMoE(H, FFN, E, K, **options)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norm(x).cumsum(1) / 8)
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    """Two layers with experts, and a loss."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.embed = nn.Embedding(VOCAB, H)
        self.layers = nn.ModuleList([Layer(**options) for _ in range(2)])
        self.head = nn.Linear(H, VOCAB, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def test_capture_sees_the_routers_and_the_experts() -> None:
    ir = dw.capture(Model(shared_ffn=16), torch.zeros(2, 16, dtype=torch.long))
    work = ir.workload(2, 16)
    assert ir.num_layers == 2
    for block in ir.blocks:
        ops = {type(op): op for op in block.ops if isinstance(op, (TopK, Dispatch, Combine))}
        assert (ops[TopK].experts, ops[TopK].top_k) == (E, K)
        assert ops[Combine].top_k == K and Dispatch in ops
        grouped = [op for op in block.ops if isinstance(op, GroupedLinear)]
        assert [(op.experts, op.k, op.n) for op in grouped] == [(E, H, 2 * FFN), (E, FFN, H)]
        assert [op.name for op in grouped] == ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        # 32 tokens, each at two experts: what the block multiplies.
        assert sum(op.flops(work) for op in grouped) == 2 * 32 * K * (2 * FFN * H + FFN * H)
        assert any(op.role == "shared_experts" for op in block.ops)


@pytest.mark.parametrize("precision", ["bf16", "mxfp8"])
def test_the_engine_runs_the_block_as_one_node_in_the_policys_formats(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deepwell.engine.compile.device_of", lambda tensors: Target(kind="cuda", capability=(9, 0)))
    monkeypatch.setattr("deepwell.engine.compile.measured_fallback", lambda *args: None)
    tokens = torch.randint(VOCAB, (2, 16))
    plain, model = Model().bfloat16(), Model().bfloat16()
    engine = dw.compile(model, precision=precision, inductor=False)
    loss, wanted = engine(tokens, tokens), plain(tokens, tokens)
    loss.backward()
    wanted.backward()
    assert engine.options.graphs == 1
    passes = engine.report().passes
    assert (passes["experts"], passes["fused_experts"]) == ((4, 2) if precision == "mxfp8" else (0, 0))
    floor = 12 if precision == "mxfp8" else 35
    for name, parameter in plain.named_parameters():
        # A router's own gradient has less: 7 dB in mxfp8. Tokens that rounded inputs send elsewhere may be why.
        if precision == "bf16" or not name.endswith("gate.weight"):
            assert sqnr_db(parameter.grad, model.get_parameter(name).grad) > floor, name


def test_a_plans_capacity_reaches_the_blocks() -> None:
    model = Model()
    ir = dw.capture(model, torch.zeros(2, 16, dtype=torch.long))
    hw = dw.probe("1xH100")
    moe = {"experts": E, "capacity_factor": 1.25, "imbalance": 2.0}
    plan = dw.autoplan(ir, hw=hw, seq_len=16, global_batch=2, moe=moe)
    engine = dw.compile(ir, plan=plan, precision="bf16")
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    assert [block.config.capacity_factor for block in blocks] == [1.25, 1.25]
    assert any("capacity_factor 1.25" in note for note in engine.report().notes)


def test_the_trainer_balances_logs_and_shows_the_load(tmp_path: Any) -> None:
    router = {"scoring": "sigmoid", "bias_rate": 0.01, "balance_loss": {"batch": 0.01, "global": 0.01}, "z_loss": 1e-3}
    model = Model(router=router, capacity_factor=1.0)
    trainer = dw.Trainer.from_engine(
        dw.compile(model, precision="bf16"), dataloader=f"synthetic:{VOCAB}", seq_len=16, global_batch=4, micro_batch=2,
        steps=4, lr=1e-2, save_every=0, quiet=True, run_dir=tmp_path / "run", log_every=2,
    )  # fmt: skip
    trainer.fit()
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    loads = [event for event in events if event["kind"] == "experts"]
    counted = [event for event in loads if "entropy" in event]
    assert [event["step"] for event in counted] == [2, 4]
    for event in counted:
        assert set(event["layers"]) == {"layers.0.mlp.experts", "layers.1.mlp.experts"}
        # Both micro-batches, each once: what a sample or a recomputation saw is not in it.
        assert all(sum(tokens) == 4 * 16 * K for tokens in event["layers"].values())
        assert all(dropped > 0 for dropped in event["dropped"].values())
        assert all(0 < entropy < 1 for entropy in event["entropy"].values())
        assert all(loss > 0.9 for loss in event["balance_loss"].values())
    biases = [layer.mlp.gate.e_score_correction_bias for layer in model.layers]
    assert all(bias.abs().max() <= 0.0401 and bias.any() for bias in biases)
    panel = expert_panel(read_run(tmp_path / "run"), 10_000)
    assert panel["layers"] == ["layers.0.mlp.experts", "layers.1.mlp.experts"]
    assert panel["entropy"] and panel["dropped"]
