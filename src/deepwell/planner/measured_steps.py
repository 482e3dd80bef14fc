"""Steps that were measured on this machine's GPU beside what was predicted of them, and what follows for a plan. Pure.

    record_step(gpu, workload, layout, predicted_s, real_s, "2026-11-20")     the trainer, with the median of a run
    read_ratio(gpu, workload, layout)    ->    1.04, note      real over predicted seconds, or None

A problem that was measured has its own ratio. Another on one device gets the median over those on one device in the
same formats, once three of them are known. Ratios beyond a factor of two tell of something else than the model's error
and are cut there. One file for each device, driver and torch in the cache folder, as `hardware/cache.py` has them; a
named machine has none. A damaged file is ignored with a note, and the next step that is recorded writes it anew.
"""

import hashlib
import json
import math
import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from deepwell.errors import ConfigError
from deepwell.graph.ops import Attention, GroupedLinear, Linear
from deepwell.hardware.cache import measurement_path, write_cached
from deepwell.hardware.codec import decode, encode
from deepwell.hardware.parts import Gpu
from deepwell.planner.layout import Layout
from deepwell.planner.workload import Workload

SCHEMA = 1
ENOUGH = 3  # problems on one device before another one gets their median
LIMITS = (0.5, 2.0)
_MOST = 64  # problems of a file; the oldest go


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    problem: str  # digest of model, formats, sequence length and layout
    what: str  # the same for people
    precision: str  # digest of the formats alone
    gpus: int
    predicted_s: float
    real_s: float
    date: str

    @property
    def ratio(self) -> float:
        return min(max(self.real_s / self.predicted_s, LIMITS[0]), LIMITS[1])


def is_this_machines(gpu: Gpu) -> bool:
    """Whether a device was probed and not named: a driver answered for it, or it is this CPU."""
    return gpu.driver is not None or (gpu.kind == "cpu" and gpu.machine is None)


def steps_path(gpu: Gpu, environ: Mapping[str, str] | None = None) -> Path:
    """The file for this device, driver and torch."""
    path = measurement_path(gpu, environ)
    return path.with_name(path.name.replace("measure-", "steps-", 1))


def record_step(
    gpu: Gpu, workload: Workload, layout: Layout, predicted_s: float, real_s: float, date: str
) -> MeasuredStep:
    """Keep a run's median step; the same problem's older one goes.

    `predicted_s` is the model's own word, `Estimate.uncorrected_s`: a corrected one would feed on itself. Raises
    ConfigError for a device that was only named, for seconds that are none, and where the folder cannot be written.
    """
    if not is_this_machines(gpu):
        raise ConfigError(f"gpu: {gpu.name} is a named machine; a step is measured on what dw.probe() finds")
    for name, value in (("predicted_s", predicted_s), ("real_s", real_s)):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not (0 < value < math.inf):
            raise ConfigError(f"{name}: got {value!r}; seconds above 0")
    step = MeasuredStep(
        problem=_problem(workload, layout), what=f"{workload}; {layout}", precision=_digest(_formats(workload)),
        gpus=layout.gpus, predicted_s=float(predicted_s), real_s=float(real_s), date=date,
    )  # fmt: skip
    known, _ = read_steps(gpu)
    kept = [one for one in known if one.problem != step.problem]
    text = json.dumps({"schema": SCHEMA, "steps": encode((*kept[-(_MOST - 1) :], step))}, indent=1)
    write_cached(steps_path(gpu), text)
    return step


def read_ratio(gpu: Gpu, workload: Workload, layout: Layout) -> tuple[float | None, str]:
    """(the ratio or None, a note that says where it is from or why a file was no use)."""
    if not is_this_machines(gpu):
        return None, ""
    steps, note = read_steps(gpu)
    if not steps:
        return None, note
    problem = _problem(workload, layout)
    own = next((one for one in steps if one.problem == problem), None)
    if own is not None:
        return own.ratio, f"step time as measured here on {own.date}: {own.ratio:.3f} times what the model says"
    formats = _digest(_formats(workload))
    alike = [one.ratio for one in steps if one.gpus == layout.gpus == 1 and one.precision == formats]
    if len(alike) < ENOUGH:
        return None, ""
    ratio = statistics.median(alike)
    return ratio, f"step time corrected by {ratio:.3f}, the median of {len(alike)} other problems measured here"


def read_steps(gpu: Gpu, environ: Mapping[str, str] | None = None) -> tuple[tuple[MeasuredStep, ...], str]:
    """(the measured steps of this device, oldest first, a note where a file was there and was no use)."""
    path = steps_path(gpu, environ)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict) or data.get("schema") != SCHEMA or not isinstance(data.get("steps"), list):
            raise ConfigError("another schema")
        steps = tuple(decode(MeasuredStep, one, f"{path.name}[{i}]") for i, one in enumerate(data["steps"]))
        if not all(0 < one.predicted_s < math.inf and 0 < one.real_s < math.inf for one in steps):
            raise ConfigError("seconds that are none")
    except FileNotFoundError:
        return (), ""
    except (OSError, ValueError, RecursionError) as error:  # not JSON, not text, or another schema (ConfigError)
        return (), f"the measured steps in {path.name} were ignored ({error}); the next run writes them anew"
    return steps, ""


# ---- what makes two problems the same ----


def _problem(workload: Workload, layout: Layout) -> str:
    """Model shapes with their formats, sequence length, optimizer and layout; neither names nor the global batch."""
    shapes: Counter[str] = Counter()
    for variant in workload.variants():
        formats = dict(variant.formats)
        for op in workload.ir.blocks[variant.block].ops:
            if isinstance(op, Attention):
                shape = f"attention {op.q_heads} {op.kv_heads} {op.qk_dim} {op.v_dim} {op.causal} {op.window}"
            elif isinstance(op, (Linear, GroupedLinear)):
                shape = f"{op.role} {op.n} {op.k} {getattr(op, 'experts', 1)} {formats.get(op.name)}"
            else:
                continue
            shapes[shape] += len(variant.layers)
    ends = [
        f"{op.kind} {op.n} {op.k} {workload.end_formats(op)}"
        for op in (*workload.ir.stem, *workload.ir.tail)
        if isinstance(op, Linear)
    ]
    facts = (sorted(shapes.items()), ends, workload.ir.num_params, workload.seq_len, workload.optimizer)
    return _digest([facts, layout.to_dict()])


def _formats(workload: Workload) -> list[tuple[str, str, str]]:
    """The formats that the layers use, without saying how many do."""
    return sorted({formats for variant in workload.variants() for _, formats in variant.formats})


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:24]
