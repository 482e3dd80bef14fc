"""What the tests of parallel runs compare: a few steps of a tiny model on a layout and in one process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

import deepwell as dw
from deepwell.engine.engine import Engine
from deepwell.planner.layout import Layout
from deepwell.train.adamw.optimizer import AdamWDW
from deepwell.train.feed import Feed, count_items
from deepwell.train.parallel import parallelize
from deepwell.train.parallel.runner import Runner

ROWS, SEQ, VOCAB, WIDTH = 8, 32, 128, 64
CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run. `layout` empty: one process, one graph."""

    name: str
    layout: Mapping[str, Any] = field(default_factory=dict)
    model: str = "llama"
    precision: str = "bf16"
    optimizer: str = "sgd"
    accumulation: int = 1
    steps: int = 3
    labels: str = "uneven"  # uneven (a rank's whole part may be -100), all
    recompute: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    clip: float | None = None
    first: int = 0  # number of the first step's batch: in low precision some batches have a code that rounding flips

    @property
    def alone(self) -> Case:
        """The same in one process."""
        return replace(self, name=f"{self.name} alone", layout={}, settings={}, recompute=False, accumulation=1)


@dataclass(kw_only=True)
class Outcome:
    """What a run left, whole on rank 0."""

    losses: list[float]
    grads: dict[str, Tensor]  # of the first step
    norms: list[float]
    evaluated: float
    passes: dict[str, int]
    unmet: list[str]
    notes: list[str]
    deferred: bool | None  # whether the logits of a call were never computed; None where the model returns none
    weights: dict[str, Tensor]
    buckets: int = 0  # of DDP


def make_model(name: str) -> nn.Module:
    """A tiny model; "llama:4" has 4 layers."""
    torch.manual_seed(0)
    name, _, layers = name.partition(":")
    if name == "plain":
        from deepwell.bench.llama import Llama, LlamaConfig

        sizes = {"width": WIDTH, "num_heads": 4, "num_kv_heads": 4, "hidden": 128, "num_layers": 2, "vocab": VOCAB}
        return Llama(LlamaConfig(**sizes, max_positions=64)).init_weights()
    if name == "deepwell":  # experts of our own, which a bias balances step by step, one of them for all tokens
        model: Any = make_model("plain")
        for layer in model.layers:
            layer.mlp = dw.DeepwellMoE(WIDTH, 64, 4, 2, shared_ffn=64, shared_gate=True, router={"bias_rate": 0.5})
        return model
    import transformers

    sizes = {
        "hidden_size": WIDTH, "intermediate_size": 128, "num_hidden_layers": int(layers or 2), "num_attention_heads": 4,
        "num_key_value_heads": 4, "vocab_size": VOCAB, "max_position_embeddings": 64,
    }  # fmt: skip
    if name == "odd":  # no number of ranks divides its MLP
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**sizes, "intermediate_size": 129}))
    if name == "gqa":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**sizes, "num_key_value_heads": 2}))
    if name in ("llama", "tied"):
        config = transformers.LlamaConfig(**sizes, tie_word_embeddings=name == "tied")
        return transformers.LlamaForCausalLM(config)
    if name == "qwen3":
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, head_dim=16))
    if name == "qwen2":  # biases
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes))
        for key, parameter in model.named_parameters():
            if key.endswith("bias"):
                nn.init.normal_(parameter, std=0.1)
        return model
    if name == "biased":  # biases at every linear, those split by rows included
        config = transformers.LlamaConfig(**sizes, attention_bias=True, mlp_bias=True)
        model = transformers.LlamaForCausalLM(config)
        for key, parameter in model.named_parameters():
            if key.endswith("bias"):
                nn.init.normal_(parameter, std=0.1)
        return model
    if name == "gemma2":  # norms behind the linears too
        config = transformers.Gemma2Config(**sizes, head_dim=16, query_pre_attn_scalar=16)
        return transformers.Gemma2ForCausalLM(config)
    if name == "phi3":
        return transformers.Phi3ForCausalLM(transformers.Phi3Config(**sizes, pad_token_id=0))
    if name == "gpt2":
        config = transformers.GPT2Config(n_embd=WIDTH, n_layer=2, n_head=4, vocab_size=VOCAB, n_positions=64)
        return transformers.GPT2LMHeadModel(config)
    if name == "shared":  # a gated expert for all tokens beside the others, which are given rows of tokens; biases
        config = transformers.Qwen2MoeConfig(
            **sizes, moe_intermediate_size=64, shared_expert_intermediate_size=128, num_experts=4, num_experts_per_tok=2
        )
        return transformers.Qwen2MoeForCausalLM(config)
    if name == "glm":  # a dense layer, then one with shared experts, which are given rows of sequences
        config = transformers.Glm4MoeConfig(
            **sizes, head_dim=16, moe_intermediate_size=64, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
            topk_group=1, first_k_dense_replace=1, n_shared_experts=2,
        )  # fmt: skip
        return transformers.Glm4MoeForCausalLM(config)
    if name in ("moe", "skewed"):
        top_k = 1 if name == "skewed" else 2
        config = transformers.Qwen3MoeConfig(
            **sizes, head_dim=16, moe_intermediate_size=64, num_experts=4, num_experts_per_tok=top_k
        )
        model = transformers.Qwen3MoeForCausalLM(config)
        for key, parameter in model.named_parameters():
            if name == "skewed" and key.endswith("mlp.gate.weight"):  # all tokens go to one expert
                nn.init.zeros_(parameter)
        return model
    raise ValueError(name)


