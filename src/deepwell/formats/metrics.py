"""The three ways Deepwell compares numbers: bit for bit, no worse than torch, and signal to noise in decibels.

Bitwise is for quantizers, layouts, permutations and checkpoints. No-worse-than is for fused ops and gradients: the
error against fp32 may be twice that of torch at the same dtype. SQNR floors are for low-precision GEMMs. No tolerance
is tied to a magnitude.
"""

import math

import torch
from torch import Tensor

from deepwell.errors import ConfigError

# Room for the rounding of the fp32 reference itself, relative to its largest value.
_REFERENCE_SLACK = 1e-6


def sqnr_db(ref: Tensor, got: Tensor) -> float:
    """10 log10(|ref|^2 / |ref - got|^2), summed in float64; inf where they are equal, NaN where one is not finite."""
    _check_same_shape(ref, got)
    ref64, got64 = ref.detach().double(), got.detach().double()
    noise = float((ref64 - got64).square().sum())
    signal = float(ref64.square().sum())
    if not math.isfinite(noise) or not math.isfinite(signal):
        return math.nan
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf


def assert_bitwise_equal(got: Tensor, ref: Tensor, name: str = "tensor") -> None:
    """Raise AssertionError naming the first coordinate whose bytes differ; dtype and shape must match too."""
    if got.dtype != ref.dtype or got.shape != ref.shape:
        found = f"{got.dtype} {tuple(got.shape)}, reference {ref.dtype} {tuple(ref.shape)}"
        raise AssertionError(f"{name}: got {found}")
    got_bytes, ref_bytes = _bytes_of(got), _bytes_of(ref)
    differs = (got_bytes != ref_bytes).any(-1)
    count = int(differs.sum())
    if count == 0:
        return
    first = int(differs.flatten().nonzero()[0])
    where = tuple(int(i) for i in torch.unravel_index(torch.tensor(first), got.shape)) if got.ndim else ()
    shown = f"got {_hex(got_bytes, first)} ({_value(got, first)})"
    wanted = f"reference {_hex(ref_bytes, first)} ({_value(ref, first)})"
    raise AssertionError(f"{name}: {count} of {differs.numel()} elements differ, first at {where}: {shown}, {wanted}")


def assert_no_worse_than(got: Tensor, torch_same_dtype: Tensor, ref_fp32: Tensor, factor: float = 2) -> None:
    """Raise AssertionError unless the error of `got` against fp32 is at most `factor` times torch's, largest and RMS.

    Infinities and NaN must stand exactly where the reference has them.
    """
    _check_same_shape(ref_fp32, got)
    _check_same_shape(ref_fp32, torch_same_dtype)
    ref64 = ref_fp32.double()
    got64 = got.to(ref64.device).double()
    own64 = torch_same_dtype.to(ref64.device).double()
    finite = ref64.isfinite()
    if not torch.equal(got64[~finite].nan_to_num(nan=0.5), ref64[~finite].nan_to_num(nan=0.5)):
        raise AssertionError("got has other infinities or NaN than the fp32 reference")
    if not bool(got64[finite].isfinite().all()):
        raise AssertionError("got is not finite where the fp32 reference is")
    if not bool(finite.any()):
        return
    slack = _REFERENCE_SLACK * float(ref64[finite].abs().max())
    got_error, own_error = (got64 - ref64)[finite], (own64 - ref64)[finite]
    measures = (("largest", lambda error: error.abs().max()), ("RMS", lambda error: error.square().mean().sqrt()))
    for label, measure in measures:
        error, torch_error = float(measure(got_error)), float(measure(own_error))
        if not error <= factor * torch_error + slack:
            allowed = f"{factor:g} x torch's {torch_error:.3e} + {slack:.1e}"
            raise AssertionError(f"{label} error {error:.3e} is more than {allowed}")


def _check_same_shape(ref: Tensor, got: Tensor) -> None:
    if ref.shape != got.shape:
        raise ConfigError(f"got has shape {tuple(got.shape)}, the reference {tuple(ref.shape)}; they must be equal")


def _bytes_of(tensor: Tensor) -> Tensor:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).reshape(flat.numel(), tensor.element_size())


def _hex(raw: Tensor, index: int) -> str:
    return "0x" + bytes(raw[index].tolist())[::-1].hex()


def _value(tensor: Tensor, index: int) -> str:
    """The element as a number where torch can read its dtype."""
    if tensor.dtype == torch.float4_e2m1fn_x2:
        return "packed"
    element = tensor.detach().cpu().contiguous().reshape(-1)[index]
    return f"{element.float().item():g}" if element.is_floating_point() else str(element.item())
