"""Device meshes of a layout: which ranks work on what together.

    ranks:     pp, dp_replicate, dp_shard, cp, tp        Megatron's order, tp innermost
    layers:    pp, dp_replicate, fsdp = dp_shard x cp, tp            what FSDP2 shards a layer over
    rest:      pp, dp_replicate, tokens = dp_shard x cp x tp         embedding, final norm, head: tp splits their tokens
    experts:   pp, edp, ep, etp                           a second view of a stage's ranks

Ranks are numbered so that each view is another shape of the same numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from deepwell.errors import ConfigError
from deepwell.planner.layout import Layout

_RANKS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


def check_world(layout: Layout, world: int) -> None:
    """Raise ConfigError where the layout is of another number of processes."""
    if layout.gpus != world:
        raise ConfigError(
            f"layout {layout} is of {layout.gpus} processes (dp {layout.dp} x tp {layout.tp} x pp {layout.pp} x cp "
            f"{layout.cp}) and {world} are running; start as many, or plan for {world}"
        )


@dataclass(slots=True, kw_only=True)
class Meshes:
    """The views of a layout's ranks, made when they are first asked for. All ranks must ask in the same order."""

    layout: Layout
    device_type: str
    ranks: DeviceMesh
    _views: dict[str, DeviceMesh] = field(default_factory=dict)

    @property
    def dp_rank(self) -> int:
        """This rank's number among those that read different samples."""
        replicate, shard = self.ranks.get_local_rank("dp_replicate"), self.ranks.get_local_rank("dp_shard")
        return replicate * (self.layout.dp // self.layout.dp_replicate) + shard

    @property
    def is_replicated(self) -> bool:
        """Whether parameters are sharded over a part of the data-parallel ranks only, and copied over the others."""
        return self.layout.dp_replicate > 1 or self.layout.sharding == "ddp"

    @property
    def layers(self) -> DeviceMesh:
        """What a layer is sharded over; of two dimensions, copies and shards, where there are copies."""
        view = self._layers_view()
        return view["dp_replicate", "fsdp"] if self.is_replicated else view["fsdp"]

    @property
    def tp(self) -> DeviceMesh:
        """The ranks that split a layer's weights; a part of the view that `layers` is of, as FSDP2 asks for."""
        return self._layers_view()["tp"]

    @property
    def rest(self) -> DeviceMesh:
        """What parameters outside layers are sharded over: each rank of tp has other tokens there."""
        layout = self.layout
        if layout.tp == 1:
            return self.layers
        copies = layout.dp * layout.cp * layout.tp if layout.sharding == "ddp" else layout.dp_replicate
        view = self._view("rest", ("pp", "dp_replicate", "tokens"), (layout.pp, copies, -1))
        return view["dp_replicate", "tokens"] if self.is_replicated else view["tokens"]

    @property
    def experts(self) -> DeviceMesh:
        """(pp, edp, ep, etp): copies of the experts, ranks that hold different ones, ranks that split one."""
        layout = self.layout
        return self._view("experts", ("pp", "edp", "ep", "etp"), (layout.pp, layout.expert_dp, layout.ep, layout.etp))

    @property
    def tokens(self) -> DeviceMesh:
        """The ranks of a stage: routers see other tokens on each, since tp splits them too."""
        return self._view("data", ("pp", "data"), (self.layout.pp, -1))["data"]

    def _layers_view(self) -> DeviceMesh:
        layout = self.layout
        copies = layout.dp * layout.cp if layout.sharding == "ddp" else layout.dp_replicate
        return self._view("layers", ("pp", "dp_replicate", "fsdp", "tp"), (layout.pp, copies, -1, layout.tp))

    def _view(self, key: str, names: tuple[str, ...], shape: tuple[int, ...]) -> DeviceMesh:
        if key not in self._views:
            known = math.prod(size for size in shape if size != -1)
            sizes = tuple(self.layout.gpus // known if size == -1 else size for size in shape)
            self._views[key] = init_device_mesh(self.device_type, sizes, mesh_dim_names=names)
        return self._views[key]


def make_meshes(layout: Layout, device_type: str) -> Meshes:
    """The meshes of a layout on the ranks that are running. Raises ConfigError where their number differs."""
    check_world(layout, dist.get_world_size())
    shape = (layout.pp, layout.dp_replicate, layout.dp // layout.dp_replicate, layout.cp, layout.tp)
    return Meshes(
        layout=layout, device_type=device_type, ranks=init_device_mesh(device_type, shape, mesh_dim_names=_RANKS)
    )