def make_batch(step: int, labels: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, VOCAB, (ROWS, SEQ), generator=generator)
    wanted = ids.clone()
    if labels == "uneven":
        wanted[torch.rand(ids.shape, generator=generator) < 0.3] = -100
        wanted[ROWS // 2 + 2 :] = -100  # the last rank of four, or a micro-batch of the last of two, predicts nothing
        wanted[1, SEQ // 2 :] = -100  # nor does a row's second half
    return {"input_ids": ids, "labels": wanted}


def parts(batch: Mapping[str, Tensor], runner: Runner, accumulation: int) -> list[dict[str, Tensor]]:
    """A rank's micro-batches: number m of rank r is rows (m * dp + r) * b and on, as the trainer reads them.

    Tensors of their own, as a loader gives them: Dynamo guards what a view is one of.
    """
    pieces = {key: value.chunk(runner.dp * accumulation) for key, value in batch.items()}
    numbers = [m * runner.dp + runner.dp_rank for m in range(accumulation)]
    return [{key: value[n].clone() for key, value in pieces.items()} for n in numbers]


def make_optimizer(name: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if name == "adamw_dw":
        return AdamWDW(parameters, lr=1e-2, moments="fp32")
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=1e-2, foreach=False)
    return torch.optim.SGD(parameters, lr=0.5, foreach=False)


def whole(tensor: Tensor) -> Tensor:
    found = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found.detach().clone()


def make_runner(case: Case) -> tuple[Engine, Runner]:
    model = make_model(case.model)
    if torch.distributed.is_initialized() and torch.distributed.get_rank():
        with torch.no_grad():
            next(model.parameters()).add_(1.0)  # ranks begin with rank 0's weights
    engine = dw.compile(model, precision=case.precision, recompute=case.recompute)
    feed = Feed(engine.deepwell.model)
    if not case.layout:
        return engine, Runner(engine, feed, CPU)
    return engine, parallelize(engine, Layout(**case.layout), feed=feed, device=CPU, **case.settings)


def run(case: Case) -> Outcome:
    engine, runner = make_runner(case)
    optimizer = make_optimizer(case.optimizer, runner.parameters())
    losses, norms, grads = [], [], {}
    for step in range(case.steps):
        batch = make_batch(case.first + step, case.labels)
        mine = parts(batch, runner, case.accumulation)
        losses.append(float(runner.run(mine, num_items=count_items(batch))))
        if not step:
            grads = {name: whole(p.grad) for name, p in runner.named_parameters() if p.grad is not None}
        norms.append(float(runner.grad_norm(case.clip)))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    engine.eval()
    evaluated = evaluate(runner, case)
    engine.train()
    report = engine.report()
    return Outcome(
        losses=losses,
        grads=grads,
        norms=norms,
        evaluated=evaluated,
        passes=dict(report.passes),
        unmet=[note for note in report.notes if "not met" in note],
        notes=list(report.notes),
        deferred=_deferred(case, engine, runner),
        weights={name: whole(p) for name, p in runner.named_parameters()},
        buckets=_num_buckets(runner),
    )


def evaluate(runner: Runner, case: Case) -> float:
    """The mean loss of a batch, in the micro-batches of a step: in the sizes that are compiled already."""
    found = [runner.evaluate(part) for part in parts(make_batch(99, case.labels), runner, case.accumulation)]
    total, items = (float(sum(each)) for each in zip(*found, strict=True))
    return total / items


def _num_buckets(runner: Runner) -> int:
    called = getattr(runner, "called", None)
    is_ddp = isinstance(called, nn.parallel.DistributedDataParallel)
    return len(called.reducer._get_zeros_like_grad_buckets()) if is_ddp else 0


def _deferred(case: Case, engine: Engine, runner: Runner) -> bool | None:
    if case.model == "plain":
        return None
    batch = parts(make_batch(0, "all"), runner, case.accumulation)[0]
    out = engine(**runner.feed.keywords(runner.counted(batch)[0]))
    out.loss.backward()
    engine.deepwell.model.zero_grad()
    return out.logits._value is None  # FSDP2's hooks on outputs included
