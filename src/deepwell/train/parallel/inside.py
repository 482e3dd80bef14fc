"""What context and expert parallelism change inside a model before its layers become regions."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from deepwell.engine.engine import Engine
from deepwell.train.parallel.context import spread_attention
from deepwell.train.parallel.experts import connect_experts, distribute_experts
from deepwell.train.parallel.mesh import Meshes


def prepare(engine: Engine, meshes: Meshes, notes: list[str]) -> list[tuple[str, DeviceMesh]]:
    """Spread attention over cp and experts over ep, then make the engine's regions.

    Returns (path, mesh) of the experts, which FSDP2 is to make groups of their own. What a reader should know is added
    to `notes`.
    """
    if meshes.layout.cp > 1:
        note = spread_attention(engine, meshes)
        notes += [note] if note else []
    paths = distribute_experts(engine, meshes) if meshes.layout.ep > 1 else ()
    engine.deepwell.use_regions(paths)
    return connect_experts(engine, paths, meshes) if paths else []


__all__ = ["prepare"]
