"""CutlassKernel, CutlassConfig and MicroscaleManager: CUTLASS products and microscaled tensors without an engine.

The same kernels that the registry chooses from. Where the library that `deepwell build` makes is there, a
product runs in it; else the registry's best stands in, and on a CPU the format is emulated exactly. `kernel.reason`
says which and why.
"""

# Shapes: M rows of the result, N columns, K contraction, B blocks of 32 along it.

import math
import re
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from deepwell.errors import ConfigError, UnsupportedError
from deepwell.formats.quantize import quantize
from deepwell.formats.spec import get_format
from deepwell.formats.tensor import QuantizedTensor
from deepwell.kernels.checks import check_vector
from deepwell.kernels.cutlass.library import ACTIVATIONS, Epilogue, gemm_block_scaled, library_for
from deepwell.precision.gemm_format import precision as parse_precision

_MX_BLOCK = 32
_NV_BLOCK = 16
# How the library names its configurations: tile, cluster, schedule.
_TILE = re.compile(r"\d+x\d+x\d+_\d+x\d+_\w+")
_BLACKWELL = (10, 0)
_FP8, _E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu


@dataclass(frozen=True, slots=True, kw_only=True)
class CutlassConfig:
    """What a kernel may use. `tile` names a configuration of the library; None takes the first of its family."""

    use_tcgen05: bool = True  # Blackwell's block-scaled tensor cores; False keeps to FP8 with a scale per row
    tmem_residency: bool = True  # sums stay in tensor memory; tcgen05 has no other way
    microscale_block_size: int | None = None  # numbers under one scale; None is the format's own
    tile: str | None = None

    def __post_init__(self) -> None:
        for name in ("use_tcgen05", "tmem_residency"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it takes True or False")
        if self.microscale_block_size not in (None, _NV_BLOCK, _MX_BLOCK):
            raise ConfigError(
                f"microscale_block_size is {self.microscale_block_size!r}; MX formats have 32, NVFP4 has 16"
            )
        if self.tile is not None and not (isinstance(self.tile, str) and _TILE.fullmatch(self.tile)):
            raise ConfigError(
                f"tile is {self.tile!r}; it is the name of a configuration, such as 128x128x128_1x1_1sm: "
                "str(deepwell.kernels.cutlass.library.library_for()) lists them, None takes the first"
            )
        if self.use_tcgen05 and not self.tmem_residency:
            raise ConfigError("tmem_residency is False and use_tcgen05 True; tcgen05 adds up in tensor memory only")


class CutlassKernel:
    """One product of a fixed shape and format: `initialize`, then `gemm` as often as wanted."""

    def __init__(self, config: CutlassConfig | None = None) -> None:
        if config is not None and not isinstance(config, CutlassConfig):
            raise ConfigError(f"config is a {type(config).__name__}; pass a CutlassConfig")
        self.config = config or CutlassConfig()
        self.shape: tuple[int, int, int] | None = None
        self.precision = ""
        self.use_microscaling = True
        self.binding = ""  # "native", "substitute" or "emulated", known after the first product
        self.reason = ""

    def initialize(
        self, m: int, n: int, k: int, precision: str = "mxfp8", use_microscaling: bool = True
    ) -> "CutlassKernel":
        """Fix the shape of a [M, K] @ b [K, N] and the format. Without microscaling, 8-bit formats are FP8 by rows."""
        for name, value in (("m", m), ("n", n), ("k", k)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} is {value!r}; it must be a whole number of at least 1")
        if not isinstance(use_microscaling, bool):
            raise ConfigError(f"use_microscaling is {use_microscaling!r}; it takes True or False")
        fmt = parse_precision(precision).format
        block = _MX_BLOCK if fmt.startswith("mx") else _NV_BLOCK if fmt == "nvfp4" else None
        if use_microscaling and block and self.config.microscale_block_size not in (None, block):
            raise ConfigError(
                f"microscale_block_size is {self.config.microscale_block_size}; {fmt} has blocks of {block}"
            )
        if not use_microscaling and fmt not in ("bf16", "fp16", "fp32", "fp8", "mxfp8"):
            raise ConfigError(f"use_microscaling is False; {fmt} has no scales but those of its blocks")
        self.shape, self.use_microscaling = (m, n, k), use_microscaling
        self.precision = fmt if use_microscaling or fmt != "mxfp8" else "fp8"
        self.binding = self.reason = ""
        return self

    def gemm(
        self,
        a: Tensor,
        b: Tensor,
        a_scales: Tensor | None = None,
        b_scales: Tensor | None = None,
        *,
        bias: Tensor | None = None,
        activation: str | None = None,
    ) -> Tensor:
        """`act(a @ b + bias)`: of numbers, a [M, K] and b [K, N], in their dtype. `bias` has N numbers.

        Of MXFP8 values with their scales (`MicroscaleManager.quantize_mxfp8`), both along the contraction, a [M, K] and
        b [N, K], in bf16. `activation` is gelu (erf), gelu_tanh, silu, relu or None. Raises ConfigError on what does
        not fit, also before `initialize`.
        """
        if self.shape is None:
            raise ConfigError("the kernel has no shape yet; call initialize(m, n, k, precision) first")
        if a_scales is None and b_scales is None:
            self._check(a, b.T if isinstance(b, Tensor) and b.dim() == 2 else b)
            _check_epilogue(bias, activation, self.shape[1], a)
            return self._numbers(a, b, bias, activation)
        if a_scales is None or b_scales is None:
            missing = "a_scales" if a_scales is None else "b_scales"
            raise ConfigError(f"{missing} is missing; values mean nothing without their scales: pass both or neither")
        if self.precision != "mxfp8":
            raise ConfigError(f"the kernel was initialized for {self.precision}; values with scales are mxfp8")
        self._check(a, b)
        left, right = _quantized(a, a_scales, "a", "a_scales"), _quantized(b, b_scales, "b", "b_scales")
        _check_epilogue(bias, activation, self.shape[1], a)
        return self._codes(left, right, bias, activation)

    def _check(self, a: Tensor, b_NK: Tensor) -> None:
        assert self.shape is not None
        m, n, k = self.shape
        for name, x, shape in (("a", a, (m, k)), ("b", b_NK, (n, k))):
            if not isinstance(x, Tensor) or tuple(x.shape) != shape:
                got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
                raise ConfigError(f"{name} does not fit M={m}, N={n}, K={k} of initialize: its rows are {got}")
            if x.dtype == _FP8 and self.precision == "mxfp8":
                continue
            if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
                raise ConfigError(
                    f"{name} has dtype {x.dtype}; pass numbers, or MXFP8 values with a_scales and b_scales"
                )

    def _numbers(self, a: Tensor, b: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
        if _FP8 in (a.dtype, b.dtype):
            raise ConfigError("a or b holds FP8 values without scales; pass a_scales and b_scales")
        if self.precision in ("mxfp8", "nvfp4") and self._native(a):
            how = parse_precision(self.precision).gemm("fwd")
            left, right = quantize(a, how.lhs.format), quantize(b.T.contiguous(), how.rhs.format)
            return self._codes(left, right, bias, activation).to(a.dtype)
        from deepwell.kernels.gemm.dispatch import gemm
        from deepwell.kernels.registry import default_registry

        self._bind(a)
        product = partial(gemm, default_registry(), a, b, precision=self.precision, bias=bias)
        if activation == "gelu_tanh":  # the registry's kernels do not have it in their epilogues
            return F.gelu(product(out_dtype=torch.float32), approximate="tanh").to(a.dtype)
        return product(activation=None if activation == "none" else activation)

    def _codes(
        self, left: QuantizedTensor, right: QuantizedTensor, bias: Tensor | None, activation: str | None
    ) -> Tensor:
        if self._native(left.data):
            alpha: Tensor | float = 1.0
            if left.global_scale is not None and right.global_scale is not None:
                alpha = (left.global_scale * right.global_scale).float().reshape(())
            epilogue = Epilogue(
                bias=None if bias is None else bias.to(torch.bfloat16), activation=activation, alpha=alpha
            )
            self.binding, self.reason = "native", "block-scaled tensor cores through CUTLASS"
            return gemm_block_scaled(
                left.data_for_gemm(),
                left.scale_swizzled(),
                right.data_for_gemm(),
                right.scale_swizzled(),
                epilogue=epilogue,
                config=self.config.tile,
            )
        from deepwell.kernels.gemm.triton_fp8 import activate_ref

        self._bind(left.data, emulated=True)
        c_MN = left.dequantize() @ right.dequantize().T
        if bias is not None:
            c_MN = c_MN + bias.float()
        if activation == "gelu_tanh":
            return F.gelu(c_MN, approximate="tanh").to(torch.bfloat16)
        return activate_ref(c_MN, None if activation == "none" else activation).to(torch.bfloat16)

    def _native(self, a: Tensor) -> bool:
        """Whether Blackwell's block-scaled kernels are built for a's device and wanted."""
        if not a.is_cuda or not self.config.use_tcgen05 or torch.cuda.get_device_capability(a.device) < _BLACKWELL:
            return False
        try:
            return self.precision in library_for(a.device).configs
        except UnsupportedError:
            return False

    def _bind(self, a: Tensor, *, emulated: bool = False) -> None:
        """Say how a product that is not native runs, and why."""
        if self.precision in ("bf16", "fp16", "fp32"):
            self.binding, self.reason = "native", f"{self.precision} through torch"
        elif emulated or not a.is_cuda or self.precision not in ("fp8", "mxfp8"):
            self.binding = "emulated"
            self.reason = f"{a.device.type} runs {self.precision} exactly: operands rounded, product in fp32"
        else:
            self.binding = "native" if self.precision == "fp8" else "substitute"
            try:
                library_for(a.device)
                self.reason = "FP8 with a scale per row; the CUTLASS kernels compete with the others"
            except UnsupportedError as error:
                self.reason = f"FP8 with a scale per row, without CUTLASS: {error}"
        if self.config.tile is not None:
            self.reason += f"; tile {self.config.tile} is for block-scaled kernels and not used"

    def __repr__(self) -> str:
        if self.shape is None:
            return f"CutlassKernel({self.config}, not initialized)"
        bound = f", {self.binding}: {self.reason}" if self.binding else ""
        return f"CutlassKernel({'x'.join(map(str, self.shape))} {self.precision}{bound})"


def _check_epilogue(bias: Tensor | None, activation: str | None, n: int, like: Tensor) -> None:
    if bias is not None:
        check_vector("bias", bias, n, like)
        if not bias.is_floating_point():
            raise ConfigError(f"bias has dtype {bias.dtype}; pass fp32, bf16 or fp16")
    if activation is not None and (not isinstance(activation, str) or activation not in ACTIVATIONS):
        names = ", ".join(name for name in ACTIVATIONS if name)
        raise ConfigError(f"activation is {activation!r}; it takes {names} or None")


def _quantized(codes: Tensor, scales: Tensor, name: str, scales_name: str) -> QuantizedTensor:
    """MXFP8 values and scales as one QuantizedTensor."""
    if codes.dtype != _FP8:
        raise ConfigError(f"{name} has dtype {codes.dtype}; with scales it must be {_FP8}")
    _check_scales(scales_name, scales, [(codes.shape[0], -(-codes.shape[1] // _MX_BLOCK))], codes)
    return QuantizedTensor(
        data=codes,
        scales=scales,
        global_scale=None,
        format=get_format("mxfp8"),
        axis=1,
        shape=tuple(codes.shape),
        dtype=torch.float32,
    )


def _check_scales(name: str, scales: Tensor, shapes: list[tuple[int, ...]], codes: Tensor) -> None:
    """Raise ConfigError unless these are E8M0 scales of one of the shapes, beside their values."""
    wanted = f"{_E8M0} {shapes[0]} on {codes.device}"
    if not isinstance(scales, Tensor):
        raise ConfigError(f"{name} is a {type(scales).__name__}; it must be {wanted}")
    if scales.dtype != _E8M0 or tuple(scales.shape) not in shapes or scales.device != codes.device:
        raise ConfigError(f"{name} is {scales.dtype} {tuple(scales.shape)} on {scales.device}; it must be {wanted}")


class MicroscaleManager:
    """MXFP8 tensors as two plain ones: E4M3 values and E8M0 scales, a scale per 32 along the last dimension."""

    @staticmethod
    def quantize_mxfp8(x: Tensor, block_size: int = _MX_BLOCK) -> tuple[Tensor, Tensor]:
        """(values like x, scales [..., B]): bit for bit `deepwell.quantize(x, "mxfp8")`, on any device."""
        _check_block(block_size)
        made = quantize(x, "mxfp8")
        assert made.scales is not None
        return made.data, made.scales

    @staticmethod
    def dequantize_mxfp8(
        codes: Tensor, scales: Tensor, block_size: int = _MX_BLOCK, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """The numbers that values and scales stand for, as `quantize_mxfp8` made them."""
        _check_block(block_size)
        if not isinstance(codes, Tensor) or codes.dtype != _FP8 or codes.dim() == 0:
            got = codes.dtype if isinstance(codes, Tensor) else type(codes).__name__
            raise ConfigError(f"codes is {got}; pass the {_FP8} tensor that quantize_mxfp8 returned")
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ConfigError(f"dtype is {dtype!r}; pass torch.float32, torch.bfloat16 or torch.float16")
        *leading, k = codes.shape
        rows, blocks = math.prod(leading), -(-k // _MX_BLOCK)
        _check_scales("scales", scales, [(*leading, blocks), (rows, blocks)], codes)
        if not codes.numel():
            return torch.empty(codes.shape, dtype=dtype, device=codes.device)
        raw = scales.view(torch.uint8).reshape(rows, blocks).view(_E8M0)
        return _quantized(codes.reshape(rows, k), raw, "codes", "scales").dequantize(dtype).view(codes.shape)


def _check_block(block_size: int) -> None:
    if block_size != _MX_BLOCK:
        raise ConfigError(f"block_size is {block_size!r}; MXFP8 has one scale per {_MX_BLOCK} numbers")
