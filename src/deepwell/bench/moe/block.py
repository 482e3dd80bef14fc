"""One row of the MoE race in this process: a block is made, compared with Hugging Face's, timed and weighed.

Run as a module it is the process of one row: it takes SHAPE WAY DEVICE and prints the row as JSON; several shapes or
ways, with commas between, share the process and what it compiled and proved. Every way has the
same router (softmax in fp32, the largest top_k, their sum 1) before its experts, so that rows differ by experts alone.
"""

import copy
import gc
import importlib
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepwell.bench.moe.shapes import KERNELS, SHAPES, TINY, WAYS, MoEShape
from deepwell.bench.ran import watch
from deepwell.errors import ConfigError
from deepwell.formats.metrics import sqnr_db
from deepwell.kernels.experts import stages
from deepwell.kernels.experts.activation import ExpertActivation
from deepwell.kernels.experts.gain import FLOORS_DB
from deepwell.kernels.experts.mlp import experts_mlp
from deepwell.kernels.experts.torch_ops import places_of_largest
from deepwell.kernels.tune.timing import times_us

_SKEW = 1.2
# Of the profile: steps, and the longest kernels of one. What idles between them is the host's.
_WATCHED, _KERNELS = 4, 16
GPT_OSS = ExpertActivation(interleaved=True, limit=7.0, alpha=1.702, up_shift=1.0)

Experts = Callable[[Tensor, Tensor, Tensor], Tensor]


def experts_of(shape: MoEShape, device: str) -> nn.Module:
    module = importlib.import_module(f"transformers.models.{shape.family}.modeling_{shape.family}")
    name = shape.family.title().replace("_", "")  # as the classes are called
    config = getattr(importlib.import_module("transformers"), f"{name}Config")(
        hidden_size=shape.width,
        intermediate_size=shape.ffn,
        moe_intermediate_size=shape.ffn,
        num_experts=shape.experts,
        num_local_experts=shape.experts,
        num_experts_per_tok=shape.top_k,
    )
    config._experts_implementation = "grouped_mm"
    torch.manual_seed(0)
    with torch.device(device):
        experts: nn.Module = getattr(module, f"{name}Experts")(config).bfloat16()
    for label, parameter in experts.named_parameters():
        fan_in = shape.ffn if label.startswith("down") else shape.width
        nn.init.normal_(parameter, std=0.1 if label.endswith("bias") else fan_in**-0.5)
    experts.config = config
    return experts


def _deepwell(experts: Any, shape: MoEShape, precision: str) -> Experts:
    is_kn = shape.family == "gpt_oss"
    activation = GPT_OSS if is_kn else ExpertActivation()

    def run(x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        up, down = (w.transpose(1, 2) if is_kn else w for w in (experts.gate_up_proj, experts.down_proj))
        biases = (experts.gate_up_proj_bias, experts.down_proj_bias) if is_kn else (None, None)
        return experts_mlp(x, up, down, index, weight, biases=biases, activation=activation, precision=precision)

    return run


def _liger(experts: Any, shape: MoEShape) -> Experts:
    function = _of_peer("liger_kernel.ops.fused_moe", shape).LigerFusedMoEFunction
    return lambda x, index, weight: function.apply(x, experts.gate_up_proj, experts.down_proj, index.int(), weight)


def _scattermoe(experts: Any, shape: MoEShape) -> Experts:
    """As its own block of gated experts calls its two products."""
    peer = _of_peer("scattermoe.parallel_experts", shape)

    def run(x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        up, down = (w.permute(0, 2, 1) for w in (experts.gate_up_proj, experts.down_proj))
        rows = peer.flatten_sort_count(index, num_experts=shape.experts)
        gate, linear = peer.parallel_linear(x, up, shape.top_k, *rows, grouped_out=True).chunk(2, dim=-1)
        return peer.parallel_linear(F.silu(gate) * linear, down, 1, *rows, gates=weight, grouped_in=True)

    return run


def _of_peer(module: str, shape: MoEShape) -> Any:
    if shape.family == "gpt_oss":
        raise ConfigError(f"{module} is run with SwiGLU alone: without biases and clamps")
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(f"not installed: {error.name}") from error


_PEERS = {"liger": _liger, "scattermoe": _scattermoe}


@contextmanager
def entered(way: str, experts: Any, shape: MoEShape) -> Iterator[tuple[Experts, bool]]:
    """(the experts as a way runs them, whether torch.compile goes around the block)."""
    with stages.only(stages.TORCH) if way == "deepwell-torch" else nullcontext():
        if way in ("hf-grouped", "hf-eager"):
            experts.config._experts_implementation = "grouped_mm" if way == "hf-grouped" else "eager"
            yield experts, way == "hf-grouped"
        elif way in _PEERS:
            yield _PEERS[way](experts, shape), False
        else:
            yield _deepwell(experts, shape, "fp8" if way.endswith("fp8") else "bf16"), True


def block_of(experts: Experts, gate: Tensor, top_k: int, way: str) -> Callable[[Tensor], Tensor]:
    """A block that chooses as a way does: bf16 logits have ties, of which torch's kernel and ours take other ones."""
    is_ours = way.startswith("deepwell")

    def run(x: Tensor) -> Tensor:
        scores = torch.softmax(F.linear(x.to(gate.dtype), gate).float(), dim=-1)
        if is_ours:
            index = places_of_largest(scores, top_k)
            weight = scores.gather(1, index)
        else:
            weight, index = scores.topk(top_k)
        return experts(x, index, (weight / weight.sum(-1, keepdim=True)).to(x.dtype))

    return run


def row_of(shape: MoEShape, way: str, device: str, budget_s: float = 1.0) -> dict[str, Any]:
    """The row of one way: milliseconds, TFLOP/s, memory, how near it is to Hugging Face's."""
    experts = experts_of(shape, device)
    gate = (torch.randn(shape.experts, shape.width) * shape.width**-0.5).to(device, torch.bfloat16).requires_grad_()
    x = torch.randn(shape.tokens, shape.width).to(device, torch.bfloat16).requires_grad_()
    dy = torch.randn(shape.tokens, shape.width).to(device, torch.bfloat16)
    leaves = [x, gate, *experts.parameters()]

    def step(run: Callable[[Tensor], Tensor]) -> list[Tensor]:
        y = run(x)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy)]

    wanted = _in_fp32(experts, shape, way, (gate, x, dy))
    row: dict[str, Any] = {"block": shape.name, "way": way}
    with entered(way, experts, shape) as (run_experts, compiles):
        run = block_of(run_experts, gate, shape.top_k, way)
        # A CPU tries the command out: what a compiler makes of it is not the question.
        run = torch.compile(run) if compiles and device == "cuda" else run
        got = step(run)
        # The router's own gradient is a difference of large numbers: FP8 leaves little of it.
        pairs = [(ref, made) for i, (ref, made) in enumerate(zip(wanted, got, strict=True)) if i != 2]
        row["dB"] = min(999.0, *(sqnr_db(ref, made) for ref, made in pairs))  # JSON has no infinity
        del wanted, got, pairs
        if not row["dB"] >= FLOORS_DB["fp8" if way.endswith("fp8") else "bf16"]:
            row["problems"] = [f"wrong: {row['dB']:.1f} dB against Hugging Face's in fp32"]
        row |= _memory(run, step, x) if device == "cuda" else {}
        row["forward ms"] = milliseconds(lambda: run(x), device, budget_s)
        row["ms"] = milliseconds(lambda: step(run), device, budget_s)
        row["TFLOP/s"] = 3e-9 * shape.flops / row["ms"]
        if device == "cuda":
            kernels, row["idle ms"] = watch(lambda: step(run), steps=_WATCHED)
            row["longest"] = [(one.name[:80], one.count, round(one.ms, 3)) for one in kernels[:_KERNELS]]
        row["zipf"] = _skewed(run_experts, shape, (x, dy, [x, *experts.parameters()]), budget_s)
    if way.startswith("deepwell") and device == "cuda":
        row["chosen"] = stages.chosen()
    return row


