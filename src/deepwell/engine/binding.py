"""From the policy's formats to what this device runs: native, substitute or emulated, each with its reason.

A policy names formats; the device decides how. Nothing degrades silently: every GEMM gets a `Binding` that the
report shows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from deepwell.errors import UnsupportedError
from deepwell.graph.ir import IR, Site
from deepwell.graph.ops import GroupedLinear, Linear
from deepwell.hardware.capability import canonical_format, capability_of, fp8_row_results
from deepwell.kernels.gemm.fp8 import ALIGNMENT
from deepwell.kernels.quantize.fp8_blocks import BLOCK
from deepwell.kernels.tune.gain import Gain
from deepwell.precision.gemm_format import GEMMS
from deepwell.precision.resolve import Decision, Resolution

# FP8 tensor cores: Ada, Hopper and later.
_FP8_CAPABILITY = (8, 9)
_FP8_FORMATS = ("fp8", "mxfp8")
# The name under which a device says why it has no grouped FP8 products for experts.
GROUPED_FP8 = "grouped_fp8"
# Schemes of FP8 by other scales than rows; a device says under the second's name why it has none.
FP8_TENSOR, FP8_1X128 = "fp8_tensor", "fp8_1x128"
# What a product runs as that was not met and whose dtype nobody knows.
AS_WRITTEN = "as written"
# Formats with kernels for block-scaled tensor cores.
_BLOCK_SCALED = ("mxfp8", "nvfp4")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What binding needs to know of a device: its kind and, for a GPU, its compute capability."""

    kind: str  # "cuda" or "cpu"
    capability: tuple[int, int] = (0, 0)
    # (format, reason) of block-scaled formats, of grouped FP8 and of FP8 by 1x128, whose kernels did not pass their
    # self-check on this device.
    unproven: tuple[tuple[str, str], ...] = ()

    @property
    def has_fp8(self) -> bool:
        return self.kind == "cuda" and self.capability >= _FP8_CAPABILITY

    def has_block_scaled(self, name: str) -> bool:
        """Whether the tensor cores multiply the format as it is stored; the kernels must prove themselves as well."""
        return self.kind == "cuda" and name in _BLOCK_SCALED and name in capability_of(self.capability).native_formats

    def __str__(self) -> str:
        return self.kind if self.kind != "cuda" else f"sm_{self.capability[0]}{self.capability[1]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """How one GEMM of one linear runs. `op` is its path inside its layer; `layer` is None outside the layers."""

    path: str
    op: str
    layer: int | None
    gemm: str
    format: str
    binding: str  # "native", "substitute", "emulated"
    scheme: str
    reason: str
    # Of the product in the compiled graphs, merged linears as one; known where a report was asked to measure.
    shape: str = ""  # MxNxK
    us: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """All bindings of a model, and the schemes of the layers that leave high precision."""

    bindings: tuple[Binding, ...]
    schemes: Mapping[str, str]
    notes: tuple[str, ...] = ()


def bind(ir: IR, resolution: Resolution, device: Target, *, fallback: str = "safe") -> Bound:
    """Bind every linear. `fallback="strict"` raises UnsupportedError where a format cannot be had as asked."""
    bindings: list[Binding] = []
    schemes: dict[str, str] = {}
    for site in ir.sites():
        if site.path not in resolution:
            continue
        row = resolution[site.path]
        parts = [_head_in_bf16(site, _bind_gemm(site, row[gemm], device), ir.dtype, device) for gemm in GEMMS]
        for part in parts:
            if fallback == "strict" and part.binding != "native":
                raise UnsupportedError(f"{site.path} {part.gemm}: {part.format} is {part.binding} here: {part.reason}")
        bindings += parts
        scheme = "|".join(part.scheme for part in parts)
        if scheme != "bf16|bf16|bf16":
            schemes[site.path] = scheme
    return Bound(bindings=tuple(bindings), schemes=schemes)


def _head_in_bf16(site: Site, part: Binding, dtype: str, device: Target) -> Binding:
    """A head's GEMM, with a word where its results are coarser than the model: its loss reads them as they are."""
    is_rows = part.scheme == "fp8_row" and part.gemm != "wgrad"  # dW has one scale per tensor
    if site.op.role != "head" or not is_rows or canonical_format(dtype) in fp8_row_results(device.capability):
        return part
    return replace(part, reason=f"{part.reason}; written in bf16: {device} has no {dtype} products with row scales")


