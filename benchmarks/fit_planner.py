"""Fit the planner's constants to published runs: at most ten per GPU and six per software stack, none per model or row.

    python benchmarks/fit_planner.py                      fit on all rows and print the errors
    python benchmarks/fit_planner.py --write              ... and write planner/gpus.json and planner/stacks/*.json
    python benchmarks/fit_planner.py --leave-out model    refit without each model and predict it (or: source)
    python benchmarks/fit_planner.py --residuals 40       the largest errors, row by row
    python benchmarks/fit_planner.py --tables             the package's constants as docs/planner.md shows them

Least squares with soft-L1 loss on the log of predicted over measured step time, all constants in logs, each held near
its prior by a weak pull, so that what few rows see stays where physics or its family puts it. Shapes of a row do not
depend on the constants, so they are built once; GPU constants of different GPUs (and stack constants of different
stacks) touch different rows, so one column of the Jacobian is one evaluation for all of them at once.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from deepwell.errors import DeepwellError
from deepwell.planner.comm import Network
from deepwell.planner.efficiency import GpuConstants, constants_key, device, gpu_constants
from deepwell.planner.estimate import step_seconds
from deepwell.planner.job import StepJob, read_job
from deepwell.planner.published import RunRow, packaged_runs
from deepwell.planner.published.run import recompute_candidates
from deepwell.planner.rank_memory import rank_memory
from deepwell.planner.stack import get_stack, known_stacks

PLANNER = Path(__file__).parent.parent / "src" / "deepwell" / "planner"
PRIORS = Path(__file__).parent / "planner_priors.json"
WEIGHTS = {"A": 1.0, "B": 0.3, "C": 0.0}
LOSS_SCALE = 0.05  # errors beyond 5% count linearly

Key = tuple[str, str]  # ("gpu", "h100") or ("stack", "nemo")
Constants = dict[Key, dict[str, float]]


@dataclass(frozen=True, slots=True)
class Prior:
    """Where a constant is pulled to, how far in logs it may stray for the price of one row at 5%, and its limits."""

    value: float
    spread: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A row ready to be predicted with any constants."""

    run: RunRow
    job: StepJob
    gpu: str
    stack: str
    measured: float
    weight: float


def load(runs: Iterable[RunRow] | None = None) -> list[Point]:
    """Every row that has a measured step time and can be predicted."""
    points = []
    for run in packaged_runs() if runs is None else runs:
        if run.measured.step_s is None or run.hardware is None or run.layout is None:
            continue
        job = _first_that_fits(run)
        if job is None:
            continue
        points.append(
            Point(
                run=run, job=job, gpu=constants_key(run.hardware.gpus[0]), stack=job.stack.name,
                measured=run.measured.step_s, weight=WEIGHTS.get(run.tier, 0.0),
            )
        )  # fmt: skip
    return points


def _first_that_fits(run: RunRow) -> StepJob | None:
    """The row with the least recomputation that fits, as validation reads a row that does not say."""
    first: StepJob | None = None
    for candidate in recompute_candidates(run):
        assert candidate.workload and candidate.layout and candidate.stack and candidate.hardware
        try:
            job = read_job(candidate.workload, candidate.layout, candidate.stack)
        except DeepwellError:
            return None
        limit = candidate.hardware.memory_bytes or 0
        if max(rank_memory(job, rank).device for rank in range(candidate.layout.pp)) <= limit:
            return job
        first = first or job
    return first


def read_priors() -> dict[str, dict[str, Prior]]:
    """Priors by section: "gpu" and "stack" for all, "gpu:NAME" and "stack:NAME" where one differs."""
    data = json.loads(PRIORS.read_text(encoding="utf-8"))
    return {section: {name: Prior(*numbers) for name, numbers in table.items()} for section, table in data.items()}


def prior_of(priors: Mapping[str, Mapping[str, Prior]], key: Key) -> dict[str, Prior]:
    kind, name = key
    return {**priors[kind], **priors.get(f"{kind}:{name}", {})}


def predict(point: Point, constants: Constants) -> float:
    """Seconds of the row's step with these constants."""
    assert point.run.hardware is not None
    gpu = GpuConstants(**constants["gpu", point.gpu])
    stack = replace(point.job.stack, constants=replace(point.job.stack.constants, **constants["stack", point.stack]))
    dev = device(point.run.hardware.gpus[0], gpu)
    net = Network.of(point.run.hardware, gpu, stack.constants.comm_scale, stack.constants.network_scale)
    job = replace(point.job, stack=stack)
    return sum(step_seconds(job, dev, net, point.run.hardware, simulate=False).values())


def log_errors(points: Sequence[Point], constants: Constants) -> np.ndarray:
    return np.array([math.log(predict(p, constants) / p.measured) for p in points])


