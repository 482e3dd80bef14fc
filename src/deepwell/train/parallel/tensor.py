"""Tensor and sequence parallelism: ranks of tp hold parts of a layer's weights and, between its linears, of its tokens.

    tokens / tp, norm, all-gather -> q, k, v or gate, up (columns) -> o or down (rows), reduce-scatter -> tokens / tp

The parameters are DTensors outside and local parts inside a layer's region; both collectives, along the sequence, are
ops of its graph. Roles come from the IR: q, k, v, gate and up are split by columns, o and down by rows; norms and the
biases of rows are whole on each rank, and their gradients are sums over tp. Embedding, final norm and head are not
split: each rank runs them on its tokens (the embedding on all), and their parameters are sharded over tp as well as
over data ranks. Routers and experts take a rank's tokens as they are, so an MLP that reads the same norm (shared
experts) gathers them by itself. Whether a model's attention still finds its heads is asked of a capture with the local
sizes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd, reduce_scatter_tensor_autograd
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from deepwell.engine.engine import Engine
from deepwell.engine.regions import has_module
from deepwell.errors import CaptureError, UnsupportedError
from deepwell.graph.capture import capture
from deepwell.graph.ir import IR
from deepwell.graph.ops import Attention, Dispatch, GroupedLinear, Linear, Norm, Op
from deepwell.graph.preserve import preserved
from deepwell.planner.executable import is_whole
from deepwell.train.parallel.mesh import Meshes

_COLUMNS = {"q", "k", "v", "gate", "up"}
_ROWS = {"o", "down"}
_SEQUENCE = 1  # of [batch, tokens, width]
# What the blocks of a format hold, by a word of its name.
_BLOCKS = (("nvfp4", 16), ("mx", 32), ("128", 128))


@dataclass(slots=True)
class Split:
    """What of the layers is split how. Paths are the model's; of parameters, their names."""

    shards: dict[str, int] = field(default_factory=dict)  # parameter -> the dimension that tp splits
    copies: list[str] = field(default_factory=list)  # parameters that are whole on each rank
    row_biases: list[str] = field(default_factory=list)  # those of them that every rank adds to its part of a sum
    norms: list[str] = field(default_factory=list)  # modules behind which tokens are gathered
    mlps: list[str] = field(default_factory=list)  # modules before which tokens are gathered
    rows: list[str] = field(default_factory=list)  # modules behind which sums are scattered


def find_split(ir: IR, model: nn.Module, tp: int) -> Split:
    """How tensor parallelism splits a model's layers. Raises UnsupportedError, with the module, where it cannot."""
    if not ir.layers:
        raise UnsupportedError(f"tp {tp}: {ir.name} has no repeated layers to split")
    split = Split()
    for layer in ir.layers:
        ops = ir.blocks[layer.block].ops
        _check_heads(ops, layer.path, tp)
        for op in ops:
            path = f"{layer.path}.{op.name}"
            if isinstance(op, Linear) and not is_whole(op):
                is_row = _check_linear(op, path, model, tp)
                split.shards[f"{path}.weight"] = 1 if is_row else 0
                if op.bias and not is_row:
                    split.shards[f"{path}.bias"] = 0
                elif op.bias:
                    split.row_biases.append(f"{path}.bias")
                split.rows += [path] if is_row else []
        _find_gathers(ops, layer.path, tp, split)
        known = {f"{layer.path}.{p.name}" for op in ops if isinstance(op, Norm) or is_whole(op) for p in op.params}
        grouped = (op.name.rpartition(".")[0] for op in ops if isinstance(op, GroupedLinear))
        experts = tuple(f"{layer.path}.{path}." for path in grouped)  # `experts.py` has those
        for name, _ in model.get_submodule(layer.path).named_parameters(prefix=layer.path):
            if name in known or name in split.row_biases:
                split.copies.append(name)
            elif name not in split.shards and not name.startswith(experts):
                raise UnsupportedError(
                    f"tp {tp}: {name} belongs to no linear and no norm, how to split it is not known"
                )
    return split


def _check_heads(ops: tuple[Op, ...], layer: str, tp: int) -> None:
    attention = [op for op in ops if isinstance(op, Attention)]
    if not attention:
        raise UnsupportedError(f"tp {tp}: {layer} has no attention that was understood; its heads cannot be split")
    for op in attention:
        if op.params:
            raise UnsupportedError(f"tp {tp}: {layer}.{op.name} has parameters of its own ({op.params[0].name})")
        if op.q_heads % tp or op.kv_heads % tp:
            raise UnsupportedError(
                f"tp {tp} does not divide {layer}.{op.name}'s {op.q_heads} heads and {op.kv_heads} key-value heads"
            )


