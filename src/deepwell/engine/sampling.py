"""What the formats of a few layers do to their own operands, measured while a small batch runs eagerly.

The compiled graphs are not touched: a few tokens go through the model as it was written, and each GEMM of the sampled
linears is computed twice, in its scheme and in the model's dtype. Everything stays on the device, nothing waits for it.
Gradients of parameters, random states and buffers are as they were afterwards.

Every figure is a number of which more is worse, and none is NaN, so that the largest over all ranks can be taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from deepwell.engine.grouped_calls import GroupedCall, GroupedCalls
from deepwell.formats.quantize import quantize
from deepwell.formats.spec import ElementFormat, Format, get_format
from deepwell.kernels.experts.autograd import grouped_linear
from deepwell.kernels.experts.spelled_out import spelled_out
from deepwell.kernels.gemm.linear import low_precision_linear
from deepwell.kernels.gemm.schemes import STEPS, GemmScheme, parse_scheme

# seen: 1 where the GEMM ran. low: NaN or infinity came out of finite numbers. own: the model's dtype has them too.
# noise: its power over the signal's. saturated, underflow: shares of the worse operand's elements. dead: the product is
# zero throughout. power: of the noise itself.
FIGURES = ("seen", "low", "own", "noise", "saturated", "underflow", "dead", "power")
_AS_WRITTEN = "bf16|bf16|bf16"
_ROWS = 128  # of an operand, for shares of its elements
_MIN_ROWS = 16  # by which one expert can be judged
# Operands of schemes that carry no formats of their own.
_FP8_ROWS, _FP8_TENSOR = "fp8_e4m3_row_pow2", "fp8_e4m3_tensor_pow2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The GEMMs that were asked about, and their figures, one row each, on the device."""

    rows: tuple[tuple[str, str], ...]  # (path, gemm)
    figures: Tensor  # [len(rows), len(FIGURES)] fp32
    loads: Mapping[str, Tensor] = field(default_factory=dict)  # rows of each expert, by the path of its experts


