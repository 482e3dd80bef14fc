"""The zoo: trace every causal language model of transformers on a tiny config, and say how each was captured; or run
models of every task by an engine.

    python benchmarks/zoo.py                         all of them, two at a time
    python benchmarks/zoo.py --only llama,gpt2       some of them
    python benchmarks/zoo.py --json zoo.json         the table as JSON too
    python benchmarks/zoo.py --experts               how the experts of the MoE models among them run in an engine
    python benchmarks/zoo.py --engine                a loss and all gradients of each by an engine, beside eager
    python benchmarks/zoo.py --engine --task ctc     of the models of another task; `all` for all tasks

A model counts as `graph` when one graph came back, the weight of every Linear and Conv1D that the eager forward calls
is an input of it, and running it gives what the model gives eagerly (1e-5 in fp32, the same attention and experts
implementation on both sides, dropout on with the same random numbers unless the graph is of evaluation mode). `static`
means that no tracer gave a graph: capture then walks the modules instead. `error` is everything else: a wrong output, a
missing weight, a crash, a timeout. Each model runs in a process of its own.

`--experts` builds each model and reads its experts as the engine does: `fused` where all of FP8 is one op,
`one function` where `experts_mlp` runs them with grouped GEMMs inside, `grouped` where their gate is none that is
known. Where they are not of Hugging Face's experts interface an engine runs the model in the formats of a Hopper GPU,
by the kernels' references: `fused` again, `product by product`, or `as written` where a format was not met. Nothing
else is compiled.

`--engine` compiles each model twice. `exact`: in fp32 under the bf16 policy, where every pass rewrites and nothing is
rounded, each parameter's gradient is eager's up to the order of sums (1e-4 of its norm); under mxfp8 it is that of the
model as written whose linears round their operands one by one, by the reference quantizers, up to single values that
fall to the other side (1e-2). A model that is further apart may be so twice as far as its own gradients move when its
weights and what linears read do by a unit in the last place, or, in fp32, as those of torch's `aot_eager` are; the row
then says how far that is. Where more than linears is in mxfp8 (experts), and where the graph broke, a cosine above 0.9
is enough. `error` is everything else.
Dropout is off. Weights whose gradient is zero count as those without one. `not run` are models that need libraries
which are not there, or that no batch was found for. A process past `--timeout` or `--memory` is ended. `--json` is
written after each model, and what it has of earlier runs is not run again, errors apart.
"""

