"""Weights in the formats that the engine's forward multiplies: values and scales, and the few numbers kept beside them.

A loaded engine quantizes its weights again, so what is read back must quantize to the very numbers that were written:

    codes, scales  ->  w' = dequantized, in the weight's dtype  ->  quantize(w') = quantize(w), bit for bit

That holds by itself where scales are powers of two. NVFP4's scale of the tensor comes from its largest number, and a
block whose scale is tiny can lose it in a second rounding: there the numbers themselves are kept beside the codes,
until a second quantization gives the first one's values. Where that would take many, the weight is stored whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepwell.formats.blocks import group, ungroup
from deepwell.formats.elements import STORAGE_DTYPES
from deepwell.formats.quantize import quantize
from deepwell.formats.spec import E2M1, Format, get_format
from deepwell.formats.tensor import QuantizedTensor

# At most one number in so many is kept beside the codes: they take 4 + 2 bytes, codes of NVFP4 half a byte.
_KEPT_SHARE = 64
_ROUNDS = 4
_SCALE_DTYPES = {"fp32": torch.float32, "pow2": torch.float32, "e8m0": torch.uint8, "e4m3": torch.float8_e4m3fn}


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How a weight is stored: its format, the axis that the product contracts, and whether each expert has its own."""

    format: str
    axis: int
    by_expert: bool = False

    @property
    def facts(self) -> Format:
        return get_format(self.format)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packed:
    """A weight's codes and scales as they go to the file, and the weight that they give when they are read."""

    form: Form
    parts: dict[str, Tensor]
    restored: Tensor


def pack(weights: Sequence[Tensor], form: Form) -> list[Packed] | None:
    """Pack weights that are quantized under one scale where the format has one; None where they must stay whole."""
    originals = [_experts(weight.detach(), form) for weight in weights]
    first = _quantized(originals, form)
    values = [_values(made) for made in first]
    starts = [value.to(w.dtype).contiguous() for value, w in zip(values, originals, strict=True)]
    restored = [start.clone() for start in starts]
    if form.facts.has_global_scale:
        for back, weight in zip(restored, originals, strict=True):
            _keep_largest(back, weight)
    for _ in range(_ROUNDS):
        again = [_values(made) for made in _quantized(restored, form)]
        wrong = [_differ(a, b) for a, b in zip(again, values, strict=True)]
        if not any(bool(mask.any()) for mask in wrong):
            break
        for back, weight, mask in zip(restored, originals, wrong, strict=True):
            back.copy_(torch.where(_whole_groups(mask, form), weight, back))
    else:
        return None
    packed = []
    for made, back, start in zip(first, restored, starts, strict=True):
        kept = _differ(back, start).reshape(-1).nonzero().reshape(-1)
        if kept.numel() * _KEPT_SHARE > back.numel():
            return None
        parts = _parts(made, form)
        if kept.numel():
            index = torch.int32 if back.numel() < 1 << 31 else torch.int64
            parts |= {"kept_at": kept.to(index), "kept": back.reshape(-1)[kept]}
        packed.append(Packed(form=form, parts=parts, restored=back if form.by_expert else back[0]))
    return packed