def _in_fp32(experts: nn.Module, shape: MoEShape, way: str, given: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
    """Output and gradients of the same numbers by Hugging Face's loop in fp32; the router reads bf16 as ever."""
    gate, x, dy = given
    wide: Any = copy.deepcopy(experts).float()
    wide.config._experts_implementation = "eager"
    leaf = x.detach().float().requires_grad_()
    y = block_of(wide, gate, shape.top_k, way)(leaf)
    grads = torch.autograd.grad(y, [leaf, gate, *wide.parameters()], dy.float())
    return [y.detach(), *grads]


def milliseconds(run: Callable[[], object], device: str, budget_s: float) -> float:
    """The median of calls as a training loop launches them: host time counts. A CPU only tries the command out."""
    for _ in range(3 if device == "cuda" else 1):
        run()
    return 1e-3 * statistics.median(times_us(run, torch.device(device), budget_s if device == "cuda" else 0.02))


def _memory(run: Callable[[Tensor], Tensor], step: Callable[..., Any], x: Tensor) -> dict[str, float]:
    """GB beyond weights and input: at the end of the forward, and at the most."""
    gc.collect()
    torch.cuda.synchronize()
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = run(x)
    kept = torch.cuda.memory_allocated() - base
    del y
    step(run)
    return {"after forward GB": 1e-9 * kept, "peak GB": 1e-9 * (torch.cuda.max_memory_allocated() - base)}


def _skewed(run: Experts, shape: MoEShape, given: tuple[Tensor, Tensor, list[Tensor]], budget_s: float) -> float:
    """Time of the experts alone with choices by Zipf's law over that with even ones."""
    x, dy, leaves = given
    took = []
    for exponent in (0.0, _SKEW):
        torch.manual_seed(1)
        likely = -exponent * torch.arange(1, shape.experts + 1).float().log()
        index = (likely - torch.empty(shape.tokens, shape.experts).exponential_().log()).topk(shape.top_k).indices
        weight = torch.full(index.shape, 1 / shape.top_k).to(x)
        given_choices = partial(run, x, index.to(x.device), weight)
        took.append(milliseconds(partial(_backward, given_choices, leaves, dy), x.device.type, budget_s))
    return took[1] / took[0]


def _backward(run: Callable[[], Tensor], leaves: list[Tensor], dy: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(run(), leaves, dy)


def main(names: str, ways: str, device: str) -> None:
    """A line for each shape and way; several of either are written with commas between."""
    shapes = SHAPES | TINY
    for given, known in ((names.split(","), [*shapes]), (ways.split(","), [*WAYS, KERNELS])):
        if unknown := [word for word in given if word not in known]:
            raise ConfigError(f"{unknown[0]!r} is none of {', '.join(known)}")
    for name, way in itertools.product(names.split(","), ways.split(",")):
        shape = shapes[name]
        torch._dynamo.reset()
        if way == KERNELS:
            from deepwell.bench.moe.kernels import rows_of

            print(json.dumps(rows_of(shape, device)), flush=True)
        else:
            print(json.dumps(row_of(shape, way, device)), flush=True)
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main(*sys.argv[1:])
