"""Which GEMMs a low-precision format would spoil: one batch of the model as it was written, each product done twice.

    fwd    x w^T       dgrad    dy w       wgrad    dy^T x

Operands are those of the model's own forward and backward in its own dtype. Each product that has a scheme is computed
as the engine would and once more in fp32; the signal to noise between the two, in dB, must reach the floor of its
formats (docs/numerics.md: 27 for E4M3 and MXFP8, 24 where a side is E5M2, 14 for FP4). Below it, or where NaN or
infinity comes out of finite numbers, the GEMM is fragile. Outliers that leave nothing of the others under one scale,
and sums that cancel, are what it finds.

Of experts each is judged by its own rows, and the worst speaks for the GEMM, which all of them share. An expert's
signal to noise over few rows strays from its mean (tiny experts: 3 dB over one row, 0.5 over 16), so those with fewer
rows are judged together, and not at all where they have fewer together.

Cost: one forward and backward, six products more a linear, and an input that is kept until its gradient comes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from deepwell.engine.binding import Bound, Fragile
from deepwell.engine.grouped_calls import GroupedCall, GroupedCalls
from deepwell.errors import ConfigError
from deepwell.formats.metrics import sqnr_db
from deepwell.formats.spec import E2M1, E4M3, E5M2, get_format
from deepwell.kernels.experts.autograd import grouped_linear
from deepwell.kernels.experts.row_tiles import groups
from deepwell.kernels.gemm.linear import low_precision_linear
from deepwell.kernels.gemm.schemes import STEPS, GemmScheme, parse_scheme
from deepwell.kernels.tune.verify import FLOORS_DB

# By element of the coarser operand.
_FLOORS = {E4M3: 27.0, E5M2: 24.0, E2M1: 14.0}
_OTHER_FLOOR = FLOORS_DB["mxfp6"]
# Rows by which one expert can be judged.
_MIN_ROWS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class FragileReport:
    """Every GEMM that was checked, and paths that could not be."""

    rows: tuple[Fragile, ...]
    skipped: tuple[str, ...] = ()

    @property
    def fragile(self) -> tuple[Fragile, ...]:
        return tuple(row for row in self.rows if row.is_fragile)

    def to_json(self, indent: int | None = None) -> str:
        return json.dumps(asdict(self), indent=indent)

    @classmethod
    def from_json(cls, text: str) -> FragileReport:
        try:
            data = json.loads(text)
            return cls(rows=tuple(Fragile(**row) for row in data["rows"]), skipped=tuple(data["skipped"]))
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ConfigError(f"not a report of fragile GEMMs: {type(error).__name__}: {error}") from error

    def __str__(self) -> str:
        out = [f"{len(self.fragile)} of {len(self.rows)} GEMMs are fragile on this batch"]
        out += [f"  {row.path} {row.reason}" for row in self.fragile]
        if self.skipped:
            out.append(f"  not checked: {', '.join(self.skipped)}")
        return "\n".join(out)


def check_fragile(model: nn.Module, bound: Bound, batch: Any, *, floor_db: float | None = None) -> FragileReport:
    """Run one batch through the model as it was written and check every linear and every expert that has a scheme.

    `batch` is a dict of keyword arguments, a tuple of arguments or one tensor. Gradients come from the model's loss
    (`.loss` of its output, or an output of one number); without one only the forward is checked. Parameters' gradients,
    buffers (BatchNorm's statistics among them) and random states stay as they were. `floor_db` replaces the formats'
    own floors. Raises ConfigError where the model itself gives NaN or infinity, or the batch is none.
    """
    check_batch("batch", batch)
    probe = _Probe(floor_db=floor_db)
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters(remove_duplicate=False))
    skipped = []
    handles = []
    experts: dict[str, Tensor] = {}
    for path, scheme in bound.schemes.items():
        module = modules.get(path)
        weight = parameters.get(path, parameters.get(f"{path}.weight"))
        if weight is not None and weight.dim() == 3:
            experts[path] = weight
            continue
        if module is None or not isinstance(getattr(module, "weight", None), Tensor) or module.weight.dim() != 2:
            skipped.append(f"{path} (no linear module)")
            continue
        handles.append(module.register_forward_hook(probe.hook(path, scheme)))
    devices = sorted({p.device for p in model.parameters() if p.is_cuda}, key=str)
    try:
        watch = GroupedCalls(experts, lambda call, y: probe.grouped(call, bound.schemes[call.path], y))
        with torch.enable_grad(), torch.random.fork_rng(devices=devices), _buffers_kept(model), watch:
            _run(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    met = {row.path for row in probe.rows.values()}
    skipped += [f"{path} (no grouped product ran)" for path in experts if path not in probe.seen]
    skipped += [f"{path} ({why})" for path, why in probe.unjudged.items()]
    linears = (path for path in bound.schemes if path in modules and path not in experts)
    skipped += [f"{path} (did not run)" for path in linears if path not in met]
    order = {(path, step): i for i, (path, step) in enumerate((p, s) for p in bound.schemes for s in STEPS)}
    rows = sorted(probe.rows.values(), key=lambda row: order[row.path, row.gemm])
    return FragileReport(rows=tuple(rows), skipped=tuple(skipped))


def check_batch(name: str, batch: Any) -> None:
    """Raise ConfigError unless a model can be called with it."""
    if not isinstance(batch, Mapping | tuple | list | Tensor):
        wanted = "pass a dict of keyword arguments, a tuple of arguments or a tensor"
        raise ConfigError(f"{name} is a {type(batch).__name__}, {str(batch)[:40]!r}; {wanted}")


def _run(model: nn.Module, batch: Any) -> None:
    """Forward and, where there is a loss, backward; gradients of parameters are made and dropped."""
    if isinstance(batch, Mapping):
        out = model(**batch)
    else:
        out = model(*(batch if isinstance(batch, tuple | list) else (batch,)))
    loss = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", out)
    trained = [p for p in model.parameters() if p.requires_grad]
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad and trained:
        if not bool(loss.isfinite()):
            raise ConfigError(f"the loss of this batch is {float(loss)} in the model's own dtype; check another batch")
        torch.autograd.grad(loss, trained, allow_unused=True)


@contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    """Buffers that are written to or replaced within have their values and their places back after."""
    places = [(module, dict(module._buffers)) for module in model.modules() if module._buffers]
    values = {
        buffer: buffer.detach().clone()
        for _, buffers in places
        for buffer in buffers.values()
        if buffer is not None and not buffer.is_inference()
    }
    try:
        yield
    finally:
        for module, buffers in places:
            module._buffers.clear()
            module._buffers.update(buffers)
        with torch.no_grad():
            for buffer, value in values.items():
                # (BatchNorm's statistics move without their version.)
                if not torch.equal(buffer, value):
                    buffer.copy_(value)


class _Probe:
    """Collects the worst signal to noise of each GEMM while the model runs."""

    def __init__(self, *, floor_db: float | None) -> None:
        self.floor_db = floor_db
        self.rows: dict[tuple[str, str], Fragile] = {}
        self.seen: set[str] = set()  # experts that ran
        self.unjudged: dict[str, str] = {}  # experts with too few rows, in words, by path

    def hook(self, path: str, scheme: str) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def after(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            weight = module.weight
            assert isinstance(weight, Tensor)
            x = inputs[0].detach().reshape(-1, inputs[0].shape[-1])
            # Conv1D keeps its weight [K, N].
            w_NK = weight.detach() if isinstance(module, nn.Linear) else weight.detach().T
            if not x.numel():
                return
            with torch.no_grad():
                y = low_precision_linear(x, [w_NK], None, scheme)
                self._add(path, scheme, "fwd", x.float() @ w_NK.float().T, y)
            if isinstance(output, Tensor) and output.requires_grad:
                wants = (bool(inputs[0].requires_grad), weight.requires_grad)
                output.register_hook(lambda dy: self._backward(path, scheme, (x, w_NK, dy), wants))

        return after

    def _backward(self, path: str, scheme: str, operands: Iterable[Tensor], wants: tuple[bool, bool]) -> None:
        x, w_NK, dy = operands
        dy = dy.detach().reshape(-1, dy.shape[-1])
        with torch.enable_grad():
            x_leaf, w_leaf = x.clone().requires_grad_(), w_NK.clone().requires_grad_()
            y = low_precision_linear(x_leaf, [w_leaf], None, scheme)
            dx, dw = torch.autograd.grad(y, (x_leaf, w_leaf), dy)
        if wants[0]:
            self._add(path, scheme, "dgrad", dy.float() @ w_NK.float(), dx)
        if wants[1]:
            self._add(path, scheme, "wgrad", dy.float().T @ x.float(), dw)

    # ---- experts ----

    def grouped(self, call: GroupedCall, scheme: str, y: Tensor) -> None:
        """Check a grouped product that ran, and its gradients when they come."""
        self.seen.add(call.path)
        x, weight = call.x_SK.detach(), call.weight.detach()
        wants = (call.x_SK.requires_grad, call.weight.requires_grad)
        call = replace(call, x_SK=x, weight=weight)
        w_EKN = weight if call.is_kn else weight.transpose(1, 2)
        with torch.no_grad():
            made = grouped_linear(x, weight, call.offs, call.is_kn, scheme)
            self._add_groups(call, scheme, "fwd", lambda e, part: (x[part].float() @ w_EKN[e].float(), made[part]))
        if y.requires_grad:
            y.register_hook(lambda dy: self._grouped_backward(call, scheme, dy.detach().flatten(0, -2), wants))

    def _grouped_backward(self, call: GroupedCall, scheme: str, dy: Tensor, wants: tuple[bool, bool]) -> None:
        x, weight = call.x_SK, call.weight
        w_EKN = weight if call.is_kn else weight.transpose(1, 2)
        with torch.enable_grad():
            # Leaves of their own over the same memory: a copy of all experts would double what they take.
            x_leaf, w_leaf = x.detach().requires_grad_(), weight.detach().requires_grad_()
            y = grouped_linear(x_leaf, w_leaf, call.offs, call.is_kn, scheme)
            dx, dw = torch.autograd.grad(y, (x_leaf, w_leaf), dy)
        dw_EKN = dw if call.is_kn else dw.transpose(1, 2)
        if wants[0]:
            self._add_groups(call, scheme, "dgrad", lambda e, part: (dy[part].float() @ w_EKN[e].float().T, dx[part]))
        if wants[1]:
            self._add_groups(call, scheme, "wgrad", lambda e, part: (x[part].float().T @ dy[part].float(), dw_EKN[e]))

    def _add_groups(
        self, call: GroupedCall, scheme: str, step: str, of_expert: Callable[[int, slice], tuple[Tensor, Tensor]]
    ) -> None:
        """Judge each expert by `of_expert`, which gives (the product in fp32, in its scheme) of one of them."""
        if getattr(parse_scheme(scheme), step).method == "bf16":
            return
        few: list[tuple[int, int, float]] = []  # expert, rows, dB
        for e, part in groups(call.offs):
            # Rows of zeros are no rows: so Llama 4 gives an expert the tokens that did not choose it.
            count = int(call.x_SK[part].any(1).sum())
            if not count:
                continue
            decibels = self._decibels(call.path, step, *of_expert(e, part))
            if count < _MIN_ROWS:
                few.append((e, count, decibels))
            else:
                self._keep(call.path, scheme, step, decibels, f"expert {e}")
        rows = sum(count for _, count, _ in few)
        if rows >= _MIN_ROWS:
            self._keep(call.path, scheme, step, _together(few), f"experts with fewer than {_MIN_ROWS} rows")
        elif few:
            names = ", ".join(str(e) for e, _, _ in few)
            self.unjudged.setdefault(call.path, f"experts {names}: fewer than {_MIN_ROWS} rows in all")

    # ---- what was found ----

    def _add(self, path: str, scheme: str, step: str, wanted: Tensor, got: Tensor) -> None:
        if getattr(parse_scheme(scheme), step).method != "bf16":
            self._keep(path, scheme, step, self._decibels(path, step, wanted, got))

    def _decibels(self, path: str, step: str, wanted: Tensor, got: Tensor) -> float:
        if not bool(wanted.isfinite().all()):
            raise ConfigError(f"{path} {step} is not finite in the model's own dtype; check another batch")
        return sqnr_db(wanted, got)

    def _keep(self, path: str, scheme: str, step: str, decibels: float, of: str = "") -> None:
        how: GemmScheme = getattr(parse_scheme(scheme), step)
        row = Fragile(
            path=path,
            gemm=step,
            scheme=scheme.split("|")[STEPS.index(step)],
            sqnr_db=decibels,
            floor_db=self.floor_db if self.floor_db is not None else floor_of(how),
            of=of,
        )
        known = self.rows.get((path, step))
        if known is None or not known.sqnr_db <= row.sqnr_db:  # NaN is the worst
            if known is None or not math.isnan(known.sqnr_db):
                self.rows[path, step] = row


def _together(found: Iterable[tuple[int, int, float]]) -> float:
    """The signal to noise of (expert, rows, dB): the mean of their noise, each as a share of its own signal, by rows.

    So one that is lost shows, however quiet it is.
    """
    listed = list(found)
    shares = [count * 10 ** (-decibels / 10) for _, count, decibels in listed]
    mean = sum(shares) / sum(count for _, count, _ in listed)
    return -10 * math.log10(mean) if mean else math.inf


def floor_of(how: GemmScheme) -> float:
    """The floor in dB of a GEMM's product against the high-precision one, by its operands' elements."""
    if how.format is None:
        return _FLOORS[E4M3]  # fp8_row
    elements = [get_format(side.format).element for side in (how.format.lhs, how.format.rhs)]
    return min(_FLOORS.get(element, _OTHER_FLOOR) for element in elements if element is not None)
