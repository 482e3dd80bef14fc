"""Time the row kernels (quantize, transpose, norm, SwiGLU, RoPE, cross entropy) in every config against torch's own.

    PYTHONPATH=src python3 benchmarks/bench_rows.py [--only transpose,rms_norm] [--shape 8b|1b|768] [--json FILE]

Each row says microseconds (median), GB/s of the bytes the operation must move, and that as a share of the copy
bandwidth measured in the same run. Every kernel is compared with its reference first; a wrong one is a row that says
WRONG. Rows that the time budget (--seconds) does not reach are counted at the end.
"""

import argparse
import importlib.util
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from triton.errors import TritonError

from deepwell.bench.environment import environment
from deepwell.kernels.activation import swiglu
from deepwell.kernels.head import cross_entropy
from deepwell.kernels.norm import rms_norm
from deepwell.kernels.quantize import fp8 as quantize
from deepwell.kernels.quantize import transpose
from deepwell.kernels.quantize.fp8 import RowOptions, quantize_rows_ref
from deepwell.kernels.quantize.wgrad_operands import balance_scales
from deepwell.kernels.rope import rope
from deepwell.kernels.tune.timing import cold_median_us, copy_gbps

E4M3 = torch.float8_e4m3fn
NORM_FORWARD = [quantize.RowConfig(tile=0, num_warps=warps) for warps in (4, 8, 16)]
NORM_BACKWARD = [
    rms_norm.BackwardConfig(num_warps=warps, programs_per_sm=programs, num_stages=stages)
    for warps, programs, stages in ((8, 1, 3), (4, 4, 2), (4, 8, 2), (16, 2, 2))
]
# (tokens, model width, hidden width, vocabulary) of a Llama-8B, a 1B and a 768-wide decoder.
SHAPES = {"8b": (16384, 4096, 14336, 128256), "1b": (16384, 2048, 8192, 128256), "768": (32768, 768, 3072, 50304)}

# (sequences, q heads, k heads, v heads, head width) of the model of that width.
HEADS = {4096: (2, 32, 8, 8, 128), 2048: (2, 32, 8, 8, 64), 768: (32, 12, 12, 12, 64)}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table: what is run, the bytes it must move, and how its result is checked."""

    op: str
    shape: tuple[int, ...]
    variant: str
    num_bytes: int
    run: Callable[[], object]
    # Returns None where the result is right, else what is wrong.
    check: Callable[[], str | None] = lambda: None


@dataclass(frozen=True, kw_only=True)
class Result:
    op: str
    shape: tuple[int, ...]
    variant: str
    us: float
    gbps: float
    share_of_copy: float
    problem: str | None


def same_bits(got: Tensor, wanted: Tensor) -> str | None:
    wrong = int((got.reshape(-1).view(torch.uint8) != wanted.reshape(-1).view(torch.uint8)).sum())
    return f"{wrong} bytes differ" if wrong else None


def close(got: Tensor, wanted: Tensor, limit: float) -> str | None:
    """Relative error in the 2-norm; the tests hold the kernels to tighter, self-calibrating bounds."""
    error = float((got.float() - wanted.float()).norm() / wanted.float().norm())
    return None if error < limit else f"relative error {error:.1e}"


def check_both(got: tuple[Tensor, ...], ref: tuple[Tensor, ...]) -> str | None:
    return first(same_bits(got[0][:512], ref[0]), same_bits(got[1][:, :512], ref[1]), same_bits(got[2], ref[2]))


def first(*problems: str | None) -> str | None:
    return next((problem for problem in problems if problem), None)


def short(config: object) -> str:
    """A config in few characters: rows128 columns128 w4 asm."""
    words = []
    for key, value in asdict(config).items():
        if key == "packing":
            words.append(value)
        elif key == "num_warps":
            words.append(f"w{value}")
        elif not (key == "rows" and value == 0):
            words.append(f"{key}{value}")
    return " ".join(words)


def spread(t: int, k: int, device: str, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Normal numbers whose rows differ by octaves, as activations' do."""
    return (torch.randn(t, k, device=device) * torch.exp2(2 * torch.randn(t, 1, device=device))).to(dtype)


# ---- the cases of each kernel ----