class Problem:
    """Constants as one vector of logs, with residuals and their Jacobian."""

    def __init__(self, points: Sequence[Point], priors: Mapping[str, Mapping[str, Prior]]) -> None:
        self.points = list(points)
        keys: list[Key] = sorted({("gpu", p.gpu) for p in points} | {("stack", p.stack) for p in points})
        self.names = [(key, name) for key in keys for name in prior_of(priors, key)]
        self.priors = [prior_of(priors, key)[name] for key, name in self.names]
        self.weights = np.sqrt([p.weight for p in points])
        self.start = np.log([p.value for p in self.priors])
        self.bounds = (np.log([p.low for p in self.priors]), np.log([p.high for p in self.priors]))
        self.pull = np.array([LOSS_SCALE / p.spread for p in self.priors])

    def constants(self, x: np.ndarray) -> Constants:
        found: Constants = defaultdict(dict)
        for (key, name), value in zip(self.names, np.exp(x), strict=True):
            found[key][name] = float(value)
        return found

    def residuals(self, x: np.ndarray) -> np.ndarray:
        errors = self.weights * log_errors(self.points, self.constants(x))
        return np.concatenate([errors, self.pull * (x - self.start)])

    def jacobian(self, x: np.ndarray) -> np.ndarray:
        base = log_errors(self.points, self.constants(x))
        matrix = np.zeros((len(self.points) + len(x), len(x)))
        step = 1e-3
        for kind, name in sorted({(key[0], name) for key, name in self.names}):
            columns = [i for i, (key, n) in enumerate(self.names) if key[0] == kind and n == name]
            moved = x.copy()
            moved[columns] += step
            slope = (log_errors(self.points, self.constants(moved)) - base) / step
            owner = {self.names[i][0][1]: i for i in columns}
            for row, point in enumerate(self.points):
                column = owner[point.gpu if kind == "gpu" else point.stack]
                matrix[row, column] = self.weights[row] * slope[row]
        for i in range(len(x)):
            matrix[len(self.points) + i, i] = self.pull[i]
        return matrix


def fit(
    points: Sequence[Point], priors: Mapping[str, Mapping[str, Prior]], steps: int = 12, start: Constants | None = None
) -> Constants:
    """Constants that fit the points best. What no point sees keeps its prior."""
    problem = Problem(points, priors)
    x0 = problem.start.copy()
    if start is not None:
        for i, (key, name) in enumerate(problem.names):
            if name in start.get(key, {}):
                x0[i] = math.log(start[key][name])
    low, high = problem.bounds
    x0 = np.clip(x0, low + 1e-6, high - 1e-6)
    result = least_squares(
        problem.residuals, x0, jac=problem.jacobian, bounds=problem.bounds, loss="soft_l1", f_scale=LOSS_SCALE,
        max_nfev=steps, x_scale=0.1,
    )  # fmt: skip
    return problem.constants(result.x)


def complete(constants: Constants, keys: Iterable[Key], priors: Mapping[str, Mapping[str, Prior]]) -> Constants:
    """The same with prior values for GPUs and stacks that no row of the fit had."""
    full = dict(constants)
    for key in keys:
        if key not in full:
            full[key] = {name: p.value for name, p in prior_of(priors, key).items()}
    return full


def packaged(points: Sequence[Point]) -> Constants:
    """The constants that the package ships."""
    gpus = {p.gpu: gpu_constants(p.gpu) for p in points}
    stacks = {p.stack: get_stack(p.stack).constants for p in points}
    found: Constants = {("gpu", name): asdict(value) for name, value in gpus.items()}
    found.update({("stack", name): asdict(value) for name, value in stacks.items()})
    return found


# ---- showing ----


def summary(points: Sequence[Point], errors: np.ndarray, tier: str = "A") -> str:
    shown = [abs(math.exp(e) - 1) for p, e in zip(points, errors, strict=True) if p.run.tier == tier]
    signed = [math.exp(e) - 1 for p, e in zip(points, errors, strict=True) if p.run.tier == tier]
    within = sum(e <= 0.1 for e in shown) / len(shown)
    return (
        f"{len(shown)} rows, median {statistics.median(shown):.3f}, mean {statistics.mean(shown):.3f}, "
        f"bias {statistics.mean(signed):+.3f}, within 10% {within:.2f}"
    )


def by_group(points: Sequence[Point], errors: np.ndarray, key: Callable[[Point], str]) -> str:
    groups: dict[str, list[float]] = defaultdict(list)
    for point, error in zip(points, errors, strict=True):
        if point.run.tier == "A":
            groups[key(point)].append(error)
    lines = []
    for name, values in sorted(groups.items(), key=lambda item: -len(item[1])):
        size = statistics.mean(abs(math.exp(v) - 1) for v in values)
        lines.append(f"  {name:48s} n={len(values):4d}  bias {statistics.median(values):+.3f}  mean |error| {size:.3f}")
    return "\n".join(lines)


def _solve(problem: Problem, kept: np.ndarray, x: np.ndarray, errors: np.ndarray, slopes: np.ndarray) -> np.ndarray:
    """The optimum of the linearized problem over the kept rows, soft-L1 by reweighting."""
    rows = np.concatenate([kept, np.arange(len(problem.points), len(problem.points) + len(x))])
    jac, res = slopes[rows], errors[rows]
    low, high = problem.bounds
    move = np.zeros_like(x)
    for _ in range(8):
        now = res + jac @ move
        weight = 1 / np.sqrt(1 + (now / LOSS_SCALE) ** 2)
        weight[len(kept) :] = 1.0
        root = np.sqrt(weight)
        move = np.linalg.lstsq(jac * root[:, None], -(res * root), rcond=None)[0]
        move = np.clip(x + move, low, high) - x
    return np.clip(x + move, low, high)


