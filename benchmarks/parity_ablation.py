"""Which GEMM of a policy costs accuracy? The first steps of a parity run, each arm with low precision in some GEMMs.

    PYTHONPATH=src python3 benchmarks/parity_ablation.py [--arms bf16,fp8,fp8:fwd] [--steps 200] [--json FILE]

An arm is a variant of `deepwell validate parity`, `:fwd+dgrad` behind it names the GEMMs that keep the variant's format
while the others run in bf16, `@1` the seed. A gap opens in the first hundred steps and stays, so these suffice. The gap
is that of the mean training loss over windows of steps against bf16 of the same seed. `bf16_nolce` is bf16 with other
roundings: what it differs from bf16 by is noise. Arms run side by side in processes; nothing here is timed.
"""

import argparse
import json
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

GEMMS = ("fwd", "dgrad", "wgrad")


def train(
    arm: str, steps: int, window: int, tokens: float, shape: dict[str, Any], corpus: Any, device: str
) -> dict[str, Any]:
    """Mean training loss of each window of the first steps of an arm."""
    import torch

    from deepwell.bench.parity_run import Run, Setup, _precise_products
    from deepwell.bench.variants import Variant
    from deepwell.precision.policy import PrecisionPolicy

    name, _, seed = arm.partition("@")
    name, _, gemms = name.partition(":")

    class Ablated(Variant):
        __slots__ = ()

        def policy(self) -> PrecisionPolicy:
            policy = super().policy()
            for gemm in set(GEMMS) - set(gemms.split("+")) if gemms else ():
                policy.set_default("bf16", gemms=gemm)
            return policy

    variant = Ablated(**{key: getattr(Variant.parse(name), key) for key in Variant.__slots__})
    started = time.perf_counter()
    run = Run(variant, int(seed or 0), Setup(tokens=int(tokens), **shape), corpus, device, cuda_graphs=device == "cuda")
    losses = []
    with _precise_products(variant):
        for step in range(steps):
            run._step(step)
            run.record.steps_done = step + 1
            if run.record.steps_done % window == 0:
                run._log()
                losses.append(run.record.losses[-1])
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = round(time.perf_counter() - started, 1)
    return {"arm": arm, "losses": losses, "runs_as": run.record.runs_as, "seconds": seconds}


def _child(arm: str, arguments: tuple[Any, ...], answers: Any) -> None:
    try:
        answers.put(train(arm, *arguments))
    except Exception as error:
        answers.put({"arm": arm, "losses": [], "error": f"{type(error).__name__}: {error}"[:400]})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", default="bf16,bf16_nolce,fp8,fp8:fwd,fp8:dgrad,fp8:wgrad")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--window", type=int, default=50)
    parser.add_argument("--tokens", type=float, default=5e7, help="of the run whose beginning this is")
    parser.add_argument("--at-once", type=int, default=4, help="arms trained side by side")
    parser.add_argument("--megabytes", type=float, default=190.0)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--text", type=Path, action="append", default=[])
    parser.add_argument("--model", default="768-12l", help="or tiny, to try this out")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    from deepwell.bench.corpus import make_corpus
    from deepwell.bench.environment import environment

    corpus = make_corpus(args.text, megabytes=args.megabytes, vocab=32768, tokenizer=args.tokenizer)
    print(corpus, flush=True)
    arms = list(dict.fromkeys(args.arms.split(",")))
    processes = multiprocessing.get_context("spawn")
    answers = processes.Queue()
    shape = {"model": args.model, **({"batch": 2, "seq_len": 64} if args.model == "tiny" else {})}
    arguments = (args.steps, args.window, args.tokens, shape, corpus, args.device)
    waiting, running, results = list(arms), {}, {}
    while waiting or running:
        while waiting and len(running) < args.at_once:
            arm = waiting.pop(0)
            running[arm] = processes.Process(target=_child, args=(arm, arguments, answers), daemon=True)
            running[arm].start()
        while answers.empty() and all(process.is_alive() for process in running.values()):
            time.sleep(0.1)
        for arm in [arm for arm, process in running.items() if not process.is_alive() and answers.empty()]:
            if answers.empty() and arm in running:
                results[arm] = {"arm": arm, "losses": [], "error": f"ended with status {running.pop(arm).exitcode}"}
        if not answers.empty():
            result = answers.get()
            results[result["arm"]] = result
            running.pop(result["arm"], None)
            print(f"{result['arm']}: {result.get('error') or str(result['seconds']) + ' s'}", flush=True)
            if args.json:
                args.json.write_text(
                    json.dumps({"machine": environment(), "results": list(results.values())}, indent=1)
                )
    for arm in arms:
        result = results[arm]
        seed = arm.partition("@")[2]
        base = dict(results.get("bf16" + (f"@{seed}" if seed else ""), {"losses": []})["losses"])
        cells = [
            f"{s}: {loss:.4f} ({loss / base[s] - 1 if s in base else float('nan'):+.2%})"
            for s, loss in result["losses"]
        ]
        print(f"{arm:24s}", "  ".join(cells) or result.get("error"))


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    main()