def _check_linear(op: Linear, path: str, model: nn.Module, tp: int) -> bool:
    """Whether a linear is split by rows."""
    if op.role not in ("attention", "mlp", "shared_experts") or op.part not in _COLUMNS | _ROWS:
        what = f"holds {op.part} in one" if op.part in ("qkv", "gate_up") else f"is a {op.role} linear"
        raise UnsupportedError(f"tp {tp}: {path} {what}, which tensor parallelism does not split; take dp, pp or cp")
    weight = model.get_parameter(f"{path}.weight") if f"{path}.weight" in dict(model.named_parameters()) else None
    if weight is None or tuple(weight.shape) != (op.n, op.k):
        raise UnsupportedError(f"tp {tp}: {path} does not hold its weight as [{op.n}, {op.k}] in `weight`")
    is_row = op.part in _ROWS
    size = op.k if is_row else op.n
    if size % tp:
        raise UnsupportedError(f"tp {tp} does not divide the {size} {'rows' if is_row else 'columns'} of {path}")
    return is_row


def _find_gathers(ops: tuple[Op, ...], layer: str, tp: int, split: Split) -> None:
    """Add the norms that columns alone read, and MLPs whose columns read a norm beside a router and experts.

    Nobody else may read these norms, and columns may read nothing else.
    """
    by_name = {op.name: op for op in ops}
    columns: dict[str, list[str]] = {}
    for op in ops:
        if _is_column(op):
            source = by_name.get(op.inputs[0]) if op.inputs else None
            if not isinstance(source, Norm) or not source.params:
                raise UnsupportedError(f"tp {tp}: {layer}.{op.name} does not read a norm's output, so tokens cannot be "
                                       "gathered before it")  # fmt: skip
            columns.setdefault(source.name, []).append(op.name)
    for name, found in columns.items():
        others = [op for op in ops if name in op.inputs and op.name not in found]
        homes = dict.fromkeys(column.rpartition(".")[0] for column in found)
        for op in others:
            is_beside = all(home and not op.name.startswith(f"{home}.") for home in homes)
            is_mlp = all(by_name[column].role in ("mlp", "shared_experts") for column in found)
            if not (is_mlp and is_beside and (is_whole(op) or isinstance(op, Dispatch))):
                raise UnsupportedError(f"tp {tp}: {layer}.{op.name} reads {name} beside the linears that are split")
        if others:
            split.mlps += [f"{layer}.{home}" for home in homes]
        else:
            split.norms.append(f"{layer}.{name}")
    heads = {op.qk_dim for op in ops if isinstance(op, Attention)}
    for op in ops:
        if isinstance(op, Norm) and op.params and any(_is_column(by_name.get(name)) for name in op.inputs):
            width = op.params[0].shape[-1]
            if width not in heads:
                raise UnsupportedError(
                    f"tp {tp}: {layer}.{op.name} is a norm over {width} columns of all heads, which ranks would split"
                )


def _is_column(op: Op | None) -> bool:
    return isinstance(op, Linear) and op.part in _COLUMNS and not is_whole(op)


# ---- is it still the same model? ----