def quantize_cases(t: int, d: int, f: int, v: int, device: str) -> Iterator[Case]:
    eager_rows = torch.compile(quantize_rows_ref, dynamic=False)
    for k in (d, f):
        x = spread(t, k, device)
        ref = quantize_rows_ref(x[:512])
        common = {"op": "quantize_rows", "shape": (t, k), "num_bytes": 3 * t * k}
        for config in quantize.ROW_CONFIGS:
            yield Case(
                **common,
                variant=short(config),
                run=lambda x=x, c=config: quantize.quantize_rows(x, config=c),
                check=lambda x=x, c=config, ref=ref: first(
                    *(same_bits(a[:512], b) for a, b in zip(quantize.quantize_rows(x, config=c), ref, strict=True))
                ),
            )
        if k == d:
            yield Case(**common, variant="torch.compile", run=lambda x=x: eager_rows(x))
    x = spread(t, d, device)
    biggest = quantize.amax(x)
    yield Case(
        op="amax",
        shape=(t, d),
        variant="deepwell",
        num_bytes=2 * t * d,
        run=lambda: quantize.amax(x),
        check=lambda: same_bits(quantize.amax(x), quantize.amax_ref([x])),
    )
    yield Case(op="amax", shape=(t, d), variant="torch", num_bytes=2 * t * d, run=lambda: x.abs().amax())
    ref = quantize.quantize_both_ref(x[:512], biggest, dtype=E4M3)
    for config in quantize.BOTH_CONFIGS:
        run = lambda c=config: quantize.quantize_weight(x, biggest, config=c)  # noqa: E731
        yield Case(
            op="quantize_weight",
            shape=(t, d),
            variant=short(config),
            num_bytes=4 * t * d,
            run=run,
            check=lambda run=run: check_both(run(), ref),
        )


def transpose_cases(t: int, d: int, f: int, v: int, device: str) -> Iterator[Case]:
    for n in (d, f):
        q, scale_T = quantize_rows_ref(spread(t, n, device))
        biggest = scale_T.amax()
        ref = transpose.transpose_codes_ref(q[:512], scale_T[:512], biggest)
        common = {"op": "transpose_codes", "shape": (t, n), "num_bytes": 2 * t * n}
        for config in transpose.TRANSPOSE_CONFIGS:
            yield Case(
                **common,
                variant=short(config) + " given scale",
                run=lambda q=q, s=scale_T, b=biggest, c=config: transpose.transpose_codes(q, s, scale=b, config=c),
                check=lambda q=q, s=scale_T, c=config, ref=ref: same_bits(
                    transpose.transpose_codes(q, s, config=c)[0][:, :512], ref
                ),
            )
        yield Case(**common, variant="default, with max", run=lambda q=q, s=scale_T: transpose.transpose_codes(q, s))
        balance = {"op": "balance_scales", "shape": (t,), "num_bytes": 16 * t}
        yield Case(**balance, variant="default", run=lambda s=scale_T: balance_scales(s, s))
        codes = q.view(torch.uint8)
        yield Case(**common, variant="torch (bytes only)", run=lambda codes=codes: codes.T.contiguous())
        yield Case(**common, variant="torch copy", run=lambda codes=codes: codes.clone())


def rms_norm_cases(t: int, d: int, f: int, v: int, device: str) -> Iterator[Case]:
    x, r, dy = (spread(t, d, device) for _ in range(3))
    w = torch.rand(d, device=device, dtype=torch.bfloat16) + 0.5
    to_q = rms_norm.NormOptions(write=False, fp8=E4M3)
    ref = rms_norm.norm_ref(x[:512], w, None, r[:512], to_q)
    for config in NORM_FORWARD:

        def forward(c=config) -> rms_norm.Normed:
            return rms_norm.norm(x, w, residual_TD=r, options=to_q, config=c)

        yield Case(
            op="rms_norm(x + r) -> q",
            shape=(t, d),
            variant=short(config),
            num_bytes=7 * t * d,
            run=forward,
            check=lambda forward=forward: close(
                forward().q[:512].float() * forward().scale[:512, None], ref.q.float() * ref.scale[:, None], 3e-3
            ),
        )
    plain = rms_norm.NormOptions()
    y = {"op": "rms_norm -> bf16", "shape": (t, d), "num_bytes": 4 * t * d}
    yield Case(**y, variant="deepwell", run=lambda: rms_norm.norm(x, w, options=plain))
    yield Case(**y, variant="torch F.rms_norm", run=lambda: F.rms_norm(x, (d,), w, 1e-6))
    liger = _liger("liger_kernel.ops.rms_norm")
    if liger:
        yield Case(**y, variant="Liger", run=lambda: liger.rms_norm_forward(x, w, 1e-6, 0.0, "llama", None))
    total = rms_norm.norm(x, w, residual_TD=r, options=plain)
    both = rms_norm.NormOptions(write=True, fp8=E4M3)
    want = rms_norm.norm_backward_ref(dy, total, w, r, both)
    for config in NORM_BACKWARD:

        def backward(c=config) -> rms_norm.NormGrads:
            return rms_norm.norm_backward(dy, total.total, w, total.rstd, d_residual_TD=r, options=both, config=c)

        yield Case(
            op="rms_norm backward -> dx, q",
            shape=(t, d),
            variant=short(config),
            num_bytes=9 * t * d,
            run=backward,
            check=lambda backward=backward: first(
                close(backward().dx, want.dx, 1e-3), close(backward().dw, want.dw, 5e-3)
            ),
        )
    graph_x, graph_w = x.clone().requires_grad_(), w.clone().requires_grad_()
    out = F.rms_norm(graph_x, (d,), graph_w, 1e-6)
    yield Case(
        op="rms_norm backward -> dx",
        shape=(t, d),
        variant="torch F.rms_norm",
        num_bytes=6 * t * d,
        run=lambda: torch.autograd.grad(out, (graph_x, graph_w), dy, retain_graph=True),
    )


