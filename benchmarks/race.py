"""Every table of the README's race, each command by itself with a limit, one JSON file each.

    PYTHONPATH=src python3 benchmarks/race.py [--only step-8b-4l,gemm] [--out benchmarks/results] [--seconds 600]

Commands that fail or run out of time are named at the end, with where their output lies; what was measured is kept. The
status is 1 where one failed. `--seconds` is for all of them together: what does not fit is left out and named.
"""

import argparse
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A command of `deepwell bench` and the seconds it may take; a compiled model takes 10 to 50 of them."""

    name: str
    arguments: tuple[str, ...]
    limit: int = 150


def step(model: str, peers: str, variants: str, limit: int, name: str | None = None, *more: str) -> Entry:
    """A race of whole training steps."""
    arguments = ("step", "--model", model, "--peers", peers, "--variants", variants, *more)
    return Entry(name=name or f"step-{model}", arguments=arguments, limit=limit)


ENTRIES = (
    # As many as fit beside each other and take turns.
    step("8b-4l", "torch,torchao", "bf16,fp8,fp8_head", 180),
    step("8b-4l", "torch,torchao-row,liger", "fp8,fp8_tensor,fp8_1x128,fp8_exact", 270, "step-8b-4l-scalings"),
    step("hf-8b-4l", "torch,eager,liger", "fp8,fp8_head", 150),
    step("1b-16l", "torch,torchao", "fp8_cg_cached,fp8_cg_head,fp8_cg_cached_head", 300),
    step("768-12l", "torch,torchao", "fp8_cg,fp8_cg_head", 220),
    step("llama3-8b", "", "fp8_head,fp8", 240),
    step("8b-4l", "torch,torch-max", "fp8", 560, "step-8b-4l-max-autotune"),
    Entry(name="gemm", arguments=("gemm",)),
    Entry(name="attention", arguments=("attention",)),
    Entry(name="adamw", arguments=("adamw",)),
    Entry(name="compile", arguments=("compile", "--entrants", "fp8,torch,torchao"), limit=240),
)


def run(entry: Entry, out: Path, limit: float) -> str | None:
    """Run one command; None, or why there is no result."""
    target, text = out / f"{entry.name}.json", out / f"{entry.name}.txt"
    command = [sys.executable, "-m", "deepwell", "bench", *entry.arguments, "--json", str(target)]
    with text.open("w", encoding="utf-8") as file:
        try:
            status = subprocess.run(
                command, stdout=file, stderr=subprocess.STDOUT, timeout=limit, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            return f"not done after {limit:.0f} s; see {text}"
    return f"status {status}; see {text}" if status or not target.is_file() else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help=f"of {', '.join(entry.name for entry in ENTRIES)}")
    parser.add_argument("--out", type=Path, default=Path("out/race"))
    parser.add_argument("--seconds", type=float, default=3600.0, help="for all of them together")
    args = parser.parse_args()
    wanted = [name for name in args.only.split(",") if name]
    unknown = set(wanted) - {entry.name for entry in ENTRIES}
    if unknown:
        parser.error(f"--only: there is no {', '.join(sorted(unknown))}")
    args.out.mkdir(parents=True, exist_ok=True)
    started, failed = time.perf_counter(), {}
    for entry in (entry for entry in ENTRIES if not wanted or entry.name in wanted):
        left = args.seconds - (time.perf_counter() - started)
        if left < 20:
            failed[entry.name] = "left out: no time"
            continue
        began = time.perf_counter()
        problem = run(entry, args.out, min(entry.limit, left))
        print(f"{entry.name}: {problem or 'done'}, {time.perf_counter() - began:.0f} s", flush=True)
        if problem:
            failed[entry.name] = problem
        else:
            # The command's own table ends its output.
            print(
                "\n".join((args.out / f"{entry.name}.txt").read_text(encoding="utf-8").splitlines()[-14:]), flush=True
            )
    for name, problem in failed.items():
        print(f"FAILED {name}: {problem}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
