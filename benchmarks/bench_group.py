"""Time the maxima and the FP8 values of a linear's weights, for every linear of a layer, in every config.

    PYTHONPATH=src python3 benchmarks/bench_group.py [--model 1b|8b] [--only maxima,rows] [--against FILE] [--json FILE]

A row says microseconds a call (median), GB/s of the bytes that must move, and that as a share of the copy bandwidth
measured in the same run. Calls take turns over so many copies of the weights that L2 holds none of them; "forward" is
maxima and values right after each other, as a layer has them. What is compared with its reference and differs is a row
that says WRONG. The table of a whole layer comes last. `--against` times another version of
src/deepwell/kernels/quantize/weights.py in the same run, by its own defaults.
"""

import argparse
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import ModuleType

import torch
import triton
from torch import Tensor
from triton.errors import TritonError

from deepwell.bench.environment import environment
from deepwell.kernels.quantize import weights as group
from deepwell.kernels.tune.timing import copy_gbps, recorded, times_us

# Name, rows of the weights that share a scale, columns: the linears of a layer of a 1B and of a Llama-8B.
MODELS = {
    "1b": [("qkv", (2048, 512, 512), 2048), ("out", (2048,), 2048), ("gate, up", (8192, 8192), 2048),
           ("down", (2048,), 8192)],
    "8b": [("qkv", (4096, 1024, 1024), 4096), ("out", (4096,), 4096), ("gate, up", (14336, 14336), 4096),
           ("down", (4096,), 14336)],
}  # fmt: skip
# L2 of an H200 is 50 MB: more than four times that between two readings of a weight.
COLD_BYTES = 256 << 20
BYTES = {"maxima": 2, "rows": 3, "transposed": 3, "forward": 5}  # of a weight in bf16


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is run for a group of weights, and which of its results must equal the reference's."""

    op: str
    variant: str
    run: Callable[[list[Tensor]], tuple[Tensor, ...]]


@dataclass(frozen=True, kw_only=True)
class Result:
    op: str
    variant: str
    linear: str
    us: float
    gbps: float
    share_of_copy: float
    problem: str | None


def short(config: group.GroupConfig) -> str:
    """A config in few characters: 8x512 w4 tiles4 stages1."""
    return f"{config.rows}x{config.columns} w{config.num_warps} tiles{config.tiles} stages{config.stages}"


def forward(module: ModuleType, weights: list[Tensor]) -> tuple[Tensor, ...]:
    partials = module.partial_maxima(weights)
    return *module.quantize_group(weights, partials, transposed=False, scale_per_row=True), partials


def cases(module: ModuleType, partials: Tensor) -> Iterator[Case]:
    """Every config of a version that lets one choose; its defaults where it does not."""

    def maxima(weights: list[Tensor], **config: group.GroupConfig) -> tuple[Tensor, ...]:
        return (module.partial_maxima(weights, **config),)

    def codes(transposed: bool, weights: list[Tensor], **config: group.GroupConfig) -> tuple[Tensor, ...]:
        return module.quantize_group(weights, partials, transposed=transposed, scale_per_row=True, **config)

    runs: dict[str, tuple[Callable[..., tuple[Tensor, ...]], str]] = {
        "maxima": (maxima, "PARTIALS_CONFIGS"),
        "rows": (partial(codes, False), "ALONG_CONFIGS"),
        "transposed": (partial(codes, True), "TRANSPOSED_CONFIGS"),
    }
    for op, (run, configs) in runs.items():
        for config in getattr(module, configs, ()):
            yield Case(op=op, variant=short(config), run=partial(run, config=config))
        if not hasattr(module, configs):
            yield Case(op=op, variant="before", run=run)
    yield Case(op="forward", variant="first of each" if module is group else "before", run=partial(forward, module))


def expected(weights: list[Tensor]) -> dict[str, tuple[Tensor, ...]]:
    """What each operation must return, by the references; of partial maxima only the largest matters."""
    largest = group.partial_maxima_ref(weights)
    found: dict[str, tuple[Tensor, ...]] = {"maxima": (largest.amax(),)}
    for op, transposed in (("rows", False), ("transposed", True)):
        q, scale = group.quantize_group_ref(weights, largest, transposed=transposed)
        found[op] = q, scale.expand(q.shape[0])
    found["forward"] = *found["rows"], largest.amax()
    return found


def bytes_of(x: Tensor) -> Tensor:
    return x.reshape(-1).contiguous().view(torch.uint8)


