"""A training step in bf16 mode on this CPU: the engine against eager, round by round.

    python benchmarks/bench_cpu_step.py [--rounds 30] [--without PASS ...]

Rounds alternate, and what is compared is the CPU time of the process, which other processes on the machine move less
than the clock: the median and the least of all rounds. `--without` leaves passes out, to see what each of them costs.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import deepwell as dw
from deepwell.engine.passes import pipeline


def step_of(
    model: Callable[..., object], parameters: list[torch.nn.Parameter], ids: torch.Tensor
) -> Callable[[], None]:
    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        model(input_ids=ids, labels=ids).loss.backward()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--without", nargs="*", default=[], help="names of passes, as in engine/passes/pipeline.py")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    args = parser.parse_args()
    pipeline.PASSES = tuple(item for item in pipeline.PASSES if item.name not in args.without)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=8192, max_position_embeddings=512, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(getattr(torch, args.dtype))
    engine = dw.compile(model, precision="bf16")
    ids = torch.randint(0, config.vocab_size, (2, 128))
    parameters = list(model.parameters())
    steps = {"eager": step_of(model, parameters, ids), "engine": step_of(engine, parameters, ids)}
    for step in steps.values():
        step(), step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(args.rounds):
        for name, step in steps.items():
            start = time.process_time()
            step()
            times[name].append((time.process_time() - start) * 1e3)
    rows = {name: {"median_ms": statistics.median(t), "min_ms": min(t)} for name, t in times.items()}
    ratio = {key: rows["engine"][key] / rows["eager"][key] for key in ("median_ms", "min_ms")}
    passes = {name: count for name, count in engine.report().passes.items() if count}
    print(json.dumps({"dtype": args.dtype, **rows, "engine_over_eager": ratio, "passes": passes}, indent=1))


if __name__ == "__main__":
    main()
