"""GEMMs, a transformer layer and an MoE layer: Deepwell beside torch.compile(max-autotune), each checked first.

On a GPU the sizes are those of large models. On a CPU they are small, the peer is PyTorch as it runs, and Deepwell's
formats are emulated: the times there say nothing of a GPU, the checks do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import deepwell as dw
from deepwell.bench.environment import environment, one_line
from deepwell.bench.llama import Llama, LlamaConfig
from deepwell.errors import ConfigError
from deepwell.formats.metrics import sqnr_db
from deepwell.hardware.progress import bar
from deepwell.kernels.production_kernels import ProductionKernelManager
from deepwell.kernels.tune.timing import median_us

PARTS = ("gemm", "transformer", "moe")
PRECISIONS = ("bf16", "mxfp8", "nvfp4")
_SIZES = {"cuda": (1024, 4096, 8192), "cpu": (128,)}
# Of the result against fp64 on the same operands: what a format's own rounding allows.
_FLOORS_DB = {"bf16": 45.0, "mxfp8": 24.0, "nvfp4": 15.0}
_LOSS_GAP = 0.05


def run_speedup(
    device: str = "cuda", parts: Sequence[str] = PARTS, precisions: Sequence[str] = PRECISIONS
) -> dict[str, Any]:
    """Rows of every part. A result that is wrong has `right` False and no speedup."""
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        raise ConfigError(f"{unknown[0]!r} is no part; choose of {', '.join(PARTS)}")
    work: list[Callable[[], list[dict[str, Any]]]] = []
    if "gemm" in parts:
        work += [lambda size=size: _gemm(size, device, precisions) for size in _SIZES[device]]  # type: ignore[misc]
    if "transformer" in parts:
        work.append(lambda: _model("transformer layer", _decoder(device), device, precisions))
    if "moe" in parts:
        work.append(lambda: _model("MoE layer", _experts(device), device, precisions))
    rows: list[dict[str, Any]] = []
    with bar("speedup", len(work)) as advance:
        for each in work:
            rows += each()
            advance(1)
    return {"environment": environment(), "rows": rows}


def _peer(function: Callable[..., Any], device: str) -> Callable[..., Any]:
    return torch.compile(function, mode="max-autotune-no-cudagraphs") if device == "cuda" else function


def _row(what: str, name: str, us: float, peer_us: float, *, right: bool, error: str) -> dict[str, Any]:
    speed = peer_us / us if right else None
    return {"what": what, "name": name, "ms": us / 1e3, "right": right, "error": error, "speedup": speed}


def _gemm(size: int, device: str, precisions: Sequence[str]) -> list[dict[str, Any]]:
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(size, size, generator=generator, device=device).bfloat16() for _ in range(2))
    exact = a.double() @ b.double()
    what = f"GEMM {size}^3"
    peer = _peer(torch.mm, device)
    peer_us = median_us(lambda: peer(a, b), device)
    rows = [_row(what, "torch.compile" if device == "cuda" else "torch", peer_us, peer_us, right=True, error="")]
    manager = ProductionKernelManager()
    for precision in precisions:
        got = manager.gemm(a, b, precision=precision)
        decibels = sqnr_db(exact, got.double())
        us = median_us(lambda precision=precision: manager.gemm(a, b, precision=precision), device)  # type: ignore[misc]
        right = decibels >= _FLOORS_DB[precision]
        rows.append(_row(what, f"Deepwell {precision}", us, peer_us, right=right, error=f"{decibels:.1f} dB"))
    return rows


def _decoder(device: str) -> tuple[nn.Module, Tensor]:
    is_large = device == "cuda"
    config = LlamaConfig(
        width=4096 if is_large else 64, num_heads=32 if is_large else 4, num_kv_heads=8 if is_large else 2,
        hidden=14336 if is_large else 96, num_layers=1, vocab=4096 if is_large else 128,
        max_positions=4096 if is_large else 64,
    )  # fmt: skip
    model = Llama(config).to(device, torch.bfloat16)
    model.init_weights()
    return model, torch.randint(0, config.vocab, (4, 4096) if is_large else (2, 32), device=device)


def _experts(device: str) -> tuple[nn.Module, Tensor]:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    is_large = device == "cuda"
    sizes: dict[str, Any] = {
        "hidden_size": 2048 if is_large else 64, "intermediate_size": 6144 if is_large else 96, "num_hidden_layers": 1,
        "moe_intermediate_size": 768 if is_large else 32, "num_attention_heads": 32 if is_large else 4,
        "num_key_value_heads": 4 if is_large else 2, "head_dim": 128 if is_large else 16,
        "vocab_size": 4096 if is_large else 128,
        "num_experts": 128 if is_large else 4, "num_experts_per_tok": 8 if is_large else 2, "use_cache": False,
    }  # fmt: skip
    config = Qwen3MoeConfig(**sizes)
    with torch.device(device):
        model: Any = Qwen3MoeForCausalLM(config)
    model = model.to(torch.bfloat16)
    if is_large:
        model.set_experts_implementation("grouped_mm")
    return model, torch.randint(0, config.vocab_size, (4, 4096) if is_large else (2, 32), device=device)


def _step(model: nn.Module, tokens: Tensor, called: Callable[..., Any]) -> Tensor:
    out = called(tokens, tokens) if isinstance(model, Llama) else called(input_ids=tokens, labels=tokens).loss
    loss: Tensor = out
    loss.backward()
    for parameter in model.parameters():
        parameter.grad = None
    return loss.detach()


def _model(what: str, made: tuple[nn.Module, Tensor], device: str, precisions: Sequence[str]) -> list[dict[str, Any]]:
    model, tokens = made
    what = f"{what}, forward and backward"
    wanted = float(_step(model, tokens, model))
    peer = _peer(model, device)
    budget = 1.0 if device == "cuda" else 0.2
    peer_us = _timed(lambda: _step(model, tokens, peer), device, budget)
    rows = [_row(what, "torch.compile" if device == "cuda" else "torch", peer_us, peer_us, right=True, error="")]
    for precision in precisions:
        torch._dynamo.reset()
        engine = dw.compile(model, precision=precision)
        gap = abs(float(_step(model, tokens, engine)) / wanted - 1)
        us = _timed(lambda engine=engine: _step(model, tokens, engine), device, budget)  # type: ignore[misc]
        error = f"loss {gap:.2%}"
        rows.append(_row(what, f"Deepwell {precision}", us, peer_us, right=gap < _LOSS_GAP, error=error))
    return rows


def _timed(run: Callable[[], object], device: str, budget_s: float) -> float:
    """Launched as a training loop launches it: host time counts."""
    from deepwell.kernels.tune.timing import times_us

    for _ in range(3 if device == "cuda" else 1):
        run()
    found = sorted(times_us(run, torch.device(device), budget_s))
    return found[len(found) // 2]


def table(result: dict[str, Any]) -> str:
    lines = [one_line(result["environment"]), ""]
    last = ""
    for row in result["rows"]:
        if row["what"] != last:
            last = row["what"]
            lines.append(last)
        speed = f"{row['speedup']:.2f}x" if row["right"] else "WRONG"
        lines.append(f"  {row['name']:<18} {row['ms']:>10.3f} ms  {speed:>6}  {row['error']}")
    return "\n".join(lines)


def main(parts: Sequence[str] = PARTS, precisions: Sequence[str] = PRECISIONS) -> None:
    """The command line of the scripts under benchmarks/: `[--json FILE] [--device cpu]`."""
    import argparse
    import json
    import sys
    from pathlib import Path

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--parts", default=",".join(parts), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--json", type=Path, help="write the rows there too")
    given = parser.parse_args()
    result = run_speedup(given.device, given.parts.split(","), precisions)
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table(result))
    sys.exit(not all(row["right"] for row in result["rows"]))
