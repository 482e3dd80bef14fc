"""The whole pipeline on one small model: what this machine is, what the model is, which format each GEMM gets, how
exactly each GEMM of a real step comes out in it, and one training run twice: as the model is, and through the engine.

    python recipes/demo.py [--out DIR] [--recipe mxfp8]

Everything it prints is computed here and now, on this machine; the results stay in DIR as JSON.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn

import deepwell as dw
from deepwell.formats.metrics import sqnr_db
from deepwell.precision import PrecisionPolicy
from deepwell.train.optim import AdamWDW
from llama import TINY, Llama
from text import batches, standard_library_bytes

FORMATS = ("fp8_e4m3_tensor", "fp8_e4m3_row", "fp8_e4m3_1x128", "mxfp8", "mxfp6", "mxfp4", "nvfp4")


def operands(model: Llama, tokens: Tensor, targets: Tensor) -> tuple[float, dict[str, dict[str, Tensor]]]:
    """One forward and backward; the input, weight and output gradient of every linear, by module path."""
    kept: dict[str, dict[str, Tensor]] = {}
    handles = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):

            def keep(module: nn.Module, args: tuple[Tensor], out: Tensor, name: str = name) -> None:
                kept[name] = {"x": args[0].detach().flatten(0, -2), "w": module.weight.detach()}
                out.register_hook(lambda g, name=name: kept[name].update(dy=g.detach().flatten(0, -2)))

            handles.append(module.register_forward_hook(keep))
    loss = model(tokens, targets)
    loss.backward()
    for handle in handles:
        handle.remove()
    return loss.item(), kept


def products(kept: dict[str, Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """The three GEMMs of a linear as (name, left, right), both operands laid out along the contraction."""
    x, w, dy = kept["x"], kept["w"], kept["dy"]
    yield "fwd", x, w
    yield "dgrad", dy, w.T
    yield "wgrad", dy.T, x.T


def gemm_sqnr(left: Tensor, right: Tensor, fmt: str) -> float:
    """SQNR in dB of left @ right.T with both operands quantized exactly, against the product in fp32."""
    exact = left @ right.T
    if fmt == "bf16":
        got = left.bfloat16().float() @ right.bfloat16().float().T
    else:
        got = dw.quantize(left.contiguous(), fmt).dequantize() @ dw.quantize(right.contiguous(), fmt).dequantize().T
    return sqnr_db(exact, got)


def numerics(kept: dict[str, dict[str, Tensor]], console: Console) -> dict[str, dict[str, dict[str, float]]]:
    """SQNR of every GEMM of every linear in every format."""
    results: dict[str, dict[str, dict[str, float]]] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("GEMMs in every format", total=len(kept) * 3 * (len(FORMATS) + 1))
        for name, tensors in kept.items():
            results[name] = {}
            for step, left, right in products(tensors):
                results[name][step] = {}
                for fmt in ("bf16", *FORMATS):
                    results[name][step][fmt] = gemm_sqnr(left.float(), right.float(), fmt)
                    progress.advance(task)
    return results


def numerics_table(results: dict[str, dict[str, dict[str, float]]]) -> Table:
    table = Table(title="SQNR in dB of the step's GEMMs against fp32, worst layer (mean)", title_justify="left")
    table.add_column("GEMM")
    for fmt in ("bf16", *FORMATS):
        table.add_column(fmt.replace("fp8_e4m3_", "fp8 "), justify="right")
    for step in ("fwd", "dgrad", "wgrad"):
        cells = []
        for fmt in ("bf16", *FORMATS):
            values = [layer[step][fmt] for layer in results.values()]
            cells.append(f"{min(values):.1f} ({sum(values) / len(values):.1f})")
        table.add_row(step, *cells)
    return table


def train(step_fn: Callable[..., Tensor], model: Llama, data: list[tuple[Tensor, Tensor]], task: str, console: Console):
    """Train `model` through `step_fn` (itself, or its engine) with Deepwell's AdamW; the loss of every step."""
    optimizer = AdamWDW(model.parameters(), lr=1e-3, moments="fp32")
    losses = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        for tokens, targets in progress.track(data, description=task):
            loss = step_fn(tokens, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="where the results go")
    parser.add_argument("--steps", type=int, default=30, help="training steps of each run")
    parser.add_argument("--recipe", default="mxfp8", help="precision recipe: bf16, fp8, mxfp8, nvfp4")
    args = parser.parse_args()
    console = Console()
    args.out.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()

    console.rule("1  probe: what this machine is")
    hw = dw.probe()
    console.print(str(hw), highlight=False, markup=False, soft_wrap=True)
    (args.out / "hardware.json").write_text(hw.to_json())

    console.rule("2  capture: what the model is")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = Llama(TINY).init_weights().to(device)
    text = standard_library_bytes()
    data = [(x.to(device), y.to(device)) for x, y in batches(text, batch=2, seq_len=256, count=args.steps)]
    tokens, targets = data[0]
    ir = dw.capture(model, (tokens, targets))
    console.print(str(ir), highlight=False, markup=False, soft_wrap=True)
    (args.out / "ir.json").write_text(ir.to_json())

    console.rule("3  policy: which format each GEMM gets")
    policy = PrecisionPolicy.recipe(args.recipe)
    console.print(str(policy.explain(ir)), highlight=False, markup=False, soft_wrap=True)
    (args.out / "policy.json").write_text(policy.to_json())

    console.rule(f"4  numbers: one training step on {len(text) / 1e6:.1f} MB of the standard library's sources")
    loss, kept = operands(model, tokens, targets)
    results = numerics(kept, console)
    console.print(f"loss {loss:.4f} at random weights (uniform guess {torch.tensor(float(TINY.vocab)).log():.4f})")
    console.print(numerics_table(results))
    (args.out / "numerics.json").write_text(json.dumps({"loss": loss, "sqnr_db": results}, indent=1))

    console.rule(f"5  compile and train: {args.steps} steps as it is, and through the engine")
    plain = train(model, model, data, "as it is", console)
    engine = dw.compile(dw.capture(Llama(TINY).init_weights().to(device), (tokens, targets)), precision_policy=policy)
    engined = train(engine, engine.model, data, f"engine, {args.recipe}", console)
    console.print(str(engine.report()), highlight=False, markup=False, soft_wrap=True)
    gap = abs(engined[-1] - plain[-1]) / plain[-1]
    console.print(
        f"loss after {args.steps} steps: {plain[-1]:.4f} as it is, {engined[-1]:.4f} engine ({gap:.2%} apart)"
    )
    (args.out / "training.json").write_text(json.dumps({"plain": plain, "engine": engined}, indent=1))
    (args.out / "report.json").write_text(engine.report().to_json())

    files = "\n".join(f"{path}  {path.stat().st_size:,} bytes" for path in sorted(args.out.glob("*.json")))
    console.print(Panel(files, title=f"results, after {time.perf_counter() - start:.0f} s", title_align="left"))


if __name__ == "__main__":
    main()