def leave_out(
    points: Sequence[Point], what: str, priors: Mapping[str, Mapping[str, Prior]], fitted: Constants
) -> np.ndarray:
    """Errors of every row, predicted with constants that were fitted without its model or source.

    Refits are Newton steps from the full fit: one where a group is small, several with new slopes where it is large.
    """
    name = {"model": lambda p: p.run.model, "source": lambda p: p.run.source}[what]
    problem = Problem(points, priors)
    start = np.log([fitted[key][constant] for key, constant in problem.names])
    errors, slopes = problem.residuals(start), problem.jacobian(start)
    found = np.zeros(len(points))
    for held in sorted({name(p) for p in points}):
        out = np.array([i for i, p in enumerate(points) if name(p) == held])
        kept = np.setdiff1d(np.arange(len(points)), out)
        x = _solve(problem, kept, start, errors, slopes)
        for _ in range(2 if len(out) > 0.03 * len(points) else 0):
            x = _solve(problem, kept, x, problem.residuals(x), problem.jacobian(x))
        found[out] = log_errors([points[i] for i in out], problem.constants(x))
        print(f"  without {held}: {len(out)} rows, median bias {np.median(found[out]):+.3f}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--leave-out", choices=("model", "source"))
    parser.add_argument("--residuals", type=int, default=0)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--tables", action="store_true", help="print the constants that the package ships, and stop")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--fresh", action="store_true", help="start from the priors, not from the package's constants")
    args = parser.parse_args()
    if args.tables:
        print(constants_markdown())
        return
    points, priors = load(), read_priors()
    constants = fit(points, priors, steps=args.steps, start=None if args.fresh else packaged(points))
    errors = log_errors(points, constants)
    print("all rows:", summary(points, errors))
    print(by_group(points, errors, lambda p: f"{p.stack} on {p.gpu}"))
    if args.residuals:
        for i in np.argsort(-np.abs(errors))[: args.residuals]:
            print(f"  {errors[i]:+.3f}  {points[i].run}")
    if args.write:
        write(constants, points, priors)
    if args.leave_out:
        held = leave_out(points, args.leave_out, priors, constants)
        print(f"leave one {args.leave_out} out:", summary(points, held))
        print(by_group(points, held, lambda p: f"{p.stack} on {p.gpu}"))


def constants_markdown() -> str:
    """The package's constants and what each set was fitted on, as Markdown tables."""
    gpus = json.loads((PLANNER / "gpus.json").read_text(encoding="utf-8"))["gpus"]
    lines = _table("GPU", {name: (entry["constants"], entry["fitted_on"]) for name, entry in gpus.items()})
    stacks = {name: get_stack(name) for name in known_stacks()}
    return "\n".join(
        [*lines, "", *_table("stack", {name: (asdict(s.constants), s.fitted_on) for name, s in stacks.items()})]
    )


def _table(what: str, entries: Mapping[str, tuple[Mapping[str, float], str]]) -> list[str]:
    names = list(next(iter(entries.values()))[0])
    lines = [f"| {what} | {' | '.join(names)} | fitted on |", "| --- |" + " ---: |" * len(names) + " --- |"]
    for name, (constants, fitted_on) in entries.items():
        lines.append(f"| {name} | {' | '.join(f'{constants[n]:.3g}' for n in names)} | {fitted_on} |")
    return lines


def write(constants: Constants, points: Sequence[Point], priors: Mapping[str, Mapping[str, Prior]]) -> None:
    """Put the constants into the package, each set with what it was fitted on."""
    path = PLANNER / "gpus.json"
    table = json.loads(path.read_text(encoding="utf-8"))
    for name, entry in table["gpus"].items():
        mine = [p for p in points if p.gpu == name]
        values = complete(constants, [("gpu", name)], priors)["gpu", name]
        entry["constants"] = {k: float(f"{v:.4g}") for k, v in values.items()}
        entry["fitted_on"] = _fitted_on(mine)
    path.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    for name in sorted({"generic", "deepwell"} | {p.stack for p in points}):
        mine = [p for p in points if p.stack == name]
        values = complete(constants, [("stack", name)], priors)["stack", name]
        path = PLANNER / "stacks" / f"{name}.json"
        data = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"name": name, "switches": {}}
        # `holes` is about memory; this fit leaves it alone.
        data["constants"] = {**data.get("constants", {}), **{k: float(f"{v:.4g}") for k, v in values.items()}}
        data["fitted_on"] = _fitted_on(mine)
        path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def _fitted_on(points: Sequence[Point]) -> str:
    if not points:
        return "no published run: priors"
    sources: dict[str, int] = defaultdict(int)
    for point in points:
        sources[point.run.source] += 1
    return f"{len(points)} rows: " + ", ".join(f"{name} ({count})" for name, count in sorted(sources.items()))


if __name__ == "__main__":
    main()
