"""Expert parallelism: each rank holds some of every layer's experts, and tokens travel to the ranks of theirs.

    rows of this rank, sorted by expert  --all-to-all-->  rows of all ranks for the local experts
    the module's own grouped forward, one expert a row, in a compiled region
    its output  --all-to-all-->  back to the rows' ranks, summed over each token's experts

How many rows go where is known when the router has spoken: both exchanges are eager, the host reads their sizes once a
layer, and what lies between them is a region whose graph takes any number of rows. The parameters of experts are
DTensors, `Shard(0)` on the ep mesh.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from deepwell.engine.engine import Engine
from deepwell.engine.regions import REASON, has_module
from deepwell.errors import ConfigError, UnsupportedError
from deepwell.graph.ir import IR
from deepwell.graph.ops import GroupedLinear
from deepwell.train.parallel.mesh import Meshes

Forward = Callable[..., Any]
# What the modules have that Hugging Face's choice of an implementation works with: one forward for all of them.
_INTERFACE = ("num_experts", "has_gate", "has_bias", "is_transposed")
# Dynamo makes graphs of their own for sizes 0 and 1, and products of no rows are a case that few kernels know.
_LEAST_ROWS = 2


class Exchange(torch.autograd.Function):
    """All-to-all of rows with other counts for each rank; the gradient goes the same way back.

    On plain tensors: those that functional collectives return are not ready yet, and a compiled region that takes one
    gives it no gradient.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, received: list[int], sent: list[int], group: Any) -> Tensor:
        ctx.way_back = (sent, received, group)
        out = rows.new_empty((sum(received), *rows.shape[1:]))
        dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return Exchange.apply(grads[0], *ctx.way_back), None, None, None


def find_experts(ir: IR, model: nn.Module) -> tuple[str, ...]:
    """The paths of the modules that hold experts, as the IR has them and the model (a stage may lack some layers).

    Raises UnsupportedError where a model's experts are not of Hugging Face's interface.
    """
    found: dict[str, None] = {}
    for site in ir.sites():
        if not isinstance(site.op, GroupedLinear):
            continue
        path = site.path.rpartition(".")[0]
        whole = path if site.layer is None else ir.layers[site.layer].path
        if not has_module(model, whole):
            continue
        module = model.get_submodule(path) if has_module(model, path) else None
        missing = [name for name in _INTERFACE if not hasattr(module, name)]
        if module is None or missing:
            kind = type(model.get_submodule(whole)).__name__ if module is None else type(module).__name__
            raise UnsupportedError(
                f"ep: the experts of {ir.name} ({kind} at {site.path}) are not of Hugging Face's experts interface "
                "(gate_up_proj and down_proj of all experts in one tensor each); leave ep at 1"
            )
        found[path] = None
    if not found and not any(isinstance(op, GroupedLinear) for ops, _ in ir.parts() for op in ops):
        raise ConfigError(f"ep: {ir.name} has no experts; leave ep at 1")
    return tuple(found)


def distribute_experts(engine: Engine, meshes: Meshes) -> tuple[str, ...]:
    """Leave each rank of the ep mesh its experts, as DTensors, in place. Returns the paths of the modules.

    Call it before `Engine.use_regions(inner=paths)`, and `connect_experts` after it.
    """
    layout, model, mesh = meshes.layout, engine.deepwell.model, meshes.experts["ep"]
    for name, value in (("etp", layout.etp), ("tp", layout.tp)):
        if value > 1:
            raise UnsupportedError(f"ep {layout.ep} with {name} {value} is not executed; leave {name} at 1")
    paths = find_experts(engine.deepwell.ir, model)
    for path in paths:
        module: Any = model.get_submodule(path)
        if module.num_experts % layout.ep:
            raise ConfigError(
                f"ep is {layout.ep} and {path} has {module.num_experts} experts; ep must divide their number"
            )
        for owner, name, parameter in _parameters(module):
            if parameter.dim() == 0 or parameter.shape[0] != module.num_experts:
                raise UnsupportedError(
                    f"ep: {path}.{name} is {tuple(parameter.shape)}, not one row for each of the "
                    f"{module.num_experts} experts; leave ep at 1"
                )
            shards = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
            owner._parameters[name.rpartition(".")[2]] = nn.Parameter(shards, requires_grad=parameter.requires_grad)
        module.num_experts //= layout.ep
    return paths


def connect_experts(engine: Engine, paths: Sequence[str], meshes: Meshes) -> list[tuple[str, DeviceMesh]]:
    """Put the exchange around the experts' regions. Returns (path, mesh) of what FSDP2 is to make groups of."""
    mesh = meshes.experts
    for path in paths:
        module: Any = engine.deepwell.model.get_submodule(path)
        inner = module.forward
        forward = functools.wraps(inner)(_exchanging(inner, module.num_experts, mesh["ep"].get_group()))
        module.forward = torch._dynamo.disable(forward, reason=REASON)
    return [(path, mesh["edp"]) for path in paths]


def _exchanging(inner: Forward, local: int, group: Any) -> Forward:
    world = dist.get_world_size(group)

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        top_k = top_k_index.shape[-1]
        flat, order = top_k_index.reshape(-1).sort(stable=True)
        counts = torch.zeros(world * local, dtype=torch.int64, device=flat.device)
        counts.scatter_add_(0, flat, torch.ones_like(flat))
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=group)
        # The one place where the host waits for the device.
        sent, received = torch.stack((counts, theirs)).view(2, world, local).sum(2).tolist()
        rows = Exchange.apply(hidden_states[order // top_k], received, sent, group)
        weights = Exchange.apply(top_k_weights.reshape(-1)[order], received, sent, group)
        experts = torch.arange(local, device=flat.device).repeat(world)
        ids = experts.repeat_interleave(theirs, output_size=sum(received))
        given = _at_least(rows), _at_least(ids)[:, None], _at_least(weights)[:, None]
        for each in given:
            torch._dynamo.maybe_mark_dynamic(each, 0)
        out = inner(*given)[: len(rows)]
        back = Exchange.apply(out, sent, received, group)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device)
        return back[place].view(-1, top_k, hidden_states.shape[-1]).sum(1).to(hidden_states.dtype)

    return forward


def _at_least(rows: Tensor) -> Tensor:
    """Rows of zeros behind those of a rank that nearly no token came to: expert 0's, with weight 0."""
    missing = _LEAST_ROWS - len(rows)
    return rows if missing <= 0 else torch.cat((rows, rows.new_zeros((missing, *rows.shape[1:]))))


def _parameters(module: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """(the module that has it, its name, the parameter) of all below a module."""
    return [
        (owner, f"{prefix}.{name}" if prefix else name, parameter)
        for prefix, owner in module.named_modules()
        for name, parameter in owner._parameters.items()
        if parameter is not None
    ]


__all__ = ["Exchange", "connect_experts", "distribute_experts", "find_experts"]
