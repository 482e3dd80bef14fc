"""What context, expert and tensor parallelism change inside a model, before its layers become regions and after."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from deepwell.engine.engine import Engine
from deepwell.train.parallel.context import spread_attention
from deepwell.train.parallel.experts import connect_experts, distribute_experts, has_experts
from deepwell.train.parallel.mesh import Meshes


def prepare(engine: Engine, meshes: Meshes, notes: list[str]) -> list[tuple[str, DeviceMesh]]:
    """Spread attention over cp and experts over ep, then make the engine's regions.

    Returns (path, mesh) of the experts, which FSDP2 is to make groups of their own. What a reader should know is added
    to `notes`.
    """
    layout = meshes.layout
    if layout.cp > 1:
        note = spread_attention(engine, meshes)
        notes += [note] if note else []
    # Ranks of tp have other tokens for the experts, as those of ep have: they are no part of a layer that tp splits.
    is_spread = layout.ep > 1 or (layout.tp > 1 and has_experts(engine.deepwell.ir))
    paths = distribute_experts(engine, meshes) if is_spread else ()
    engine.deepwell.use_regions(paths)
    return connect_experts(engine, paths, meshes) if paths else []


__all__ = ["prepare"]
