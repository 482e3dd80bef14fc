"""Expert parallelism in the trainer: each rank holds some of every layer's experts, and tokens travel between them.

The exchange is `moe/dispatch.py`'s. It is eager, and what lies between its two halves, the experts' own forward, is a
compiled region whose graph takes any number of rows. The parameters of experts are DTensors, `Shard(0)` on the ep mesh.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from deepwell.engine.engine import Engine
from deepwell.engine.regions import REASON, has_module
from deepwell.errors import ConfigError, UnsupportedError
from deepwell.graph.ir import IR
from deepwell.graph.ops import GroupedLinear
from deepwell.kernels.experts.mlp import FP8_SCHEME
from deepwell.moe.dispatch import ExpertExchange, shard_experts
from deepwell.train.parallel.mesh import Meshes

# What the modules have that Hugging Face's choice of an implementation works with: one forward for all of them.
_INTERFACE = ("num_experts", "has_gate", "has_bias", "is_transposed")


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
                f"ep, tp: the experts of {ir.name} ({kind} at {site.path}) are not of Hugging Face's experts interface "
                "(gate_up_proj and down_proj of all experts in one tensor each); leave ep and tp at 1"
            )
        found[path] = None
    if not any(isinstance(site.op, GroupedLinear) for site in ir.sites()):
        raise ConfigError(f"ep: {ir.name} has no experts; leave ep at 1")
    return tuple(found)


def spread_experts(engine: Engine, meshes: Meshes) -> list[tuple[str, DeviceMesh]]:
    """Leave each rank of the ep mesh its experts, as DTensors, in place, make the engine's regions, and put the
    exchange around those of experts. Returns (path, mesh) of what FSDP2 is to make groups of.

    Tensor parallelism without ep has experts whole: they stay plain tensors, a group of FSDP2's over all ranks of a
    stage. Ranks of tp have other tokens for them, as those of ep have: they are no part of a layer that tp splits.
    """
    layout, model, ir = meshes.layout, engine.deepwell.model, engine.deepwell.ir
    has_experts = any(isinstance(site.op, GroupedLinear) for site in ir.sites())
    if layout.ep == 1 and not (layout.tp > 1 and has_experts):
        engine.deepwell.use_regions()
        return []
    mesh, paths = meshes.experts, find_experts(ir, model)
    travelling = paths if layout.ep > 1 else ()
    for path in travelling:
        shard_experts(model.get_submodule(path), mesh["ep"], path)
    engine.deepwell.use_regions(paths)
    for path in travelling:
        module: Any = model.get_submodule(path)
        inner = module.forward
        exchange = ExpertExchange(inner, module.num_experts, mesh["ep"].get_group(), _travels_in_fp8(engine, path))

        def forward(*args: Any, run: ExpertExchange = exchange) -> Any:
            return run(*args)

        module.forward = torch._dynamo.disable(functools.wraps(inner)(forward), reason=REASON)
    return [(path, mesh["edp"]) for path in paths]


def _travels_in_fp8(engine: Engine, path: str) -> Callable[[], bool]:
    """Whether tokens are rounded to FP8 where they arrive anyway, or their block's config says so.

    Scales are powers of two: rounding a second time, as the first GEMM does, changes nothing.
    """
    config = getattr(engine.deepwell.model.get_submodule(path), "moe_config", None)
    firsts = (f"{path}.gate_up_proj", f"{path}.up_proj")

    def is_fp8() -> bool:
        schemes = engine.deepwell.bound.schemes
        return getattr(config, "dispatch", "") == "fp8" or any(schemes.get(first) == FP8_SCHEME for first in firsts)

    return is_fp8