def swiglu_cases(t: int, d: int, f: int, v: int, device: str) -> Iterator[Case]:
    gate_up, dh = torch.randn(t, 2 * f, device=device, dtype=torch.bfloat16), spread(t, f, device)
    g, u = gate_up.chunk(2, dim=1)
    to_q = swiglu.GluOptions(write=False, fp8=E4M3)
    ref = swiglu.swiglu_ref(g[:512], u[:512], to_q)
    for config in swiglu.FORWARD_CONFIGS:

        def forward(c=config) -> swiglu.Activated:
            return swiglu.swiglu(gate_up, options=to_q, config=c)

        yield Case(
            op="swiglu -> q",
            shape=(t, f),
            variant=short(config),
            num_bytes=5 * t * f,
            run=forward,
            check=lambda forward=forward: close(
                forward().q[:512].float() * forward().scale[:512, None], ref.q.float() * ref.scale[:, None], 3e-3
            ),
        )
    h = {"op": "swiglu -> bf16", "shape": (t, f), "num_bytes": 6 * t * f}
    yield Case(**h, variant="deepwell", run=lambda: swiglu.swiglu(gate_up))
    compiled = torch.compile(lambda g, u: F.silu(g) * u, dynamic=False)
    yield Case(**h, variant="torch.compile", run=lambda: compiled(g, u))
    liger = _liger("liger_kernel.ops.swiglu")
    if liger:
        yield Case(**h, variant="Liger", run=lambda: liger.swiglu_forward(g, u))
    want = swiglu.swiglu_backward_ref(dh[:512], g[:512], u[:512], to_q)
    for recompute in (False, True):
        options = swiglu.GluOptions(write=False, fp8=E4M3, recompute_h=recompute)
        for config in swiglu.BACKWARD_CONFIGS:
            if not config.tile and triton.next_power_of_2(f) // config.num_warps > 2048:
                continue  # spills

            def backward(c=config, o=options) -> swiglu.ActivationGrads:
                return swiglu.swiglu_backward(dh, gate_up, options=o, config=c)

            yield Case(
                op="swiglu backward -> q, q of h" if recompute else "swiglu backward -> q",
                shape=(t, f),
                variant=short(config),
                num_bytes=(9 if recompute else 8) * t * f,
                run=backward,
                check=lambda backward=backward: close(
                    backward().q[:512].float() * backward().scale[:512, None],
                    want.q.float() * want.scale[:, None],
                    3e-3,
                ),
            )


