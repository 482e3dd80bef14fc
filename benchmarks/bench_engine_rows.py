"""Times of the fused rows that the engine's passes put into training graphs, against torch.compile's own fusions.

    PYTHONPATH=src python3 benchmarks/bench_engine_rows.py [--json FILE] [--tokens 16384]

Residual addition and norm (forward to FP8 rows, backward with the stream's gradient), bias and activation (forward to
FP8 rows, backward to FP8 rows and the bias's gradient), cross entropy with bias, scale and soft cap. Checked against
torch first. Each config is a row; "share" is of the copy bandwidth measured in the same run.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deepwell.bench.environment import environment
from deepwell.kernels.activation import bias_activation, swiglu
from deepwell.kernels.head import cross_entropy
from deepwell.kernels.norm import rms_norm
from deepwell.kernels.quantize.fp8 import RowConfig, quantize_rows
from deepwell.kernels.tune.timing import cold_median_us, copy_gbps

E4M3 = torch.float8_e4m3fn
NORM_FORWARD = [RowConfig(tile=0, num_warps=warps) for warps in (4, 8, 16)]
NORM_BACKWARD = [
    rms_norm.BackwardConfig(num_warps=warps, programs_per_sm=programs, num_stages=stages)
    for warps, programs, stages in ((8, 1, 3), (4, 4, 2), (4, 8, 2), (16, 2, 2))
]
BIAS_BACKWARD = [
    rms_norm.BackwardConfig(num_warps=warps, programs_per_sm=programs, num_stages=stages)
    for warps, programs, stages in ((32, 1, 2), (16, 2, 2), (16, 2, 1))
]


class Table:
    """Rows as they are measured, printed at once."""

    def __init__(self) -> None:
        self.copy = 1e3 * copy_gbps()  # bytes per microsecond
        self.rows: list[dict[str, Any]] = []
        print(f"{torch.cuda.get_device_name()}, copy {self.copy / 1e6:.2f} TB/s")

    def add(self, op: str, variant: str, num_bytes: float, run: Callable[[], Any]) -> None:
        took = cold_median_us(run)
        share = num_bytes / took / self.copy
        self.rows.append({"op": op, "variant": variant, "us": took, "gb_s": num_bytes / took / 1e3, "share": share})
        print(f"{op:34} {variant:48} {took:9.1f} us {num_bytes / took / 1e3:8.0f} GB/s {share:6.1%}")


def close(got: Tensor, ref: Tensor, name: str, limit: float = 0.05) -> None:
    error = ((got.float() - ref.float()).norm() / ref.float().norm()).item()
    if not error < limit:
        raise SystemExit(f"{name}: relative error {error:.3g} is not below {limit}")


def residual_norm(table: Table, t: int, d: int) -> None:
    x, r, dr, dy = (torch.randn(t, d, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    w = torch.randn(d, device="cuda", dtype=torch.bfloat16)
    options = rms_norm.NormOptions(write=False, fp8=E4M3)

    @torch.compile
    def apart(x: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        total = x + r
        return total, F.rms_norm(total, (d,), w, 1e-6)

    out = rms_norm.norm(x, w, residual_TD=r, options=options)
    total, y = apart(x, r)
    close(out.q.float() * out.scale[:, None], y, "add_rms_norm")
    op = f"add + rms_norm -> rows {t}x{d}"
    table.add(op, "torch.compile, then quantize_rows", 11 * t * d, lambda: quantize_rows(apart(x, r)[1]))
    for config in NORM_FORWARD:
        run = lambda c=config: rms_norm.norm(x, w, residual_TD=r, options=options, config=c)  # noqa: E731
        table.add(op, str(config), 7 * t * d, run)
    op = f"rms_norm backward + stream {t}x{d}"
    grads = rms_norm.norm_backward(dy, total, w, out.rstd, d_residual_TD=dr)
    leaf = total.clone().requires_grad_()
    ref = torch.autograd.grad(F.rms_norm(leaf, (d,), w, 1e-6), leaf, dy)[0] + dr
    close(grads.dx, ref, "rms_norm_backward")
    alone = lambda: rms_norm.norm_backward(dy, total, w, out.rstd).dx + dr  # noqa: E731
    table.add(op, "norm backward, then add", 12 * t * d, alone)
    for config in NORM_BACKWARD:
        run = lambda c=config: rms_norm.norm_backward(dy, total, w, out.rstd, d_residual_TD=dr, config=c)  # noqa: E731
        table.add(op, str(config), 8 * t * d, run)


def bias_act(table: Table, t: int, f: int) -> None:
    x, dh = (torch.randn(t, f, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    b = torch.randn(f, device="cuda", dtype=torch.bfloat16)
    options = swiglu.GluOptions(act="gelu_tanh", write=False, fp8=E4M3)

    @torch.compile
    def forward(x: Tensor, b: Tensor) -> Tensor:
        return F.gelu(x + b, approximate="tanh")

    @torch.compile
    def backward(dh: Tensor, x: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        grad = torch.ops.aten.gelu_backward(dh, x + b, approximate="tanh")
        return grad, grad.float().sum(0).to(b.dtype)

    out = bias_activation.bias_activation(x, b, options=options)
    close(out.q.float() * out.scale[:, None], forward(x, b), "bias_activation")
    op = f"bias + gelu -> rows {t}x{f}"
    table.add(op, "torch.compile, then quantize_rows", 7 * t * f, lambda: quantize_rows(forward(x, b)))
    for config in swiglu.FORWARD_CONFIGS:
        run = lambda c=config: bias_activation.bias_activation(x, b, options=options, config=c)  # noqa: E731
        table.add(op, str(config), 3 * t * f, run)
    grads = bias_activation.bias_activation_backward(dh, x, b, options=options)
    grad, db = backward(dh, x, b)
    close(grads.q.float() * grads.scale[:, None], grad, "bias_activation_backward")
    close(grads.db, db, "the bias's gradient", 0.02)
    op = f"bias + gelu backward -> rows {t}x{f}"
    table.add(op, "torch.compile, then quantize_rows", 11 * t * f, lambda: quantize_rows(backward(dh, x, b)[0]))
    for config in BIAS_BACKWARD:
        run = lambda c=config: bias_activation.bias_activation_backward(dh, x, b, options=options, config=c)  # noqa: E731
        table.add(op, str(config), 5 * t * f, run)


def bent_cross_entropy(table: Table, t: int, v: int) -> None:
    logits = torch.randn(t, v, device="cuda", dtype=torch.bfloat16)
    bias, targets = torch.randn(v, device="cuda", dtype=torch.bfloat16), torch.randint(0, v, (t,), device="cuda")
    variants: dict[str, tuple[Tensor | None, dict[str, float]]] = {
        "plain": (None, {}),
        "bias": (bias, {}),
        "scale": (None, {"logit_scale": 0.0625}),
        "cap": (None, {"soft_cap": 30.0}),
    }
    for name, (b, how) in variants.items():
        options = cross_entropy.LossOptions(gradient="new", **how)  # type: ignore[arg-type]
        z, _ = cross_entropy.logits_ref(logits, b, options)
        loss = cross_entropy.cross_entropy(logits, targets, bias_V=b, options=options).loss
        close(loss, F.cross_entropy(z, targets, reduction="none"), f"cross_entropy {name}", 1e-3)
        del z
        for config in (cross_entropy.default_config(v, options), cross_entropy.CONFIGS[0], cross_entropy.CONFIGS[1]):
            run = lambda c=config, b=b, o=options: cross_entropy.cross_entropy(  # noqa: E731
                logits, targets, bias_V=b, options=o, config=c
            )
            table.add(f"cross entropy, {name} {t}x{v}", str(config), 6 * t * v, run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--tokens", type=int, default=16384)
    chosen = parser.parse_args()
    table = Table()
    for width in (1024, 4096):
        residual_norm(table, chosen.tokens, width)
    for width in (3072, 6144, 8192):
        bias_act(table, chosen.tokens, width)
    bent_cross_entropy(table, 2048, 128256)
    if chosen.json:
        found = {"environment": environment(), "rows": table.rows}
        Path(chosen.json).write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