def check_local(engine: Engine, split: Split, tp: int) -> None:
    """Capture the model with local sizes: each rank's attention must have its share of the same heads.

    A model that reshapes by a number of heads it wrote down would make other heads of them, without an error.
    """
    model, ir = engine.deepwell.model, engine.deepwell.ir
    with preserved(model, values=False):
        for name, dim in split.shards.items():
            path, _, key = name.rpartition(".")
            old = model.get_parameter(name)
            shape = [size // tp if i == dim else size for i, size in enumerate(old.shape)]
            local = nn.Parameter(torch.empty(shape, dtype=old.dtype, device="meta"), old.requires_grad)
            model.get_submodule(path)._parameters[key] = local
        try:
            found = capture(model)
        except CaptureError as error:
            raise UnsupportedError(f"tp {tp}: {ir.name} cannot be split, its parts do not run: {error}") from error
    for whole, part in zip(ir.layers, found.layers, strict=True):
        for before, now in zip(_attention(ir, whole.block), _attention(found, part.block), strict=True):
            heads = (before.q_heads // tp, before.kv_heads // tp, before.qk_dim, before.v_dim)
            if (now.q_heads, now.kv_heads, now.qk_dim, now.v_dim) != heads:
                raise UnsupportedError(
                    f"tp {tp}: {whole.path}.{before.name} would have {now.q_heads} heads of {now.qk_dim} on a rank, "
                    f"not {heads[0]} of {heads[2]}: the model's code names its number of heads"
                )


def _attention(ir: IR, block: int) -> list[Attention]:
    return [op for op in ir.blocks[block].ops if isinstance(op, Attention)]


def notes_on_blocks(engine: Engine, split: Split, tp: int) -> list[str]:
    """A note where local sizes cut the blocks of a format: the values of a block are then others than on one device."""
    cut: dict[int, list[str]] = {}
    for name, dim in split.shards.items():
        path, _, key = name.rpartition(".")
        scheme = engine.deepwell.bound.schemes.get(path, "")
        block = next((size for word, size in _BLOCKS if word in scheme), 1)
        if key == "weight" and (engine.deepwell.model.get_parameter(name).shape[dim] // tp) % block:
            cut.setdefault(block, []).append(path)
    return [
        f"tp {tp} leaves {', '.join(paths[:3])}{' and more' if len(paths) > 3 else ''} a size that is no multiple of "
        f"the format's {block}: their last block is short, and the numbers differ a little from one device's"
        for block, paths in cut.items()
    ]


# ---- what runs ----


class SplitTokens(torch.autograd.Function):
    """This rank's part of the sequence. Its gradient is zero elsewhere: what lies before has a part of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rank: int, world: int) -> Tensor:
        ctx.rank, ctx.world = rank, world
        return x.chunk(world, _SEQUENCE)[rank].contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
        parts = [torch.zeros_like(grad) if i != ctx.rank else grad for i in range(ctx.world)]
        return torch.cat(parts, _SEQUENCE), None, None


def _before(run: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """A hook before a module's call: what it is given first."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (run(args[0]), *args[1:]), kwargs
        name = "hidden_states" if "hidden_states" in kwargs else next(iter(kwargs))
        return args, {**kwargs, name: run(kwargs[name])}

    hook.is_deepwell_collective = True  # type: ignore[attr-defined]
    return hook


def _behind(run: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """A hook behind a module's call: what it gave."""

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return run(output)

    hook.is_deepwell_collective = True  # type: ignore[attr-defined]
    return hook


@torch.no_grad()
def split_weights(engine: Engine, meshes: Meshes, notes: list[str]) -> Split:
    """Leave each rank of tp its part of the layers' weights, as DTensors, in place. The model must be whole still.

    What is not as on one device is added to `notes`. Call `split_tokens` when the layers are regions.
    """
    tp, model, mesh = meshes.layout.tp, engine.deepwell.model, meshes.tp
    split = find_split(engine.deepwell.ir, model, tp)
    check_local(engine, split, tp)
    notes += notes_on_blocks(engine, split, tp)
    for name in (*split.shards, *split.copies):
        path, _, key = name.rpartition(".")
        old, dim = model.get_parameter(name), split.shards.get(name)
        placement = Replicate() if dim is None else Shard(dim)
        # All ranks have the same weights by now: each takes its part.
        part = distribute_tensor(old.detach(), mesh, [placement], src_data_rank=None)
        model.get_submodule(path)._parameters[key] = nn.Parameter(part, requires_grad=old.requires_grad)
    return split


def split_tokens(engine: Engine, meshes: Meshes, split: Split, firsts: Sequence[str]) -> None:
    """Put the collectives into the regions and split the tokens before the layers `firsts`, the first of each stage."""
    tp, model, regions = meshes.layout.tp, engine.deepwell.model, engine.deepwell.regions
    group = meshes.tp.get_group()
    assert regions is not None, "the layers are regions"
    regions.partial |= set(split.copies)
    regions.shares |= dict.fromkeys(split.row_biases, 1 / tp)

    def gather(y: Tensor, dim: int = _SEQUENCE) -> Tensor:
        return all_gather_tensor_autograd(y.contiguous(), dim, group)

    def scatter(y: Tensor, dim: int = _SEQUENCE) -> Tensor:
        return reduce_scatter_tensor_autograd(y.contiguous(), "sum", dim, group)

    # One hook each for all layers: they share a graph. MLPs beside experts may be given [tokens, width].
    behind_norm, behind_rows = _behind(gather), _behind(scatter)
    before_mlp, behind_mlp = _before(lambda y: gather(y, y.dim() - 2)), _behind(lambda y: scatter(y, y.dim() - 2))
    homes = tuple(f"{path}." for path in split.mlps)
    for path in filter(functools.partial(has_module, model), split.norms):
        model.get_submodule(path).register_forward_hook(behind_norm)
    for path in filter(functools.partial(has_module, model), split.mlps):
        model.get_submodule(path).register_forward_pre_hook(before_mlp, with_kwargs=True)
    for path in filter(functools.partial(has_module, model), split.rows):
        model.get_submodule(path).register_forward_hook(behind_mlp if path.startswith(homes) else behind_rows)
    rank = meshes.tp.get_local_rank()
    for path in firsts:
        hook = _before(lambda x: SplitTokens.apply(x, rank, tp))
        model.get_submodule(path).register_forward_pre_hook(hook, with_kwargs=True)