def rope_cases(t: int, d: int, f: int, v: int, device: str) -> Iterator[Case]:
    batch, hq, hk, hv, width = HEADS[d]
    heads, seq = rope.Heads(q=hq, k=hk, v=hv), t // batch
    columns = heads.total * width
    angle = torch.outer(
        torch.arange(seq, device=device).float(), 5e5 ** -torch.linspace(0, 1, width // 2 + 1)[:-1].to(device)
    )
    cos, sin = (table.repeat(1, 2).bfloat16() for table in (angle.cos(), angle.sin()))
    qkv = spread(t, columns, device).view(batch, seq, columns)
    # As attention's backward leaves them: laid out like q, k and v themselves.
    grads = tuple(spread(t, h * width, device).view(batch, seq, h, width) for h in (hq, hk, hv))
    short_tables, short_grads = (cos[:64], sin[:64]), tuple(g[:, :64] for g in grads)
    ref = rope.rope_qkv_ref(qkv[:, :64], *short_tables, heads)
    forward = {"op": "rope(qkv) -> q, k, v", "shape": (t, columns)}
    for config in rope.CONFIGS:

        def run_forward(c=config) -> tuple[Tensor, ...]:
            return rope.rope_qkv(qkv, cos, sin, heads=heads, config=c)

        yield Case(
            **forward,
            variant=short(config),
            num_bytes=4 * t * columns,
            run=run_forward,
            check=lambda run=run_forward: first(
                *(same_bits(a[:, :64].contiguous(), b) for a, b in zip(run(), ref, strict=True))
            ),
        )
    yield from _plain_rope(qkv, grads, (cos, sin), heads, forward)
    for options in (RowOptions(), RowOptions(write=False, fp8=E4M3), RowOptions(fp8=E4M3)):
        want = rope.rope_qkv_backward_ref(short_grads, *short_tables, heads, options)
        written = [name for name, is_there in (("bf16", options.write), ("q", options.fp8 is not None)) if is_there]
        for config in rope.CONFIGS:

            def run_backward(c=config, o=options) -> rope.RopeGrads:
                return rope.rope_qkv_backward(grads, cos, sin, options=o, config=c)

            yield Case(
                op=f"rope backward -> {', '.join(written)}",
                shape=(t, columns),
                variant=short(config),
                num_bytes=(2 + 2 * options.write + (options.fp8 is not None)) * t * columns,
                run=run_backward,
                check=lambda run=run_backward, want=want: first(
                    *(
                        same_bits(a.unflatten(0, (batch, seq))[:, :64].contiguous(), b)
                        for a, b in zip(run(), want, strict=True)
                        if b is not None
                    )
                ),
            )


def _plain_rope(
    qkv: Tensor, grads: tuple[Tensor, ...], tables: tuple[Tensor, Tensor], heads: rope.Heads, forward: dict
) -> Iterator[Case]:
    """What torch.compile makes of the written-out rotation, and Liger's kernel, which rotates q and k in place."""
    width, (t, columns) = grads[0].shape[-1], forward["shape"]
    rotated = (heads.q + heads.k) * width

    def turn(x: Tensor, sign: int) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        cos, sin = (table[:, None, :] for table in tables)
        return x * cos + sign * torch.cat((-b, a), dim=-1) * sin

    @torch.compile(dynamic=False)
    def plain(qkv: Tensor) -> tuple[Tensor, ...]:
        q, k, v = heads.parts(qkv, width)
        return turn(q, 1), turn(k, 1), v

    @torch.compile(dynamic=False)
    def plain_backward(dq: Tensor, dk: Tensor, dv: Tensor) -> Tensor:
        return torch.cat((turn(dq, -1), turn(dk, -1), dv), dim=-2).flatten(-2).flatten(0, 1)

    yield Case(**forward, variant="torch.compile, v a view", num_bytes=4 * t * rotated, run=lambda: plain(qkv))
    backward = {"op": "rope backward -> bf16", "shape": (t, columns), "num_bytes": 4 * t * columns}
    yield Case(**backward, variant="torch.compile", run=lambda: plain_backward(*grads))
    yield Case(
        op="rope backward -> q",
        shape=(t, columns),
        variant="torch.compile, then quantize_rows",
        num_bytes=3 * t * columns,
        run=lambda: quantize.quantize_rows(plain_backward(*grads)),
    )
    liger = _liger("liger_kernel.ops.rope")
    if liger:
        q, k = (x.clone().transpose(1, 2) for x in grads[:2])
        cos, sin = (table[None] for table in tables)
        yield Case(
            **forward,
            variant="Liger, q and k in place",
            num_bytes=4 * t * rotated,
            run=lambda: liger.rope_forward(q, k, cos, sin),
        )


def cross_entropy_cases(t: int, d: int, f: int, v: int, device: str) -> Iterator[Case]:
    t = min(t, 4096)
    logits = (3 * torch.randn(t, v, device=device)).bfloat16()
    targets = torch.randint(0, v, (t,), device=device)
    scale = torch.full((), 1 / t, device=device)
    for gradient, width in (("new", 6), ("fp8", 5)):
        options = cross_entropy.LossOptions(gradient=gradient)
        ref = cross_entropy.cross_entropy_ref(logits[:64], targets[:64], None, scale, options)
        for config in cross_entropy.CONFIGS:

            def run(c=config, o=options) -> cross_entropy.Losses:
                return cross_entropy.cross_entropy(logits, targets, grad_scale=scale, options=o, config=c)

            yield Case(
                op=f"cross_entropy -> {gradient}",
                shape=(t, v),
                variant=short(config),
                num_bytes=width * t * v,
                run=run,
                check=lambda run=run, ref=ref: check_losses(run(), ref),
            )
    graph = logits.clone().requires_grad_()
    yield Case(
        op="cross_entropy -> new",
        shape=(t, v),
        variant="torch, forward and backward",
        num_bytes=6 * t * v,
        run=lambda: torch.autograd.grad(F.cross_entropy(graph.float(), targets), graph),
    )
    liger = _liger("liger_kernel.ops.cross_entropy")
    if liger:
        yield Case(
            op="cross_entropy -> in place",
            shape=(t, v),
            variant="Liger",
            num_bytes=6 * t * v,
            run=lambda: liger.LigerCrossEntropyFunction.apply(graph, targets, None),
        )


def check_losses(got: cross_entropy.Losses, ref: cross_entropy.Losses) -> str | None:
    if ref.q is not None:
        mine, wanted = got.q[:64].float() * got.scale[:64, None], ref.q.float() * ref.scale[:, None]
        return first(close(got.loss[:64], ref.loss, 1e-6), close(mine, wanted, 3e-3))
    return first(close(got.loss[:64], ref.loss, 1e-6), close(got.grad[:64], ref.grad, 1e-3))


def _liger(name: str):
    return importlib.import_module(name) if importlib.util.find_spec("liger_kernel") else None


CASES = {
    "transpose": transpose_cases,
    "quantize": quantize_cases,
    "rms_norm": rms_norm_cases,
    "swiglu": swiglu_cases,
    "rope": rope_cases,
    "cross_entropy": cross_entropy_cases,
}


def run_case(case: Case, copy: float) -> Result:
    try:
        problem = case.check()
        us = cold_median_us(case.run)
    except (RuntimeError, TritonError) as error:
        # A config that does not compile or fit is a row of the table, not the end of it.
        problem, us = f"{type(error).__name__}: {error}".splitlines()[0][:120], float("inf")
    gbps = case.num_bytes / us / 1e3
    return Result(
        op=case.op,
        shape=case.shape,
        variant=case.variant,
        us=us,
        gbps=gbps,
        share_of_copy=gbps / copy,
        problem=problem,
    )


def line(result: Result) -> str:
    shape = "x".join(map(str, result.shape))
    wrong = f"  WRONG: {result.problem}" if result.problem else ""
    share = f"{100 * result.share_of_copy:5.1f}%"
    return f"{result.op:30} {shape:>13} {result.variant:36} {result.us:8.1f} {result.gbps:7.0f} {share}{wrong}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(CASES), help="kernels to run, separated by commas")
    parser.add_argument("--shape", default="8b", choices=SHAPES, help="which model's shapes")
    parser.add_argument("--seconds", type=float, default=38.0, help="stop after that long")
    parser.add_argument("--json", type=Path, help="write the rows to this file too")
    arguments = parser.parse_args()
    started, device = time.monotonic(), "cuda"
    torch.manual_seed(0)
    copy = copy_gbps()
    print(
        f"{torch.cuda.get_device_name()}: copy {copy:.0f} GB/s; torch {torch.__version__}, triton {triton.__version__}"
    )
    print(f"{'operation':30} {'shape':>13} {'variant':36} {'us':>8} {'GB/s':>7} of copy")
    results, skipped = [], 0
    for name in arguments.only.split(","):
        for case in CASES[name](*SHAPES[arguments.shape], device):
            if time.monotonic() - started > arguments.seconds:
                skipped += 1
                continue
            results.append(run_case(case, copy))
            print(line(results[-1]), flush=True)
    wrong = sum(result.problem is not None for result in results)
    print(f"{len(results)} rows, {wrong} wrong, {skipped} not reached in {time.monotonic() - started:.0f} s")
    if arguments.json:
        arguments.json.write_text(
            json.dumps(
                {"environment": environment(), "copy_gbps": copy, "rows": [asdict(r) for r in results]}, indent=1
            )
            + "\n"
        )
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