import argparse
import importlib
import inspect
import json
import math
import multiprocessing
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parent.parent
TOLERANCE = 1e-5
# They hand SDPA no mask in eager mode and see later tokens; compiled, by whomever, they do not.
UNMASKED = ("doge", "umt5", "gemma4_assistant", "gemma4_unified_assistant")
# Of a gradient's norm: sums in another order; and single values that MXFP8 then rounds to the other side.
_APART = {"bf16": 1e-4, "mxfp8": 1e-2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What became of one model."""

    task: str = "causal-lm"
    model_type: str
    model_class: str
    status: str
    way: str = ""
    graphs: int = 0
    nodes: int = 0
    seconds: float = 0.0
    specialized: bool = False
    notes: str = ""


def load_zoo_models(name: str = "zoo_models") -> Any:
    """The tiny configs live with the tests, which use them too."""
    path = str(ROOT / "tests" / "graph")
    if path not in sys.path:
        sys.path.insert(0, path)
    return importlib.import_module(name)


# ---- one model, in its own process ----


def examine(model_type: str) -> Row:
    """Build, run eagerly, trace, run the graph, compare."""
    import torch

    from deepwell.graph.trace import TraceError, trace

    zoo = load_zoo_models()
    torch.set_num_threads(1)
    model = zoo.tiny_model(model_type)
    inputs = zoo.example_inputs(model_type, model)
    name = type(model).__name__
    torch.manual_seed(1)
    start = time.perf_counter()
    try:
        traced = trace(model, inputs, deduplicate=False)  # without most of its layers it would compute something else
    except TraceError as error:
        seconds = time.perf_counter() - start
        return Row(
            model_type=model_type, model_class=name, status="static", seconds=seconds, notes=str(error.attempts[0])
        )
    seconds = time.perf_counter() - start
    outputs = run_graph(model, traced, inputs)
    expected, used = run_eagerly(model, inputs, training=traced.training)
    missing = sorted(used - traced.parameter_names)
    difference, remarks = compare(expected, outputs), [str(attempt) for attempt in traced.attempts[:1]]
    if difference:
        # Some models hand SDPA no mask in eager mode and lose what the mask would say (doge sees later tokens); when
        # compiled they make the mask. Spelled-out attention, which always has it, is then the reference.
        spelled_out, _ = run_eagerly(model, inputs, training=traced.training, attention="eager")
        if not compare(spelled_out, outputs):
            remarks, difference = [f"equal to attention spelled out; to eager SDPA: {difference}", *remarks], ""
    problems = [f"weights not in the graph: {', '.join(missing[:3])}"] if missing else []
    problems += [difference] if difference else []
    return Row(
        model_type=model_type,
        model_class=name,
        status="error" if problems else "graph",
        way=traced.tracer,
        graphs=1,
        nodes=len(traced.graph.nodes),
        seconds=seconds,
        specialized=traced.specialized,
        notes="; ".join(problems or remarks),
    )


def run_graph(model: Any, traced: Any, inputs: Any) -> list[Any]:
    """The tensors that a traced graph returns for the model's own weights and the call that it was traced with."""
    import torch
    from torch.utils import _pytree as pytree

    from deepwell.graph.example_inputs import resolve_inputs
    from deepwell.graph.preserve import preserved

    call = resolve_inputs(model, inputs, 2, None)
    weights = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    known = {**call.kwargs, **call.named_tensors(model), **weights}
    with preserved(model, values=True):
        torch.manual_seed(1)
        outputs = traced.graph_module(*(known[placeholder.name] for placeholder in traced.placeholders))
    tensors = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
    return [*tensors, *call.named_tensors(model).values()]  # a model may return what it was given


def run_eagerly(model: Any, inputs: Any, *, training: bool, attention: str | None = None) -> tuple[Any, set[str]]:
    """The model's own output and the names of the Linear and Conv1D weights that its forward calls."""
    import torch
    from transformers.pytorch_utils import Conv1D

    from deepwell.graph.example_inputs import resolve_inputs
    from deepwell.graph.preserve import choose_traceable_implementations, model_configs, preserved

    used: set[str] = set()
    call = resolve_inputs(model, inputs, 2, None)
    with preserved(model, values=True):
        choose_traceable_implementations(model)
        model.train(training)
        for config in model_configs(model) if attention else ():
            config._attn_implementation_internal = attention
        for name, module in model.named_modules():
            if isinstance(module, (torch.nn.Linear, Conv1D)):
                module.register_forward_pre_hook(lambda _module, _args, name=name: used.add(f"{name}.weight"))
        torch.manual_seed(1)
        output = model(*call.args, **call.kwargs)
    return output, used


def compare(expected: Any, got: list[Any]) -> str:
    """Empty if every tensor that a model returns is among those of its graph, else what differs."""
    import torch

    leaves = named_leaves(expected)
    for name, value in leaves.items():
        if not torch.isfinite(value.float()).any():
            return f"{name} is not finite in eager mode"
        alike = [tensor.detach().float() for tensor in got if tensor.shape == value.shape]
        if not alike:
            return f"nothing has the shape {tuple(value.shape)} of {name}"
        if not any(torch.allclose(t, value.float(), rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True) for t in alike):
            return f"{name} differs from eager by {min((t - value.float()).abs().max() for t in alike):.2g}"
    return "" if leaves else "the model returns no tensor"


def named_leaves(output: Any) -> dict[str, Any]:
    import torch
    from torch.utils import _pytree as pytree

    leaves = pytree.tree_flatten_with_path(output)[0]
    return {pytree.keystr(path): leaf.detach() for path, leaf in leaves if isinstance(leaf, torch.Tensor)}


def failed(name: str, reason: str, seconds: float = 0.0) -> Row:
    """A row of what gave no answer; `name` is task/model type, or a model type alone."""
    task, _, model_type = name.rpartition("/")
    kind = {"task": task} if task else {}
    return Row(**kind, model_type=model_type, model_class="", status="error", seconds=seconds, notes=reason)


def work(name: str, look: Callable[[str], Row], answer: Connection) -> None:
    """Entry of a worker process: anything that goes wrong becomes a row, for the run must go on."""
    import transformers

    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)  # the file descriptors, since log handlers hold the streams
    os.dup2(silence, 2)
    try:
        row = look(name)
    except BaseException as error:  # a process boundary: whatever ends this worker is its result
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        row = failed(name, reason)
    answer.send(row)
    answer.close()