def rows_of(schemes: Mapping[str, str], paths: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """The GEMMs of these layers that leave high precision, in order."""
    return tuple(
        (path, gemm)
        for path in paths
        if path in schemes
        for gemm in STEPS
        if getattr(parse_scheme(schemes[path]), gemm).method != "bf16"
    )


def take_sample(
    model: nn.Module,
    schemes: Mapping[str, str],
    paths: Sequence[str],
    forward: Callable[[], Tensor],
    *,
    number: int = 0,
    loads_of: Sequence[str] = (),
) -> Sample:
    """Run `forward`, which gives a loss, eagerly, and measure the GEMMs of `paths`. `number` varies the rows looked at.

    The loss may be None or without gradient: then only forward GEMMs are seen. `loads_of` are paths of experts' weights
    whose rows are counted.
    """
    device = next(model.parameters()).device
    probe = _GemmSampler(schemes, number)
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters(remove_duplicate=False))
    experts = {path: parameters[path] for path in loads_of if path in parameters and parameters[path].dim() == 3}
    probe.asked = set(paths)
    handles = []
    for path in paths:
        weight = parameters.get(path, parameters.get(f"{path}.weight"))
        if path not in schemes or weight is None:
            continue
        if weight.dim() == 3:
            experts[path] = weight
        elif path in modules and weight.dim() == 2:
            handles.append(modules[path].register_forward_hook(probe.hook(path)))
    devices = [device] if device.type == "cuda" else []
    try:
        with (
            torch.enable_grad(),
            torch.random.fork_rng(devices=devices),
            _kept(model),
            GroupedCalls(experts, probe.grouped),
            spelled_out(),
            torch.compiler.set_stance("force_eager"),
        ):
            loss = forward()
            if isinstance(loss, Tensor) and loss.requires_grad and probe.targets:
                torch.autograd.grad(loss, list(probe.targets.values()), allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    rows = rows_of(schemes, paths)
    nothing = torch.zeros(len(FIGURES), device=device)
    figures = [probe.figures.get(row, nothing) for row in rows]
    made = torch.stack(figures) if figures else torch.zeros(0, len(FIGURES), device=device)
    return Sample(rows=rows, figures=made, loads=probe.loads)


@contextmanager
def _kept(model: nn.Module) -> Iterator[None]:
    """Buffers that a forward counts in are put back."""
    before = [(buffer, buffer._version, buffer.detach().clone()) for buffer in model.buffers()]
    yield
    with torch.no_grad():
        for buffer, version, value in before:
            if buffer._version != version:
                buffer.copy_(value)


class _GemmSampler:
    """Collects the figures of each GEMM while the model runs. What runs twice is judged by the worse."""

    def __init__(self, schemes: Mapping[str, str], number: int) -> None:
        self.schemes, self.number = schemes, number
        self.asked: set[str] = set()
        self.loads: dict[str, Tensor] = {}
        self.figures: dict[tuple[str, str], Tensor] = {}
        self.targets: dict[str, Tensor] = {}  # what gradients are asked of, so that those of outputs are made

    def hook(self, path: str) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        scheme = self.schemes[path]

        def after(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            weight = module.weight
            assert isinstance(weight, Tensor)
            # Conv1D keeps its weight [K, N].
            w_NK = weight.detach() if isinstance(module, nn.Linear) else weight.detach().T
            x_TK = inputs[0].detach().reshape(-1, inputs[0].shape[-1]).to(w_NK.dtype)
            if not x_TK.numel():
                return
            with torch.no_grad():
                y_TN = low_precision_linear(x_TK, [w_NK], None, scheme)
                self._add(path, "fwd", x_TK @ w_NK.T, y_TN, (x_TK, w_NK))
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(lambda dy: self._backward(path, x_TK, w_NK, dy))
                self.targets[path] = output
            elif weight.requires_grad and path not in self.targets:
                self.targets[path] = weight  # a layer that is computed again: its output comes in the backward

        return after

    def _backward(self, path: str, x_TK: Tensor, w_NK: Tensor, dy: Tensor) -> None:
        dy_TN = dy.detach().reshape(-1, dy.shape[-1]).to(w_NK.dtype)
        with torch.enable_grad():
            x_leaf, w_leaf = x_TK.detach().requires_grad_(), w_NK.detach().requires_grad_()
            y_TN = low_precision_linear(x_leaf, [w_leaf], None, self.schemes[path])
            dx_TK, dw_NK = torch.autograd.grad(y_TN, (x_leaf, w_leaf), dy_TN)
        self._add(path, "dgrad", dy_TN @ w_NK, dx_TK, (dy_TN, w_NK.T))
        self._add(path, "wgrad", dy_TN.T @ x_TK, dw_NK, (dy_TN.T, x_TK.T))

    # ---- experts ----

    def grouped(self, call: GroupedCall, y_SN: Tensor) -> None:
        # Both GEMMs of a layer's experts have the same rows.
        ends = call.offs.detach().long()
        self.loads.setdefault(call.path.rpartition(".")[0], torch.diff(ends, prepend=ends.new_zeros(1)))
        if call.path not in self.asked:
            return
        x_SK, weight = call.x_SK.detach(), call.weight.detach()
        scheme = self.schemes[call.path]
        with torch.no_grad():
            made = grouped_linear(x_SK, weight, call.offs, call.is_kn, scheme)
            wanted = grouped_linear(x_SK, weight, call.offs, call.is_kn, _AS_WRITTEN)
            self._add(call.path, "fwd", wanted, made, (x_SK, _rows_NK(weight, call.is_kn)), call.offs)
        if y_SN.requires_grad:
            y_SN.register_hook(lambda dy: self._grouped_backward(call, x_SK, weight, dy.detach().flatten(0, -2)))
            self.targets[call.path] = y_SN

    def _grouped_backward(self, call: GroupedCall, x_SK: Tensor, weight: Tensor, dy_SN: Tensor) -> None:
        grads = []
        for scheme in (_AS_WRITTEN, self.schemes[call.path]):
            with torch.enable_grad():
                x_leaf, w_leaf = x_SK.detach().requires_grad_(), weight.detach().requires_grad_()
                y_SN = grouped_linear(x_leaf, w_leaf, call.offs, call.is_kn, scheme)
                grads.append(torch.autograd.grad(y_SN, (x_leaf, w_leaf), dy_SN))
        (dx, dw), (low_dx, low_dw) = grads
        self._add(call.path, "dgrad", dx, low_dx, (dy_SN, _rows_NK(weight, not call.is_kn)), call.offs)
        self._add(call.path, "wgrad", dw, low_dw, (dy_SN.T, x_SK.T), call.offs)

    # ---- figures ----

    def _add(
        self,
        path: str,
        gemm: str,
        wanted: Tensor,
        got: Tensor,
        operands: tuple[Tensor, Tensor],
        offs: Tensor | None = None,
    ) -> None:
        how: GemmScheme = getattr(parse_scheme(self.schemes[path]), gemm)
        if how.method == "bf16":
            return
        with torch.no_grad():
            figures = self._figures(how, gemm, wanted, got, operands, offs)
            known = self.figures.get((path, gemm))
            self.figures[path, gemm] = figures if known is None else torch.maximum(known, figures)

    def _figures(
        self,
        how: GemmScheme,
        gemm: str,
        wanted: Tensor,
        got: Tensor,
        operands: tuple[Tensor, Tensor],
        offs: Tensor | None,
    ) -> Tensor:
        own = ~(wanted.isfinite().all() & operands[0].isfinite().all() & operands[1].isfinite().all())
        low = ~got.isfinite().all() & ~own
        # Under the largest magnitude: sums of squares stay in fp32's range.
        top = wanted.nan_to_num(0.0, 0.0, 0.0).abs().amax().float()
        unit = torch.where(top > 0, top, 1.0)
        ref = wanted.float() / unit
        error = ref - got.float() / unit
        ratio = _ratio(ref, error, gemm, offs)
        shares = [_shares(self._part(t), f, _amax(t, f)) for t, f in zip(operands, _formats(how, gemm), strict=True)]
        saturated, underflow = (torch.maximum(a, b) for a, b in zip(*shares, strict=True))
        power = error.square().sum() * unit.square()
        parts = [torch.ones_like(top), low, own, ratio, saturated, underflow, top == 0, power]
        return torch.stack([part.float() for part in parts]).nan_to_num(0.0, 3e38, 0.0)

    def _part(self, operand: Tensor) -> Tensor:
        """Some rows of an operand, others for each sample."""
        rows = operand.shape[0]
        begin = (self.number * _ROWS) % rows if rows > _ROWS else 0
        return operand[begin : begin + _ROWS]


def _rows_NK(weight: Tensor, is_kn: bool) -> Tensor:
    """The weights of all experts below one another, contraction last."""
    stacked = weight.transpose(1, 2) if is_kn else weight
    return stacked.reshape(-1, stacked.shape[-1])


def _ratio(ref: Tensor, error: Tensor, gemm: str, offs: Tensor | None) -> Tensor:
    """Noise over signal; of experts with enough rows the worst one's."""
    signal, noise = ref.square(), error.square()
    whole = _over(noise.sum(), signal.sum())
    if offs is None:
        return whole
    ends = offs.to(ref.device).long()
    count = torch.diff(ends, prepend=ends.new_zeros(1))
    if gemm == "wgrad":
        each = _over(noise.sum((1, 2)), signal.sum((1, 2)))
    else:
        rows = torch.arange(ref.shape[0], device=ref.device)
        owner = torch.searchsorted(ends, rows, right=True).clamp(max=len(ends) - 1)
        sums = torch.zeros(2, len(ends), device=ref.device)
        live = rows < ends[-1]
        for total, values in zip(sums, (noise, signal), strict=True):
            total.index_add_(0, owner, torch.where(live, values.sum(-1), 0.0))
        each = _over(*sums)
    judged = count >= _MIN_ROWS
    return torch.where(judged.any(), torch.where(judged, each, 0.0).amax(), whole)


def _over(noise: Tensor, signal: Tensor) -> Tensor:
    """noise / signal; 1 where there is noise and no signal, 0 where there is neither."""
    return torch.where(signal > 0, noise / torch.where(signal > 0, signal, 1.0), (noise > 0).float())


def _formats(how: GemmScheme, gemm: str) -> tuple[Format, Format]:
    if how.format is not None:
        return get_format(how.format.lhs.format), get_format(how.format.rhs.format)
    name = get_format(_FP8_TENSOR if gemm == "wgrad" else _FP8_ROWS)
    return name, name


def _amax(operand: Tensor, fmt: Format) -> Tensor | None:
    """The largest magnitude of the whole operand, where its scale is of that."""
    return operand.abs().amax().float() if fmt.scaling == "tensor" or fmt.has_global_scale else None


def _shares(rows: Tensor, fmt: Format, amax: Tensor | None) -> tuple[Tensor, Tensor]:
    """(share of elements beyond the largest code, share of nonzero ones that become zero) of an operand."""
    if not fmt.is_scaled:
        zero = torch.zeros((), device=rows.device)
        return zero, zero
    x = rows.contiguous()
    found = quantize(x, fmt, amax=amax)
    kept, size = found.dequantize().abs(), x.float().abs()
    element = fmt.element
    half_step = 2.0 ** (element.max_exponent - element.mantissa_bits - 1) / element.max
    at_top = (found.codes() & (2 ** (element.bits - 1) - 1)) == _top_code(element)
    beyond = at_top & (kept > 0) & (size > kept * (1 + half_step))
    lost = (size > 0) & (kept == 0)
    return beyond.float().mean(), lost.sum() / (size > 0).sum().clamp(min=1)


def _top_code(element: ElementFormat) -> int:
    """The code of the largest number, without its sign."""
    codes = 2 ** (element.bits - 1)
    if element.has_inf:
        return codes - 2**element.mantissa_bits - 1
    return codes - (2 if element.has_nan else 1)
