"""Builds one timed GEMM per format: operands in the layout torch wants, and the call that multiplies them.

C[m, n] = A[m, k] B[k, n] with B given column-major (an [n, k] weight, transposed), as tensor cores read it. Scales are
ones: they cost the same as any others. Layouts follow torch's own checks (aten/src/ATen/native/cuda/ScaledBlas.cpp).
"""

from collections.abc import Callable
from typing import Any

from deepwell.errors import UnsupportedError

Call = Callable[[], object]


def gemm_call(torch: Any, format_name: str, shape: tuple[int, int, int], device: Any) -> Call:
    """A call that runs the GEMM once. Raises `UnsupportedError` where this torch has no way to say it."""
    return _BUILDERS[format_name](torch, *shape, device)


def _plain(dtype_name: str) -> Callable[..., Call]:
    def build(torch: Any, m: int, n: int, k: int, device: Any) -> Call:
        dtype = getattr(torch, dtype_name)
        a = torch.randn(m, k, device=device).to(dtype)
        b = torch.randn(n, k, device=device).to(dtype).t()
        out = torch.empty(m, n, dtype=dtype, device=device)
        return lambda: torch.mm(a, b, out=out)

    return build


def _fp8_tensor(torch: Any, m: int, n: int, k: int, device: Any) -> Call:
    side = (torch.ones(1, device=device), _recipes(torch).TensorWise)
    return _scaled(torch, m, n, k, device, side, side, fast=True)


def _fp8_row(torch: Any, m: int, n: int, k: int, device: Any) -> Call:
    recipe = _recipes(torch).RowWise
    scale_a, scale_b = torch.ones(m, 1, device=device), torch.ones(1, n, device=device)
    return _scaled(torch, m, n, k, device, (scale_a, recipe), (scale_b, recipe), fast=True)


def _fp8_1x128(torch: Any, m: int, n: int, k: int, device: Any) -> Call:
    if n % 128 or k % 128:
        raise UnsupportedError(f"128-blocks need n and k to be multiples of 128, got {n} and {k}")
    recipes = _recipes(torch)
    # Both scales are stored outer dimension first; B's has its K blocks padded to a multiple of four.
    scale_a = torch.ones(k // 128, m, device=device).t()
    scale_b = torch.ones(n // 128, _round_up(k // 128, 4), device=device).t()
    sides = (scale_a, recipes.BlockWise1x128), (scale_b, recipes.BlockWise128x128)
    return _scaled(torch, m, n, k, device, *sides, fast=False)


def _mxfp8(torch: Any, m: int, n: int, k: int, device: Any) -> Call:
    dtype = _attribute(torch, "float8_e8m0fnu")
    swizzle = torch.nn.functional.SwizzleType.SWIZZLE_32_4_4
    recipe = _recipes(torch).BlockWise1x32
    a, b = _fp8(torch, m, k, device), _fp8(torch, n, k, device).t()
    # E8M0 byte 127 is the scale 1.
    scale_a, scale_b = (
        torch.full((_swizzled(rows, k, 32),), 127, dtype=torch.uint8, device=device).view(dtype) for rows in (m, n)
    )
    return lambda: torch.nn.functional.scaled_mm(
        a, b, scale_a, recipe, scale_b, recipe, swizzle, swizzle, output_dtype=torch.bfloat16
    )


def _nvfp4(torch: Any, m: int, n: int, k: int, device: Any) -> Call:
    dtype = _attribute(torch, "float4_e2m1fn_x2")
    kinds = torch.nn.functional.SwizzleType
    swizzles = [kinds.SWIZZLE_32_4_4, kinds.NO_SWIZZLE]
    recipes = [_recipes(torch).BlockWise1x16, _recipes(torch).TensorWise]
    # Every byte is two valid E2M1 numbers, so random bytes are random operands.
    a = torch.randint(0, 256, (m, k // 2), dtype=torch.uint8, device=device).view(dtype)
    b = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=device).view(dtype).t()
    one = torch.ones(1, device=device)
    scale_a, scale_b = (
        [torch.ones(_swizzled(rows, k, 16), device=device).to(torch.float8_e4m3fn), one] for rows in (m, n)
    )
    return lambda: torch.nn.functional.scaled_mm(
        a, b, scale_a, recipes, scale_b, recipes, swizzles, swizzles, output_dtype=torch.bfloat16
    )


def _scaled(torch: Any, m: int, n: int, k: int, device: Any, *sides: tuple[Any, Any], fast: bool) -> Call:
    a, b, scaled_mm = _fp8(torch, m, k, device), _fp8(torch, n, k, device).t(), torch.nn.functional.scaled_mm
    (scale_a, recipe_a), (scale_b, recipe_b) = sides
    return lambda: scaled_mm(
        a, b, scale_a, recipe_a, scale_b, recipe_b, output_dtype=torch.bfloat16, use_fast_accum=fast
    )


def _fp8(torch: Any, rows: int, columns: int, device: Any) -> Any:
    # |x| <= 6 or so, far below 448: every torch casts this alike.
    return torch.randn(rows, columns, device=device).to(_attribute(torch, "float8_e4m3fn"))


def _recipes(torch: Any) -> Any:
    if not hasattr(torch.nn.functional, "scaled_mm"):
        raise UnsupportedError(f"torch {torch.__version__} has no torch.nn.functional.scaled_mm (2.10 and later do)")
    return torch.nn.functional.ScalingType


def _attribute(torch: Any, name: str) -> Any:
    if not hasattr(torch, name):
        raise UnsupportedError(f"torch {torch.__version__} has no {name}")
    return getattr(torch, name)


def _swizzled(rows: int, k: int, block: int) -> int:
    """Bytes of block scales in the 128x4 layout: rows padded to 128, blocks along k to 4."""
    return _round_up(rows, 128) * _round_up(-(-k // block), 4)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


_BUILDERS: dict[str, Callable[..., Call]] = {
    "fp32": _plain("float32"),
    "bf16": _plain("bfloat16"),
    "fp16": _plain("float16"),
    "fp8_tensor": _fp8_tensor,
    "fp8_row": _fp8_row,
    "fp8_1x128": _fp8_1x128,
    "mxfp8": _mxfp8,
    "nvfp4": _nvfp4,
}