# ---- how experts run ----


def examine_experts(model_type: str) -> Row | None:
    """How the engine runs a model's experts and why not better; None where it has none."""

    from deepwell.kernels.experts.mlp import is_fused_in_fp8
    from deepwell.moe.hugging_face import activation_of, chooses_experts

    zoo = load_zoo_models()
    model = zoo.tiny_model(model_type)
    ways: dict[str, str] = {}
    others = set()
    for module in model.modules():
        has_weights = any(p.dim() > 1 for p in module.parameters(recurse=False))
        if chooses_experts(module):
            how = activation_of(module)
            names = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
            weights = [getattr(module, name).transpose(1, 2) if module.is_transposed else getattr(module, name)
                       for name in names] if how else []  # fmt: skip
            if how is None:
                ways["grouped"] = "its gate is none that is known"
            elif is_fused_in_fp8(*weights):
                ways["fused"] = str(how)
            else:
                ways["one function"] = "its weights lie in neither order"
        elif has_weights and "expert" in type(module).__name__.lower():
            others.add(type(module).__name__)
    if others:
        way, why = run_experts_of(model, zoo.example_inputs(model_type, model))
        ways[way] = f"{', '.join(sorted(others))}: {why}"
    if not ways:
        return None
    order = ("as written", "product by product", "grouped", "one function", "fused")
    worst = next(way for way in order if way in ways)
    return Row(model_type=model_type, model_class=type(model).__name__, status=worst, notes=ways[worst])


def run_experts_of(model: Any, inputs: Any) -> tuple[str, str]:
    """(way, why) of experts outside of the interface, seen in a step by an engine with the formats of a Hopper GPU."""
    import torch

    import deepwell as dw
    from deepwell.engine import compile as compiling
    from deepwell.engine.binding import GROUPED_FP8, Target
    from deepwell.graph.example_inputs import resolve_inputs

    compiling.device_of = lambda tensors: Target(kind="cuda", capability=(9, 0))
    compiling.measured_fallback = lambda *args: None
    torch._dynamo.reset()
    engine = dw.compile(model.bfloat16(), precision="mxfp8", inductor=False)
    call = resolve_inputs(model, inputs, 2, None)
    engine(*call.args, **call.kwargs)
    report = engine.deepwell.report()
    left = [row for row in report.bindings if "expert" in row.path and row.binding != "native" and row.scheme == "bf16"]
    if left:
        return "as written", left[0].reason
    notes = [note.partition("padded for each: ")[2] for note in report.notes if "product by product" in note]
    return ("product by product", notes[0]) if notes else ("fused", GROUPED_FP8)


def count_experts(model_types: list[str]) -> int:
    """Print a row for each model with experts, and how many run which way."""
    rows = [row for row in map(examine_experts, model_types) if row is not None]
    for row in rows:
        print(f"{row.model_type:24} {row.status:20} {row.notes}")
    counts = Counter(row.status for row in rows)
    print(f"{len(rows)} models with experts: {', '.join(f'{count} {way}' for way, count in counts.most_common())}")
    return 0


