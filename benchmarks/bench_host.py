"""What Deepwell's ops cost the host in one training step, without a GPU: wrappers run, launches do nothing.

    python benchmarks/bench_host.py                      a plain decoder and GPT-2 of width 768, two layers each
    python benchmarks/bench_host.py --profile            and where the time goes
    python benchmarks/bench_host.py --json host.json     the table as JSON too

The engine binds formats as on an H200; each op of Deepwell then allocates, chooses its configuration and calls Triton,
whose driver launches nothing (tests/kernels/launches.py). Kernels are compiled before the clock runs. GEMMs of cuBLASLt
and attention are left out: a CPU would compute them. Times are of this machine's CPU: compare two trees, not machines.
"""

# ruff: noqa: E402 (the tests' stand-in for a GPU lies beside them)

import argparse
import cProfile
import json
import os
import pstats
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "kernels")]

import torch
from torch import Tensor, nn
from triton.runtime import JITFunction

import deepwell as dw
import launches
from deepwell.kernels import torch_library

TOKENS, VOCAB = (2, 64), 512
# Computed by torch's own kernels, or launched by none of ours.
_LEFT_OUT = ("fp8_gemm", "attention", "flash", "emulated_mm")
_seen: list[tuple[str, Callable[..., Any], tuple[Any, ...]]] | None = None


def _record_ops() -> None:
    """Ops that are defined from here on note their calls while `_seen` is a list."""
    define = torch_library.register_op

    def register_op(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
        name = schema.split("(", maxsplit=1)[0]

        def noted(*args: Any) -> Any:
            if _seen is not None:
                _seen.append((name, run, args))
            return run(*args)

        define(schema, noted, fake)

    torch_library.register_op = register_op


def decoder() -> nn.Module:
    from deepwell.bench.llama import Llama, LlamaConfig

    sizes = LlamaConfig(width=768, num_heads=12, num_kv_heads=12, hidden=2048, num_layers=2, vocab=VOCAB)
    return Llama(sizes).bfloat16()


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": VOCAB, "n_embd": 768, "n_layer": 2, "n_head": 12, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)).bfloat16()


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Tensor], Tensor]]] = {
    "decoder": (decoder, lambda engine, tokens: engine(tokens, tokens)),
    "gpt2": (gpt2, lambda engine, tokens: engine(input_ids=tokens, labels=tokens).loss),
}


def calls_of(name: str) -> list[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """The calls of Deepwell's ops in the second step of an engine that is bound as on an H200."""
    global _seen  # noqa: PLW0603
    from deepwell.engine.binding import Target

    hopper = Target(kind="cuda", capability=(9, 0))
    make, loss = MODELS[name]
    tokens = torch.randint(VOCAB, TOKENS)
    with (
        mock.patch("deepwell.engine.compile.device_of", lambda tensors: hopper),
        mock.patch("deepwell.engine.compile.use_inductor", lambda asked, device: False),
        mock.patch("deepwell.engine.compile.measured_fallback", lambda *args: None),
    ):
        engine = dw.compile(make(), precision="fp8")
        loss(engine, tokens).backward()
        _seen = []
        loss(engine, tokens).backward()
    calls, _seen = _seen, None
    return [call for call in calls if not call[0].startswith(_LEFT_OUT)]


def time_calls(calls: list[Any], rounds: int) -> dict[str, tuple[int, float]]:
    """(calls, microseconds of one) by op: the least over rounds, since other work on the machine only adds."""
    found: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        spent: dict[str, list[float]] = defaultdict(list)
        for name, run, args in calls:
            start = time.perf_counter()
            run(*args)
            spent[name].append(time.perf_counter() - start)
        for name, times in spent.items():
            found[name].append(1e6 * sum(times) / len(times))
    counts = {name: sum(call[0] == name for call in calls) for name in found}
    return {name: (counts[name], min(times)) for name, times in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS), help=f"of {', '.join(MODELS)}")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    _record_ops()
    launch, made = JITFunction.run, {}
    for model in args.models.split(","):
        calls = calls_of(model)
        with launches.on_absent_gpu(), torch.no_grad():
            for _, run, operands in calls:
                run(*operands)
            JITFunction.run = launch  # without the list of launches
            rows = time_calls(calls, args.rounds)
            if args.profile:
                with cProfile.Profile() as profile:
                    time_calls(calls, 50)
                pstats.Stats(profile).sort_stats("tottime").print_stats(25)
        total = sum(count * us for count, us in rows.values())
        made[model] = {"total_us": total, "ops": {name: {"calls": n, "us": us} for name, (n, us) in rows.items()}}
        print(f"\n{model}: {len(calls)} ops, {total / 1000:.2f} ms of the host a step")
        for name, (count, us) in sorted(rows.items(), key=lambda row: -row[1][0] * row[1][1]):
            print(f"  {name:40} {count:4} x {us:7.1f} us")
    if args.json:
        args.json.write_text(json.dumps({"torch": torch.__version__, "models": made}, indent=1) + "\n")


if __name__ == "__main__":
    main()