def with_gains(bindings: Sequence[Binding], gains: Mapping[str, Gain]) -> tuple[Binding, ...]:
    """Bindings with what was measured when the model ran: FP8 that would not be faster stayed in bf16."""
    rows = []
    for row in bindings:
        gain = gains.get(row.path)
        if gain is None or not (row.scheme.startswith("fp8_") or row.scheme == GROUPED_FP8):
            rows.append(row)
        elif gain.gains:
            rows.append(replace(row, reason=f"{row.reason}; {gain.reason}"))
        else:
            rows.append(replace(row, binding="substitute", scheme="bf16", reason=gain.reason))
    return tuple(rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftAlone:
    """A linear with a format that a graph multiplies as the model has it: in which dtype ("": not known), and why."""

    dtype: str
    reason: str
    is_product: bool = False  # that graph does multiply by the weight; False where it may only look at it


def as_model_runs_them(
    bindings: Sequence[Binding], unmet: Mapping[str, LeftAlone], at_times: Mapping[str, LeftAlone] | None = None
) -> tuple[Binding, ...]:
    """Bindings in which these linears, and experts, run as the model has them; those of `at_times` in some graphs."""
    rows = []
    for row in bindings:
        left, elsewhere = unmet.get(row.path), (at_times or {}).get(row.path)
        if row.scheme == "bf16" or (left is None and elsewhere is None):
            rows.append(row)
        elif left is not None:
            reason = f"as the model has it{_in(left.dtype)}: {left.reason}"
            rows.append(replace(row, binding="substitute", scheme=left.dtype or AS_WRITTEN, reason=reason))
        elif elsewhere is not None:
            reason = f"{row.reason}; at times as the model has it{_in(elsewhere.dtype)}: {elsewhere.reason}"
            rows.append(replace(row, reason=reason))
    return tuple(rows)


def further_uses(ir: IR) -> dict[str, str]:
    """By path, products with a weight that another product has as well: the path of the weight, which graphs know."""
    found: dict[str, str] = {}
    for site in ir.sites():
        if isinstance(site.op, Linear) and site.op.params:
            inside = site.op.params[0].name.removesuffix(".weight")
            path = inside if site.layer is None else f"{ir.layers[site.layer].path}.{inside}"
            found |= {site.path: path} if path != site.path else {}
    return found


def _in(dtype: str) -> str:
    return f", in {dtype}" if dtype else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragile:
    """Signal to noise of one GEMM in its scheme against the same product in fp32, and the least it must have, in dB."""

    path: str
    gemm: str
    scheme: str
    sqnr_db: float  # NaN where NaN or infinity came out of finite numbers
    floor_db: float
    of: str = ""  # of experts, which of them this is: the worst

    @property
    def is_fragile(self) -> bool:
        return not self.sqnr_db >= self.floor_db

    @property
    def reason(self) -> str:
        what = f"{self.gemm} of {self.of}" if self.of else self.gemm
        if math.isnan(self.sqnr_db):
            return f"fragile: {what} gives NaN or infinity"
        return f"fragile: {what} {self.sqnr_db:.1f} dB below floor {self.floor_db:g} dB"


def without_fragile(bound: Bound, checked: Iterable[Fragile]) -> Bound:
    """Bindings that keep in bf16 what was found fragile in the very scheme that it is bound to."""
    found = {(row.path, row.gemm, row.scheme): row for row in checked if row.is_fragile}
    rows = []
    for row in bound.bindings:
        spoilt = found.get((row.path, row.gemm, row.scheme))
        kept = row if spoilt is None else replace(row, binding="substitute", scheme="bf16", reason=spoilt.reason)
        rows.append(kept)
    parts: dict[str, list[str]] = {}
    for row in rows:
        parts.setdefault(row.path, []).append(row.scheme)
    schemes = {path: "|".join(parts[path]) for path in bound.schemes}
    kept_schemes = {path: scheme for path, scheme in schemes.items() if set(scheme.split("|")) != {"bf16"}}
    return replace(bound, bindings=tuple(rows), schemes=kept_schemes)


def _bind_gemm(site: Site, decision: Decision, device: Target) -> Binding:
    def bound(binding: str, scheme: str, reason: str) -> Binding:
        return Binding(
            path=site.path,
            op=site.op.name,
            layer=site.layer,
            gemm=decision.gemm,
            format=decision.format,
            binding=binding,
            scheme=scheme,
            reason=reason,
        )

    if not decision.precision.is_low:
        return bound("native", "bf16", ", ".join(filter(None, (decision.rule, decision.reason))))
    options = "".join(f",{name}={value}" for name, value in decision.precision.options)
    if isinstance(site.op, GroupedLinear) and device.has_fp8 and decision.format in _FP8_FORMATS:
        return bound(*_grouped_fp8(site.op, decision, device))
    unproven = ""
    if device.has_block_scaled(decision.format) and isinstance(site.op, Linear):
        failed = dict(device.unproven).get(decision.format)
        if failed is None:
            return bound("native", f"{decision.format}_native{options}", f"{device}: block-scaled tensor cores")
        unproven = f"; no native {decision.format} kernel passed its self-check here ({failed})"
    if device.has_fp8 and decision.format in _FP8_FORMATS and isinstance(site.op, Linear):
        binding, scheme, reason = _fp8(site.op, decision, device)
        return bound(binding, scheme, reason + unproven)
    lacks = unproven.removeprefix("; ") or f"{device} has no {decision.format} tensor cores"
    reason = f"{lacks}: operands rounded exactly, product in fp32"
    return bound("emulated", f"emulate:{decision.format}{options}", reason)


def _fp8(op: Linear, decision: Decision, device: Target) -> tuple[str, str, str]:
    """(binding, scheme, reason) of a linear's GEMM on a GPU with FP8 tensor cores: the scaling asked for, or rows."""
    is_fp8 = decision.format == "fp8"
    scaling = decision.precision.option("scaling") if is_fp8 else "row"
    # The gradient is the left operand where there is one. Finer scales than a tensor's have kernels for E4M3 alone.
    is_e5m2 = is_fp8 and "e5m2" in decision.precision.gemm(decision.gemm).lhs.format
    # A policy that says fp8 and no more gets the scales that the engine's kernels write on the way: rows. Who names the
    # gradients' format as well means tensors.
    is_plain = scaling == "tensor" and decision.precision.option("gradients") == "auto"
    if scaling == "tensor" and not is_plain:
        elements, scheme = (
            ("E4M3, gradients in E5M2", f"{FP8_TENSOR},gradients=e5m2") if is_e5m2 else ("E4M3", FP8_TENSOR)
        )
        return "native", scheme, f"{device}: {elements}, one power-of-two scale per tensor{_filled(op, ALIGNMENT)}"
    otherwise = "; gradients in E4M3, not E5M2" if is_e5m2 else ""
    if is_plain:
        otherwise = "; rows, as the policy leaves scales to the device: finer, and written on the way"
    lacks = _why_no_1x128(device) if scaling == "1x128" else ""
    if scaling == "1x128" and not lacks:
        reason = (
            f"{device}: E4M3, a power-of-two scale per 1x128, of weights per 128x128{_filled(op, BLOCK)}{otherwise}"
        )
        return "substitute" if is_e5m2 else "native", FP8_1X128, reason
    reason = (
        f"{device}: E4M3, one power-of-two scale per row, wgrad per tensor{_filled(op, ALIGNMENT)}{otherwise}{lacks}"
    )
    return "native" if is_fp8 and scaling == "row" and not is_e5m2 else "substitute", "fp8_row", reason


def _filled(op: Linear, unit: int) -> str:
    return f"; K={op.k}, N={op.n} padded to multiples of {unit}" if op.k % unit or op.n % unit else ""


def _why_no_1x128(device: Target) -> str:
    """Why a GPU does not multiply 1x128 blocks, "" where it does."""
    if FP8_1X128 not in capability_of(device.capability).native_formats:
        return f"; {device} has no products with 1x128 scales"
    failed = dict(device.unproven).get(FP8_1X128)
    return "" if failed is None else f"; no kernel for 1x128 scales passed its self-check here ({failed})"


def _grouped_fp8(op: GroupedLinear, decision: Decision, device: Target) -> tuple[str, str, str]:
    """(binding, scheme, reason) of a GEMM of experts on a GPU with FP8 tensor cores."""
    failed = dict(device.unproven).get(GROUPED_FP8)
    if failed is not None:
        return "substitute", "bf16", f"no grouped FP8 kernel passed its self-check here ({failed}): bf16"
    if op.k % ALIGNMENT or op.n % ALIGNMENT:
        return "substitute", "bf16", f"grouped FP8 takes multiples of {ALIGNMENT}; K={op.k}, N={op.n}: bf16"
    exact = decision.format == "fp8" and decision.precision.option("scaling") == "row"
    reason = f"{device}: E4M3, one power-of-two scale per row, wgrad per expert"
    return "native" if exact else "substitute", GROUPED_FP8, reason