# ---- a step by an engine ----


def examine_engine(name: str) -> Row:
    """Loss and gradients of one step by engines in bf16 mode and mxfp8, beside those of the model as written."""
    import torch

    import deepwell as dw
    from deepwell.engine import compile as compiling
    from deepwell.engine.binding import further_uses
    from deepwell.graph.preserve import model_configs

    compiling.PLAIN_ON_CPU = False  # a CPU would run bf16 mode as written; the passes are the question
    task, model_type = name.split("/") if "/" in name else ("causal-lm", name)
    torch.set_num_threads(1)
    try:
        model, batch = load_zoo_models("zoo_tasks").tiny_model(task, model_type)
    except (LookupError, ImportError) as error:
        return Row(task=task, model_type=model_type, model_class="", status="not run", notes=str(error)[:300])
    without_dropout(model)
    for config in model_configs(model) if model_type in UNMASKED else ():
        config._attn_implementation_internal = "eager"
    start = time.perf_counter()
    wanted = step_of(model, model, batch)
    again = step_of(model, model, batch)
    fill(wanted[1], again[1])
    noise = furthest(wanted[1], again[1])[0]
    problems, notes, graphs = [], [], 0
    for precision in ("bf16", "mxfp8"):
        torch._dynamo.reset()
        engine = dw.compile(model, precision=precision)
        found = step_of(engine, model, batch)
        report = engine.deepwell.report()
        graphs = max(graphs, report.graphs)
        rounded = {row.path for row in report.bindings if row.binding == "emulated"}
        linears = linears_of(model, rounded - set(further_uses(engine.deepwell.ir)))
        with rounding(linears or ()):
            if linears:
                wanted = step_of(model, model, batch)
            fill(wanted[1], found[1])
            gap, (apart, where) = abs(found[0] / wanted[0] - 1), furthest(wanted[1], found[1])
            cosine = cosine_of(wanted[1], found[1])
            asked = {row.path for row in report.bindings if row.format == "mxfp8"}
            low = f" ({len(rounded)} of {len(asked)} products)" if asked else ""
            notes.append(f"{precision}{low}: loss {gap:.1e}, gradients {apart:.1e} ({where}), cosine {cosine:.4f}")
            is_right = gap < 1e-5 and apart < max(_APART[precision], 4 * noise)
            if not is_right and linears is not None:
                own_gap, own = moved_by_a_unit(model, batch, wanted)
                if precision == "bf16" and apart >= 2 * own:  # AOTAutograd sums in another order, too
                    by_torch = step_of(torch.compile(model, backend="aot_eager"), model, batch)
                    own = max(own, distance(wanted, by_torch)[1])
                is_right = gap < max(1e-5, 2 * own_gap) and apart < 2 * own
                notes[-1] += f"; torch's own, or a unit in the last place: loss {own_gap:.1e}, gradients {own:.1e}"
        has_others = linears is None or any("broke the graph" in note for note in report.notes)
        if precision == "mxfp8" and has_others:  # eager parts round nothing in a backward that recomputes them
            is_right = is_right or (gap < 0.05 and cosine > 0.9)
        problems += [] if is_right else [notes[-1]]
    return Row(
        task=task,
        model_type=model_type,
        model_class=type(model).__name__,
        status="error" if problems else "exact",
        graphs=graphs,
        seconds=time.perf_counter() - start,
        notes="; ".join(problems or notes),
    )