def problem_of(op: str, got: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> str | None:
    if op in ("maxima", "forward"):
        got = *got[:-1], got[-1].amax()
    for i, (mine, ref) in enumerate(zip(got, wanted, strict=True)):
        if not torch.equal(bytes_of(mine), bytes_of(ref)):
            return f"result {i} differs"
    return None


def median_us(run: Callable[[list[Tensor]], tuple[Tensor, ...]], copies: list[list[Tensor]]) -> float:
    """A call's share of the time of one call for each copy. All results live until the last: they are cold as well."""
    device = copies[0][0].device
    with recorded(lambda: [run(weights) for weights in copies], device) as replay:
        replay()
        return statistics.median(times_us(replay, device, 0.03)) / len(copies)


def measure(case: Case, linear: str, copies: list[list[Tensor]], wanted: tuple[Tensor, ...], copy: float) -> Result:
    try:
        problem = problem_of(case.op, case.run(copies[-1]), wanted)
        us = median_us(case.run, copies)
    except (RuntimeError, TritonError) as error:
        # A config that does not compile or fit is a row of the table, not the end of it.
        problem, us = f"{type(error).__name__}: {error}".splitlines()[0][:120], float("inf")
    gbps = BYTES[case.op] * sum(w.numel() for w in copies[0]) / us / 1e3
    return Result(
        op=case.op, variant=case.variant, linear=linear, us=us, gbps=gbps, share_of_copy=gbps / copy, problem=problem
    )


def line(result: Result) -> str:
    wrong = f"  WRONG: {result.problem}" if result.problem else ""
    return (
        f"{result.op:8} {result.linear:9} {result.variant:30} {result.us:8.1f} {result.gbps:7.0f}"
        f" {result.share_of_copy:6.1%}{wrong}"
    )


def layer_lines(results: list[Result], linears: list[str]) -> Iterator[str]:
    """Microseconds of each linear and their sum, the fastest of an operation first."""
    rows: dict[tuple[str, str], dict[str, float]] = {}
    for result in results:
        rows.setdefault((result.op, result.variant), {})[result.linear] = result.us
    yield f"{'layer':8} {'variant':30} " + " ".join(f"{name:>9}" for name in linears) + f" {'sum us':>9}"
    order = list(BYTES)
    complete = {key: us for key, us in rows.items() if len(us) == len(linears)}
    for (op, variant), us in sorted(complete.items(), key=lambda row: (order.index(row[0][0]), sum(row[1].values()))):
        yield f"{op:8} {variant:30} " + " ".join(f"{us[name]:9.1f}" for name in linears) + f" {sum(us.values()):9.1f}"


def load_version(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("quantize_group_before", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"--against: {path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for their module
    spec.loader.exec_module(module)
    return module


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="1b", help="whose linears")
    parser.add_argument("--only", default=",".join(BYTES), help="operations to time, separated by commas")
    parser.add_argument("--against", type=Path, help="another version of quantize_group.py")
    parser.add_argument("--seconds", type=float, default=28.0, help="stop after that long")
    parser.add_argument("--json", type=Path, help="write the rows to this file too")
    given = parser.parse_args()
    started, linears = time.monotonic(), MODELS[given.model]
    torch.manual_seed(0)
    copy = copy_gbps()
    modules = [group] + ([load_version(given.against)] if given.against else [])
    print(f"{torch.cuda.get_device_name()}: copy {copy:.0f} GB/s; {given.model}")
    print(f"{'op':8} {'linear':9} {'variant':30} {'us':>8} {'GB/s':>7} of copy")
    results: list[Result] = []
    skipped = 0
    for name, rows, columns in linears:
        num = max(2, triton.cdiv(COLD_BYTES, 2 * sum(rows) * columns))
        first = [torch.randn(n, columns, device="cuda").mul_(0.02).bfloat16() for n in rows]
        copies = [first] + [[w.clone() for w in first] for _ in range(num - 1)]
        wanted = expected(first)
        partials = group.partial_maxima(first)
        for case in [case for module in modules for case in cases(module, partials)]:
            if case.op not in given.only.split(","):
                continue
            if time.monotonic() - started > given.seconds:
                skipped += 1
                continue
            results.append(measure(case, name, copies, wanted[case.op], copy))
            print(line(results[-1]), flush=True)
    print("\n".join(layer_lines(results, [name for name, _, _ in linears])))
    wrong = sum(result.problem is not None for result in results)
    print(f"{len(results)} rows, {wrong} wrong, {skipped} not reached in {time.monotonic() - started:.0f} s")
    if given.json:
        rows_of = [asdict(result) for result in results]
        arguments = {name: value for name, value in vars(given).items() if name not in ("json", "against")}
        report = {"environment": environment(), "arguments": arguments, "copy_gbps": copy, "rows": rows_of}
        given.json.write_text(json.dumps(report, indent=1, default=str) + "\n")
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
