"""Which GEMM of a policy costs accuracy? Short parity runs of a small model, each arm low in precision in some GEMMs.

    PYTHONPATH=src python3 benchmarks/parity_ablation.py [--arms bf16,fp8,fp8:fwd] [--seeds 0,1,2] [--json FILE]

An arm is a variant of `deepwell validate parity`, `:fwd+dgrad` behind it names the GEMMs that keep the variant's format
while the others run in bf16. The gap is that of the mean training loss of the last quarter of the steps over bf16's of
the same seed. `bf16_nolce` is bf16 with other roundings: what it differs from bf16 by is noise. Arms run side by side
in processes of their own; nothing here is timed.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

GEMMS = ("fwd", "dgrad", "wgrad")
BASE = "bf16"


def train(arm: str, seed: int, setup: Any, corpus: Any, device: str) -> dict[str, Any]:
    """The training loss of one run of an arm, in forty windows."""
    import torch

    from deepwell.bench.parity.run import ParityRun, _precise_products
    from deepwell.bench.variants import Variant
    from deepwell.precision.policy import PrecisionPolicy

    name, _, gemms = arm.partition(":")

    class Ablated(Variant):
        __slots__ = ()

        def policy(self) -> PrecisionPolicy:
            policy = super().policy()
            for gemm in set(GEMMS) - set(gemms.split("+")) if gemms else ():
                policy.set_default("bf16", gemms=gemm)
            return policy

    variant = Ablated(**{key: getattr(Variant.parse(name), key) for key in Variant.__slots__})
    torch._dynamo.reset()
    started = time.perf_counter()
    run = ParityRun(variant, seed, setup, corpus, device, cuda_graphs=device == "cuda")
    window = max(1, setup.steps // 40)
    with _precise_products(variant):
        for step in range(setup.steps):
            run._step(step)
            run.record.steps_done = step + 1
            if run.record.steps_done % window == 0:
                run._log()
    return {
        "arm": arm,
        "seed": seed,
        "loss": statistics.fmean(loss for _, loss in run.record.losses[-10:]),
        "losses": run.record.losses,
        "runs_as": run.record.runs_as,
        "seconds": round(time.perf_counter() - started, 1),
    }


def _work(arm: str, seeds: list[int], arguments: tuple[Any, ...], answers: Any) -> None:
    for seed in seeds:
        try:
            answers.put(train(arm, seed, *arguments))
        except Exception as error:
            answers.put({"arm": arm, "seed": seed, "error": f"{type(error).__name__}: {error}"[:400]})
            break
    answers.put({"arm": arm, "is_over": True})


def train_all(arms: list[str], seeds: list[int], at_once: int, arguments: tuple[Any, ...], save: Any) -> list[Any]:
    """Every arm in a process of its own, `at_once` of them side by side."""
    processes = multiprocessing.get_context("spawn")
    answers = processes.Queue()
    waiting, running, results = list(arms), {}, []
    while waiting or running:
        while waiting and len(running) < at_once:
            arm = waiting.pop(0)
            running[arm] = processes.Process(target=_work, args=(arm, seeds, arguments, answers), daemon=True)
            running[arm].start()
        if answers.empty():
            for arm in [arm for arm, process in running.items() if not process.is_alive()]:
                if answers.empty():
                    status = running.pop(arm).exitcode
                    results.append({"arm": arm, "seed": seeds[0], "error": f"ended with status {status}"})
            time.sleep(0.1)
            continue
        answer = answers.get()
        if "is_over" in answer:
            running.pop(answer["arm"]).join()
            continue
        results.append(answer)
        shown = answer.get("error") or f"{answer['loss']:.4f}, {answer['seconds']} s"
        print(f"{answer['arm']} seed {answer['seed']}: {shown}", flush=True)
        save(results)
    return results


def show(arms: list[str], results: list[dict[str, Any]]) -> None:
    """A line for each arm: the gap of every seed and their mean."""
    losses = {(r["arm"], r["seed"]): r["loss"] for r in results if "loss" in r}
    for arm in arms:
        seeds = [seed for name, seed in losses if name == arm and (BASE, seed) in losses]
        gaps = [losses[arm, seed] / losses[BASE, seed] - 1 for seed in seeds]
        mean = f"{statistics.fmean(gaps):+.3%}" if gaps else next(r["error"] for r in results if r["arm"] == arm)
        print(f"{arm:20s} mean gap {mean}   {'  '.join(f'{gap:+.3%}' for gap in gaps)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", default="bf16,bf16_nolce,fp8,fp8_exact,fp8:fwd,fp8:dgrad,fp8:wgrad")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--tokens", type=float, default=1.6e7)
    parser.add_argument("--model", default="384-6l", help="or 768-12l; tiny, to try this out")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--at-once", type=int, default=4, help="arms trained side by side")
    parser.add_argument("--megabytes", type=float, default=190.0)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--text", type=Path, action="append", default=[])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    from deepwell.bench.corpus import make_corpus
    from deepwell.bench.environment import environment
    from deepwell.bench.parity.run import PairSetup

    corpus = make_corpus(args.text, megabytes=args.megabytes, vocab=32768, tokenizer=args.tokenizer)
    print(corpus, flush=True)
    setup = PairSetup(model=args.model, tokens=int(args.tokens), batch=args.batch, seq_len=args.seq_len, lr=args.lr)

    def save(results: list[dict[str, Any]]) -> None:
        if args.json:
            facts = {"machine": environment(), "setup": asdict(setup), "corpus": corpus.to_dict(), "results": results}
            args.json.write_text(json.dumps(facts, indent=1), encoding="utf-8")

    arms = list(dict.fromkeys(args.arms.split(",")))
    seeds = [int(seed) for seed in args.seeds.split(",")]
    show(arms, train_all(arms, seeds, args.at_once, (setup, corpus, args.device), save))


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    main()