def moved_by_a_unit(model: Any, batch: Any, wanted: tuple[float, dict[str, Any]]) -> tuple[float, float]:
    """How far loss and gradients move where weights, and what linears read, move by up to a unit in their last place.

    Others are as far apart for a sum in another order: a batch norm of a few numbers, a rounding that falls elsewhere.
    """
    import torch

    generator = torch.Generator().manual_seed(0)

    def moved(x: Any) -> Any:
        return x * (1 + torch.finfo(x.dtype).eps * (2 * torch.rand(x.shape, generator=generator) - 1))

    kept = [p.detach().clone() for p in model.parameters()]
    linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    hooks = [module.register_forward_pre_hook(lambda _, inputs: (moved(inputs[0]),)) for module in linears]
    found = []
    for _ in range(3):  # one value that is rounded elsewhere makes the difference, or none does
        with torch.no_grad():
            for p, value in zip(model.parameters(), kept, strict=True):
                p.copy_(moved(value))
        found.append(distance(wanted, step_of(model, model, batch)))
    for hook in hooks:
        hook.remove()
    with torch.no_grad():
        for p, value in zip(model.parameters(), kept, strict=True):
            p.copy_(value)
    return max(gap for gap, _ in found), max(apart for _, apart in found)


def distance(wanted: tuple[float, dict[str, Any]], got: tuple[float, dict[str, Any]]) -> tuple[float, float]:
    """How far loss and gradients of two steps are apart."""
    before = dict(wanted[1])
    fill(before, got[1])
    return abs(got[0] / wanted[0] - 1), furthest(before, got[1])[0]


def linears_of(model: Any, paths: set[str]) -> set[Any] | None:
    """The modules at those paths; None where one is no linear."""
    import torch
    from transformers.pytorch_utils import Conv1D

    modules = dict(model.named_modules(remove_duplicate=False))
    found = {modules.get(path) for path in paths}
    return found if all(type(module) in (torch.nn.Linear, Conv1D) for module in found) else None


@contextmanager
def rounding(linears: set[Any]) -> Iterator[None]:
    """Within it these modules round both operands of each of their three products to MXFP8, along what is summed."""
    import torch

    from deepwell.formats.quantize import dequantize, quantize

    def rounded(x: Any, axis: int) -> Any:
        return dequantize(quantize(x, "mxfp8", axis=axis), x.dtype)

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, w: Any) -> Any:
            ctx.save_for_backward(x, w)
            return rounded(x, 1) @ rounded(w, 1).T

        @staticmethod
        def backward(ctx: Any, dy: Any) -> Any:
            x, w = ctx.saved_tensors
            return rounded(dy, 1) @ rounded(w, 0), rounded(dy, 0).T @ rounded(x, 0)

    def forward(module: Any, x: Any) -> Any:
        w = module.weight if isinstance(module, torch.nn.Linear) else module.weight.T
        y = Product.apply(x.reshape(-1, x.shape[-1]), w).view(*x.shape[:-1], w.shape[0])
        return y if module.bias is None else y + module.bias

    for module in linears:
        module.forward = partial(forward, module)
    try:
        yield
    finally:
        for module in linears:
            del module.forward


def step_of(run: Any, model: Any, batch: Any) -> tuple[float, dict[str, Any]]:
    """(loss, gradients by name) of one call."""
    import numpy
    import torch

    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    random.seed(1)
    numpy.random.seed(1)
    takes_cache = "use_cache" in inspect.signature(model.forward).parameters
    out = run(**batch, **({"use_cache": False} if takes_cache else {}))
    loss = load_zoo_models("zoo_tasks").loss_of(out)
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    # Of a weight that nothing of the loss has read a compiler gives zeros, eager mode nothing.
    return loss.item(), {name: grad for name, grad in grads.items() if grad.any()}


def fill(*sides: dict[str, Any]) -> None:
    """Give each side zeros for what only another has: sums that cancel are zero in one order, rounding in another."""
    for name in {name for side in sides for name in side}:
        known = next(side[name] for side in sides if name in side)
        for side in sides:
            side.setdefault(name, known.new_zeros(known.shape))