def unpack(parts: dict[str, Tensor], form: Form, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The weight that `pack` promised. The parts have been checked by `expected`."""
    weight = torch.empty(shape, dtype=dtype, device=parts["codes"].device)
    made = {name: _experts(part, form) for name, part in parts.items() if "kept" not in name}
    if form.facts.scale == "e8m0":
        made["scales"] = made["scales"].view(torch.float8_e8m0fnu)
    for number, one in enumerate(_experts(weight, form)):
        value = QuantizedTensor(
            data=made["codes"][number],
            scales=made["scales"][number],
            global_scale=made["global_scale"][number] if "global_scale" in made else None,
            format=form.facts,
            axis=form.axis - form.by_expert,
            shape=tuple(one.shape),
            dtype=dtype,
        )
        one.copy_(value.dequantize())
    if "kept" in parts:
        weight.view(-1)[parts["kept_at"].long()] = parts["kept"]
    return weight


def expected(form: Form, shape: tuple[int, ...]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """dtype and shape of each part of a weight of that shape, those kept beside the codes left out."""
    fmt = form.facts
    lead = shape[:1] if form.by_expert else ()
    one = shape[len(lead) :]
    axis = form.axis - len(lead)
    moved = (*one[:axis], *one[axis + 1 :], one[axis])
    length = -(-moved[-1] // 2) if fmt.element == E2M1 else moved[-1]
    found = {"codes": (STORAGE_DTYPES.get(fmt.element.name, torch.uint8), (*lead, *moved[:-1], length))}
    scales = fmt.scale_shape(moved[:-1], moved[-1])
    assert scales is not None and fmt.scale is not None
    found["scales"] = (_SCALE_DTYPES[fmt.scale], (*lead, *scales))
    if fmt.has_global_scale:
        found["global_scale"] = (torch.float32, lead)
    return found


# ---- inside ----


def _experts(tensor: Tensor, form: Form) -> Tensor:
    """A weight as a stack of those of its experts; one that has none is its only one."""
    return tensor if form.by_expert else tensor.unsqueeze(0)


def _quantized(weights: Sequence[Tensor], form: Form) -> list[list[QuantizedTensor]]:
    """Weights that are one product share their scale, where it is one of a tensor."""
    amax = None
    if len(weights) > 1 and form.facts.scaling == "tensor" and not form.by_expert:
        amax = torch.stack([weight.float().abs().amax() for weight in weights]).amax()
    axis = form.axis - form.by_expert
    return [[quantize(one, form.format, axis=axis, amax=amax) for one in weight] for weight in weights]


def _values(made: list[QuantizedTensor]) -> Tensor:
    """The numbers that a product reads, in fp32."""
    return _stack([q.dequantize() for q in made])


def _parts(made: list[QuantizedTensor], form: Form) -> dict[str, Tensor]:
    found = {"codes": [q.data for q in made], "scales": [q.scales for q in made if q.scales is not None]}
    if form.facts.scale == "e8m0":
        found["scales"] = [scales.view(torch.uint8) for scales in found["scales"]]
    if form.facts.has_global_scale:
        found["global_scale"] = [q.global_scale for q in made if q.global_scale is not None]
    return {name: _stack(parts) if form.by_expert else parts[0] for name, parts in found.items()}


def _stack(parts: list[Tensor]) -> Tensor:
    if len(parts) == 1:
        return parts[0].unsqueeze(0)
    bytes_of = [part.contiguous().view(torch.uint8) if part.element_size() == 1 else part for part in parts]
    return torch.stack(bytes_of).view(parts[0].dtype)


def _keep_largest(back: Tensor, weight: Tensor) -> None:
    """Put the largest number back in its place, and nothing above it: the scale of a tensor is made from it."""
    for target, source in zip(back, weight, strict=True):
        if source.numel():
            at = int(source.reshape(-1).abs().argmax())
            largest = source.reshape(-1)[at]
            target.clamp_(-largest.abs(), largest.abs())
            target.view(-1)[at] = largest


def _differ(a: Tensor, b: Tensor) -> Tensor:
    """Where the bits differ: minus zero is not zero here, and NaN equals itself."""
    word = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.contiguous().view(word) != b.contiguous().view(word)


def _whole_groups(mask: Tensor, form: Form) -> Tensor:
    """The mask widened to all elements that share a scale with one of its own."""
    fmt = form.facts
    if fmt.scaling == "tensor":
        return torch.ones_like(mask) if bool(mask.any()) else mask
    axis = form.axis + (not form.by_expert)
    moved = mask.movedim(axis, -1).float().contiguous()
    grouped = group(moved, fmt)
    dims = (-3, -1) if fmt.block is not None and fmt.block[0] > 1 else (-1,)
    wide = grouped.amax(dims, keepdim=True).expand(grouped.shape)
    return ungroup(wide.contiguous(), fmt, tuple(moved.shape)).movedim(-1, axis) > 0
