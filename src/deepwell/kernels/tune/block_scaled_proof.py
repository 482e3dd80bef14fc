"""The on-device self-check of the block-scaled kernels: none may be chosen before it matched its reference here.

Each candidate multiplies operands of realistic and of uneven magnitudes, whole tiles and ragged sizes, on the very
device, and is held against the fp32 product of the dequantized operands. Scales are uneven by row and by block, so that
a scale read from the wrong place cannot hide. The quantizers are held bit for bit against `deepwell.formats`. Lack of
memory is no finding: it is raised, and the check is made again when it is asked for again.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache

import torch
from torch import Tensor

from deepwell.errors import ConfigError
from deepwell.formats.metrics import sqnr_db
from deepwell.formats.quantize import quantize
from deepwell.kernels.device.triton_support import LAUNCH_ERRORS
from deepwell.kernels.gemm.block_scaled import CANDIDATES, Operand, block_scaled_gemm, block_scaled_gemm_ref
from deepwell.kernels.quantize.microscaled import quantize_mxfp8, quantize_nvfp4
from deepwell.kernels.tune.out_of_memory import is_shortage, says_shortage, skipped

FORMATS = ("mxfp8", "nvfp4")

# Whole tiles of every kernel; then sizes that are no multiple of anything, one of them smaller than a tile.
SHAPES = ((256, 512, 512), (200, 272, 320), (33, 48, 96))
# fp32 results: DESIGN's floor for the product of the same operands. bf16 results: the rounding's own error, twice.
_MIN_FP32_DB = 60.0
_MAX_ROUNDING = 2.0

Gemm = Callable[[Operand, Operand, torch.dtype], Tensor]
_Copy = tuple[int, Tensor | None, Tensor | None]  # axis, codes, scales


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """What a self-check found: which kernel, whether it may be used, and the figures or the reason."""

    format: str
    kernel: str
    passed: bool
    detail: str

    def __str__(self) -> str:
        return f"{self.format} {self.kernel}: {'passed' if self.passed else 'FAILED'}, {self.detail}"


def operand(fmt: str, x: Tensor) -> Operand:
    """`x` quantized along its rows as an operand of `block_scaled_gemm`."""
    if fmt == "mxfp8":
        made = quantize_mxfp8(x, columns=False)
        assert made.q_TK is not None and made.scale is not None
        return Operand(made.q_TK, made.scale)
    if fmt == "nvfp4":
        return Operand(*quantize_nvfp4(x))
    raise ConfigError(f"format {fmt!r} has no block-scaled kernels; they are {', '.join(FORMATS)}")


def _uneven(rows: int, columns: int, device: torch.device, generator: torch.Generator) -> Tensor:
    """Gaussian numbers whose rows and blocks of 16 differ in size: a scale from the wrong place is seen."""
    x = torch.randn(rows, columns, generator=generator)
    by_row = torch.exp2(torch.randint(-4, 4, (rows, 1), generator=generator).float())
    by_block = torch.exp2(torch.randint(-3, 3, (rows, -(-columns // 16)), generator=generator).float())
    return (x * by_row * by_block.repeat_interleave(16, dim=1)[:, :columns]).to(device, torch.bfloat16)


def prove_gemm(fmt: str, kernel: str, device: torch.device, gemm: Gemm | None = None) -> Proof:
    """Hold one candidate (or `gemm`, a stand-in) against the reference on `device`; its errors are findings."""

    def of_candidate(a: Operand, b: Operand, out_dtype: torch.dtype) -> Tensor:
        return block_scaled_gemm(a, b, out_dtype=out_dtype, candidate=kernel)

    run = gemm or of_candidate
    dtypes = (torch.bfloat16,) if kernel == "cutlass" else (torch.float32, torch.bfloat16)
    generator = torch.Generator().manual_seed(20250611)
    worst = float("inf")
    try:
        for m, n, k in SHAPES:
            x, w = (_uneven(rows, k, device, generator) for rows in (m, n))
            a, b = operand(fmt, x), operand(fmt, w)
            reference = block_scaled_gemm_ref(a, b, out_dtype=torch.float32)
            for dtype in dtypes:
                got = run(a, b, dtype)
                wrong, db = _judge(got, reference, dtype)
                if wrong:
                    return Proof(format=fmt, kernel=kernel, passed=False, detail=f"{wrong} at {m} x {n} x {k}")
                worst = min(worst, db)
            hidden = _hides_nan(fmt, run, x, b)
            if hidden:
                return Proof(format=fmt, kernel=kernel, passed=False, detail=f"{hidden} at {m} x {n} x {k}")
    except LAUNCH_ERRORS as error:
        if is_shortage(error):
            raise
        return Proof(format=fmt, kernel=kernel, passed=False, detail=_first_line(error))
    return Proof(format=fmt, kernel=kernel, passed=True, detail=f"at least {worst:.0f} dB on {len(SHAPES)} shapes")


def _judge(got: Tensor, reference: Tensor, dtype: torch.dtype) -> tuple[str, float]:
    """(what is wrong or nothing, dB against the reference in the result's dtype)."""
    if got.dtype != dtype or got.shape != reference.shape:
        return f"gave {got.dtype} {tuple(got.shape)}", 0.0
    if not bool(got.isfinite().all()):
        return f"{dtype}: gave numbers that are not finite", 0.0
    if dtype == torch.float32:
        db = sqnr_db(reference, got)
        return (f"{db:.1f} dB in fp32, less than {_MIN_FP32_DB:.0f}" if db < _MIN_FP32_DB else "", db)
    rounded = reference.to(dtype).double()
    own = float((rounded - reference.double()).square().mean().sqrt())
    error = float((got.double() - reference.double()).square().mean().sqrt())
    if error > _MAX_ROUNDING * own:
        return f"{dtype}: error {error:.3g}, more than twice the rounding's own {own:.3g}", 0.0
    return "", sqnr_db(reference.to(dtype), got)


def _hides_nan(fmt: str, run: Gemm, x: Tensor, b: Operand) -> str:
    """A NaN in an operand must be seen in the result: its row in MXFP8; all of it in NVFP4, whose scale is NaN."""
    x = x.clone()
    x[0, 0] = float("nan")
    got = run(operand(fmt, x), b, torch.bfloat16)
    lost = got[0] if fmt == "mxfp8" else got
    if not bool(lost.isnan().all()):
        return "a NaN in an operand was lost"
    return "a NaN in one row spoiled others" if fmt == "mxfp8" and bool(got[1:].isnan().any()) else ""


def prove_quantizer(fmt: str, device: torch.device) -> Proof:
    """Hold the Triton quantizer against `deepwell.formats` on `device`, bit for bit, both copies of MXFP8 included."""
    generator = torch.Generator().manual_seed(20250612)
    wrong = []
    try:
        for rows, _, columns in SHAPES:
            x = _uneven(rows, columns, device, generator)
            x[0, 0] = float("nan") if fmt == "mxfp8" else 0.0
            if fmt == "mxfp8":
                found = quantize_mxfp8(x)
                pairs: list[_Copy] = [(1, found.q_TK, found.scale), (0, found.q_KT, found.scale_t)]
            else:
                rows_found = quantize_nvfp4(x)
                pairs = [(1, rows_found.q, rows_found.scale)]
            for axis, codes, scale in pairs:
                wanted = quantize(x, fmt, axis=axis)
                assert codes is not None and scale is not None
                for got, want in ((codes, wanted.data), (scale, wanted.scale_swizzled())):
                    if not torch.equal(got.view(torch.uint8), want.view(torch.uint8)):
                        wrong.append(f"{rows} x {columns} along axis {axis}")
    except LAUNCH_ERRORS as error:
        if is_shortage(error):
            raise
        wrong.append(_first_line(error))
    detail = f"differs from the format: {'; '.join(dict.fromkeys(wrong))}" if wrong else "bit for bit the format"
    return Proof(format=fmt, kernel="quantize", passed=not wrong, detail=detail)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


# ---- which kernels may be used ----


@lru_cache(maxsize=64)
def proof_of(fmt: str, kernel: str, device: torch.device) -> Proof:
    """The check of one kernel ("quantize" or a GEMM candidate) on one device, made once in a process.

    Triton's and CUTLASS' products have never run on a Blackwell: a GPU tries them in a process of its own, which can be
    ended when it hangs and may crash without harm.
    """
    if kernel == "quantize":
        return prove_quantizer(fmt, device)
    if kernel == "vendor" or device.type != "cuda":
        return prove_gemm(fmt, kernel, device)
    return prove_apart(fmt, kernel, device)


def proofs(fmt: str, device: torch.device) -> tuple[Proof, ...]:
    """All checks of one format on one device: the quantizer, then each GEMM candidate; none stops the next."""
    return tuple(_proof_or_skip(fmt, kernel, device) for kernel in ("quantize", *CANDIDATES))


def _proof_or_skip(fmt: str, kernel: str, device: torch.device) -> Proof:
    try:
        return proof_of(fmt, kernel, device)
    except LAUNCH_ERRORS as error:  # lack of memory alone: other errors are findings
        return Proof(format=fmt, kernel=kernel, passed=False, detail=skipped(error))


def native_kernel(fmt: str, device: torch.device) -> tuple[str | None, str]:
    """(the first GEMM candidate that proves itself on `device` or None, the reason). Those behind it are not tried."""
    quantizer = proof_of(fmt, "quantize", device)
    if not quantizer.passed:
        return None, f"its quantizer {quantizer.detail}"
    failed = []
    for kernel in CANDIDATES:
        proof = proof_of(fmt, kernel, device)
        if proof.passed:
            return kernel, f"{kernel} passed its self-check ({proof.detail})"
        failed.append(f"{kernel}: {proof.detail}")
    return None, "; ".join(failed)


# ---- in a process of its own ----

_ENTRY = "from deepwell.kernels.tune.block_scaled_proof import main; main()"


def prove_apart(fmt: str, kernel: str, device: torch.device, timeout_s: float = 180.0, entry: str = _ENTRY) -> Proof:
    """`prove_gemm` in a fresh interpreter; one that hangs, crashes or says nothing is a finding."""

    def failed(detail: str) -> Proof:
        return Proof(format=fmt, kernel=kernel, passed=False, detail=detail)

    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    request = json.dumps({"fmt": fmt, "kernel": kernel, "device": str(device)})
    command = [sys.executable, "-c", entry]
    try:
        run = subprocess.run(
            command, input=request, capture_output=True, text=True, timeout=timeout_s, check=False, env=environment
        )
    except subprocess.TimeoutExpired:
        return failed(f"hangs: no answer within {timeout_s:g} s")
    lines = run.stdout.strip().splitlines()
    if run.returncode or not lines:
        said = run.stderr.strip().splitlines()
        short = [line for line in said if says_shortage(line)]
        if short:
            raise torch.OutOfMemoryError(f"{kernel} could not be checked for {fmt} on {device}: {short[-1][:200]}")
        return failed(f"ended its process with status {run.returncode}" + (f": {said[-1][:200]}" if said else ""))
    try:
        return Proof(**json.loads(lines[-1]))
    except (json.JSONDecodeError, TypeError):
        return failed(f"its process answered {lines[-1][:200]!r} instead of a proof")


def main() -> None:
    """The fresh interpreter: read a request, prove, print the proof as JSON."""
    request = json.loads(sys.stdin.read())
    found = prove_gemm(request["fmt"], request["kernel"], torch.device(request["device"]))
    print(json.dumps(asdict(found)), flush=True)