def furthest(wanted: dict[str, Any], got: dict[str, Any]) -> tuple[float, str]:
    """(the largest error of a gradient over its norm, whose); of tiny ones over a share of the norm of all."""
    norms = {name: float(grad.double().norm()) for name, grad in wanted.items()}
    least = 1e-4 * math.hypot(*norms.values())
    apart = {name: float((got[name].double() - wanted[name].double()).norm()) for name in wanted}
    return max((apart[name] / max(norms[name], least), name) for name in wanted)


def cosine_of(wanted: dict[str, Any], got: dict[str, Any]) -> float:
    import torch

    one, other = (torch.cat([grads[key].double().flatten() for key in wanted]) for grads in (wanted, got))
    return float(torch.nn.functional.cosine_similarity(one, other, dim=0))


def without_dropout(model: Any) -> Any:
    import torch

    from deepwell.graph.preserve import model_configs

    for module in (*model.modules(), *model_configs(model)):
        for key, value in list(vars(module).items()):
            if any(word in key for word in ("dropout", "layerdrop", "drop_path", "drop_prob")) and isinstance(
                value, float
            ):
                setattr(module, key, 0.0)
        if isinstance(module, (torch.nn.Dropout, torch.nn.Dropout2d)):
            module.p = 0.0
    return model.train()


# ---- all of them ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How many processes at a time, and the seconds and GB of each."""

    jobs: int
    timeout: float
    memory: float

    def broken_by(self, pid: int | None, started: float) -> str:
        """What a process is past, or ""."""
        if time.perf_counter() - started > self.timeout:
            return f"no answer after {self.timeout:.0f} s"
        try:
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        except (OSError, IndexError):  # it has just ended, or this is no Linux
            return ""
        taken = pages * os.sysconf("SC_PAGE_SIZE") / 1e9
        return f"it took {taken:.1f} GB" if taken > self.memory else ""


def run_all(names: list[str], look: Callable[[str], Row], bounds: Bounds, on_row: Any) -> list[Row]:
    """Look at each model in a fork of this process; a worker past its bounds is ended."""
    import torch
    import torch._dynamo  # imported once here, so that no fork pays for it, and edits during a run do not mix in
    import transformers  # noqa: F401

    import deepwell.graph.trace  # noqa: F401

    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    waiting, running, rows = list(names), {}, []
    while waiting or running:
        while waiting and len(running) < bounds.jobs:
            name = waiting.pop(0)
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=work, args=(name, look, sender))
            process.start()
            sender.close()
            running[receiver] = (name, process, time.perf_counter())
        ready = wait(list(running), timeout=0.5)
        for receiver, (name, process, started) in list(running.items()):
            broken = bounds.broken_by(process.pid, started) if receiver not in ready else ""
            if receiver not in ready and not broken:
                continue
            row = failed(name, broken, time.perf_counter() - started) if broken else receive(receiver, name)
            process.kill() if broken else process.join()
            receiver.close()
            del running[receiver]
            rows.append(row)
            on_row(row)
    return sorted(rows, key=lambda row: (row.task, row.model_type))


def receive(receiver: Connection, name: str) -> Row:
    try:
        return receiver.recv()
    except EOFError:
        return failed(name, "the process died")


def show(rows: list[Row], seconds: float) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("model type", "result", "way", "graphs", "nodes", "seconds", "notes", title="Models of transformers")
    colors = {"graph": "green", "exact": "green", "static": "yellow", "not run": "yellow", "error": "red"}
    for row in rows:
        result = f"[{colors[row.status]}]{row.status}[/]"
        way = row.way + (" (values)" if row.specialized else "")
        name = row.model_type if row.task == "causal-lm" else f"{row.task}/{row.model_type}"
        table.add_row(name, result, way, str(row.graphs), str(row.nodes), f"{row.seconds:.1f}", row.notes[:160])
    console = Console(width=None if sys.stdout.isatty() else 220)
    console.print(table)
    console.print(summary(rows, seconds))


def summary(rows: list[Row], seconds: float) -> str:
    status = Counter(row.status for row in rows)
    if status["exact"] or status["not run"]:
        run = len(rows) - status["not run"]
        rest = f", {status['not run']} not run" if status["not run"] else ""
        return f"{status['exact']} of {run} exact, {status['error']} errors{rest}, {seconds:.0f} s"
    ways = Counter(row.way for row in rows if row.status == "graph")
    fixed = sum(row.specialized for row in rows if row.status == "graph")
    share = 100 * status["graph"] / max(1, len(rows))
    by_way = ", ".join(f"{count} by {way}" for way, count in ways.most_common())
    return (
        f"{status['graph']} of {len(rows)} as graphs ({share:.1f} %: {by_way}; {fixed} only for the example's values), "
        f"{status['static']} static, {status['error']} errors, {seconds:.0f} s"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="model types, separated by commas")
    parser.add_argument("--task", default="causal-lm", help="with --engine: tasks, separated by commas, or all")
    parser.add_argument("--json", type=Path, help="write the rows here as JSON")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--timeout", type=float, default=180, help="seconds for one model")
    parser.add_argument("--memory", type=float, default=3, help="GB for one model")
    parser.add_argument("--experts", action="store_true", help="how experts run in an engine; compiles nothing")
    parser.add_argument("--engine", action="store_true", help="a loss and its gradients by an engine, beside eager")
    options = parser.parse_args()
    only = options.only.split(",") if options.only else None
    if options.experts:
        return count_experts(only or list(load_zoo_models().model_types()))
    if options.engine:
        chosen, done = not_yet_run(options.task, only, options.json)
    else:
        chosen, done = only or list(load_zoo_models().model_types()), []
    bounds = Bounds(jobs=options.jobs, timeout=options.timeout, memory=options.memory)
    start = time.perf_counter()
    ran: list[Row] = []

    def keep() -> None:
        if options.json:
            from deepwell.bench.environment import environment

            rows = sorted([*done, *ran], key=lambda row: (row.task, row.model_type))
            kept = {"environment": environment(), "summary": summary(rows, sum(row.seconds for row in rows))}
            options.json.write_text(json.dumps({**kept, "rows": [asdict(row) for row in rows]}, indent=1))

    with progress() as bar:
        task = bar.add_task("compiling" if options.engine else "tracing", total=len(chosen), last="")

        def report(row: Row) -> None:
            bar.update(task, advance=1, last=f"{row.model_type}: {row.status}")
            if not sys.stdout.isatty():  # a log file shows no bar
                name = f"{row.task}/{row.model_type}" if options.engine else row.model_type
                print(name, row.status, row.way, f"{row.seconds:.1f} s", row.notes[:200], flush=True)
            ran.append(row)
            keep()

        rows = run_all(chosen, examine_engine if options.engine else examine, bounds, report)
    show(rows, time.perf_counter() - start)
    keep()
    return 0 if all(row.status in ("graph", "exact", "not run") for row in rows) else 1


def not_yet_run(tasks: str, only: list[str] | None, path: Path | None) -> tuple[list[str], list[Row]]:
    """Models as task/type, without those that the JSON at `path` has an answer for, and the rows of these."""
    zoo = load_zoo_models("zoo_tasks")
    chosen = ["causal-lm", *zoo.TASKS] if tasks == "all" else tasks.split(",")
    names = [f"{task}/{name}" for task in chosen for name in zoo.model_types(task) if only is None or name in only]
    kept = json.loads(path.read_text())["rows"] if path is not None and path.exists() else []
    known = {f"{row.task}/{row.model_type}": row for row in (Row(**row) for row in kept)}
    waiting = [name for name in names if name not in known or known[name].status == "error"]
    return waiting, [row for name, row in known.items() if name not in waiting]


def progress() -> Any:
    from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[last]}"))
    return Progress(*Progress.get_default_columns(), *columns)


if __name__ == "__main__":
    sys.exit(main())
