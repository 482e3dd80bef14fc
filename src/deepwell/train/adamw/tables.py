"""The fused optimizer's launches: which tensors share a kernel, their table of addresses, and one step over all.

A step is one launch for each kind of tensor (dtypes, moments, alignment), one more to work out the scalars, and with a
norm one for each dtype of the gradients. Addresses, steps and scalars lie in device memory: a step never waits for the
host and never compiles anew, whatever the learning rate is. On a CPU the reference runs instead, tensor by tensor.
"""

# Shapes: S slots (parameters), G parameter groups, C chunks of a launch.

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from deepwell.errors import ConfigError
from deepwell.kernels.device.address_table import Table
from deepwell.kernels.device.triton_support import cdiv, is_interpreted, on_device, tl
from deepwell.train.adamw import scalars as adamw_scalars
from deepwell.train.adamw import update as adamw
from deepwell.train.adamw.moments import BLOCK, FP8
from deepwell.train.adamw.scalars import NORM_ROWS, NORM_TILES, NORM_WARPS, hyper_ref
from deepwell.train.adamw.update import Slot, UpdateConfig, adamw_ref, configs_for_moments, noise_ref

_TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, FP8: tl.uint8}
# Kinds of gradients seen (a parameter may go without one): each keeps its tables, the oldest goes first.
_MAX_LAYOUTS = 8


class Kind(NamedTuple):
    """What tensors of one launch have in common."""

    param: torch.dtype
    grad: torch.dtype
    moment: torch.dtype
    has_master: bool
    is_aligned: bool


class FusedAdamW:
    """AdamW over `slots`, all on one device. `step` applies it once.

    `random_params` rounds bf16 parameters without a master at random, `random_moments` bf16 and FP8 moments. With
    `clip_norm` gradients are scaled down to that global norm; with it or `skip_nonfinite` a step whose norm is not
    finite changes nothing and is counted in `num_skipped`.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        *,
        steps: Tensor,
        seed: int = 0,
        clip_norm: float | None = None,
        skip_nonfinite: bool = False,
        random_params: bool = True,
        random_moments: bool = True,
        config: UpdateConfig | None = None,
    ) -> None:
        self.slots = tuple(slots)
        self.device = self.slots[0].param.device
        if not 0 <= seed < 2**63:
            raise ConfigError(f"seed={seed} must lie within 0 .. 2^63 - 1")
        self.steps, self.seed, self.clip_norm = steps, seed, clip_norm
        self.has_norm = clip_norm is not None or skip_nonfinite
        self._random_params, self._random_moments, self._config = random_params, random_moments, config
        self.control = torch.tensor([seed, 0, 0, 0], dtype=torch.int64, device=self.device)
        self.norm = torch.zeros((), dtype=torch.float32, device=self.device)
        hyper = (len(self.slots), adamw_scalars.HYPER_COLUMNS)
        self._hyper = torch.zeros(hyper, dtype=torch.float32, device=self.device)
        self._slot_group = torch.tensor([s.group for s in self.slots], dtype=torch.int32).to(self.device)
        # As if gradients were the parameters themselves: a step adds what is of its gradient, cheaply for the host.
        self._kinds = [_kind(slot) for slot in self.slots]
        self._layouts: dict[tuple[object, ...], _Layout] = {}
        self._last_key: tuple[object, ...] = ()
        self._last_layout: _Layout | None = None

    @property
    def num_skipped(self) -> Tensor:
        """How many steps were skipped for a norm that was not finite, on the device."""
        return self.control[adamw_scalars.CONTROL_SKIPPED]

    def step(self, grads: Sequence[Tensor | None], groups: Tensor) -> None:
        """Update every slot whose gradient, laid out as its parameter, is not None.

        `groups` is the fp64 (G, 7) table of the groups' scalars.
        """
        # Gradients that lie where they lay at the last step need no table: the host's time for a step.
        key = tuple(None if grad is None else (grad.data_ptr(), grad.dtype, grad.stride()) for grad in grads)
        if key != self._last_key or self._last_layout is None:
            active = [i for i, grad in enumerate(grads) if grad is not None and grad.numel() > 0]
            if not active:
                return
            if not self._runs_kernels():
                self._step_ref(active, grads, groups.tolist())
                return
            self._last_layout = self._layout(active, grads)
            self._last_layout.refresh(self.slots, grads)
            self._last_key = key
        with on_device(groups):
            self._launch(self._last_layout, groups)

    # ---- on a GPU ----

    def _layout(self, active: list[int], grads: Sequence[Tensor | None]) -> "_Layout":
        kinds = tuple((i, self._kind_of(i, _grad(grads, i))) for i in active)
        found = self._layouts.get(kinds)
        if found is None:
            if len(self._layouts) >= _MAX_LAYOUTS:
                self._layouts.pop(next(iter(self._layouts)))
            found = self._layouts[kinds] = _Layout(self, kinds)
        return found

    def _kind_of(self, i: int, grad: Tensor) -> Kind:
        kind = self._kinds[i]
        return kind._replace(grad=grad.dtype, is_aligned=kind.is_aligned and grad.data_ptr() % 16 == 0)

    def _launch(self, layout: "_Layout", groups: Tensor) -> None:
        for launch, partials in zip(layout.norms, layout.norm_partials, strict=True):
            adamw_scalars._norm_kernel[(launch.chunk_row.numel(),)](
                launch.table.words,
                launch.chunk_row,
                launch.chunk_place,
                partials,
                GRAD=_TRITON_DTYPES[launch.kind.grad],
                ALIGNED=launch.kind.is_aligned,
                ROWS=NORM_ROWS,
                TILES=NORM_TILES,
                num_warps=NORM_WARPS,
            )
        num_active = layout.active.numel()
        adamw_scalars._prepare_kernel[(cdiv(num_active, 128),)](
            layout.partials,
            layout.partials.numel(),
            layout.active,
            num_active,
            self._slot_group,
            self.steps,
            groups,
            self._hyper,
            self.control,
            self.norm,
            HAS_NORM=self.has_norm,
            HAS_CLIP=self.clip_norm is not None,
            SLOTS=128,
            num_warps=4,
            enable_fp_fusion=False,
        )
        for launch in layout.flat:
            kind = launch.kind
            config = self.config_of(kind)
            adamw._adamw_kernel[(launch.chunk_row.numel(),)](
                launch.table.words,
                launch.chunk_row,
                launch.chunk_place,
                self._hyper,
                self.steps,
                self.control,
                PARAM=_TRITON_DTYPES[kind.param],
                GRAD=_TRITON_DTYPES[kind.grad],
                MOMENT=_TRITON_DTYPES[kind.moment],
                HAS_MASTER=kind.has_master,
                RANDOM_PARAM=self._is_param_random(kind),
                RANDOM_MOMENT=self._are_moments_random(kind),
                ALIGNED=kind.is_aligned,
                ASM=not is_interpreted(adamw._adamw_kernel),
                ROWS=config.rows,
                PIECES=config.pieces,
                TILES=config.tiles,
                num_warps=config.num_warps,
                maxnreg=config.max_registers,
                # A contracted multiply-add rounds once where the reference rounds twice.
                enable_fp_fusion=False,
            )

    def config_of(self, kind: Kind) -> UpdateConfig:
        """The config of a kind's update."""
        return self._config or configs_for_moments(kind.moment)[0]

    def _is_param_random(self, kind: Kind) -> bool:
        return self._random_params and kind.param == torch.bfloat16 and not kind.has_master

    def _are_moments_random(self, kind: Kind) -> bool:
        return self._random_moments and kind.moment != torch.float32

    def _runs_kernels(self) -> bool:
        return self.device.type != "cpu" or is_interpreted(adamw._adamw_kernel)

    # ---- on a CPU ----

    def _step_ref(self, active: list[int], grads: Sequence[Tensor | None], groups: list[list[float]]) -> None:
        coefficient = 1.0
        if self.has_norm:
            total = sum(float(_grad(grads, i).double().square().sum()) for i in active)
            norm = math.sqrt(total)
            self.norm.fill_(norm)
            if not norm < math.inf:
                self.control[adamw_scalars.CONTROL_SKIPPED] += 1
                return
            if self.clip_norm is not None:
                coefficient = min(1.0, self.clip_norm / (norm + adamw_scalars.CLIP_EPS))
        for i in active:
            self.steps[i] += 1
            slot, kind, step = self.slots[i], self._kinds[i], int(self.steps[i])
            noise = noise_ref(slot, self.seed, step, self._is_param_random(kind), self._are_moments_random(kind))
            adamw_ref(slot, _grad(grads, i), hyper_ref(step, groups[slot.group], coefficient), noise)


class _Layout:
    """The launches for one choice of tensors that have a gradient, and of what dtype."""

    def __init__(self, owner: FusedAdamW, kinds: tuple[tuple[int, Kind], ...]) -> None:
        self.active = torch.tensor([i for i, _ in kinds], dtype=torch.int32).to(owner.device)
        self.flat: list[_Launch] = []
        for kind, members in _by_kind(kinds):
            config = owner.config_of(kind)
            self.flat.append(_Launch(owner.slots, kind, members, config.rows * config.tiles))
        # The norm asks for nothing but the gradients.
        read = [(i, k._replace(param=k.grad, moment=k.grad, has_master=False)) for i, k in kinds]
        norms = _by_kind(read) if owner.has_norm else []
        self.norms = [_Launch(owner.slots, kind, members, NORM_ROWS * NORM_TILES) for kind, members in norms]
        counts = [launch.chunk_row.numel() for launch in self.norms]
        self.partials = torch.zeros(sum(counts), dtype=torch.float64, device=owner.device)
        self.norm_partials = self.partials.split(counts) if counts else ()

    def refresh(self, slots: tuple[Slot, ...], grads: Sequence[Tensor | None]) -> None:
        """Write the addresses anew where they changed: gradients are often allocated afresh for each step."""
        for launch in (*self.flat, *self.norms):
            rows = []
            for i in launch.slots:
                slot = slots[i]
                at = [0 if tensor is None else tensor.data_ptr() for tensor in slot.tensors(_grad(grads, i))]
                rows.append((*at, slot.param.numel(), i, slot.index))
            launch.table.write(rows)


class _Launch:
    """The tables of one launch over flat tensors: rows of addresses and the chunks of the grid."""

    def __init__(self, slots: tuple[Slot, ...], kind: Kind, members: list[int], chunk_rows: int) -> None:
        self.kind, self.slots = kind, members
        chunk, device = chunk_rows * BLOCK, slots[0].param.device
        counts = torch.tensor([cdiv(slots[i].param.numel(), chunk) for i in members])
        row = torch.arange(len(members)).repeat_interleave(counts)
        place = torch.arange(int(counts.sum())) - (counts.cumsum(0) - counts).repeat_interleave(counts)
        self.chunk_row, self.chunk_place = row.to(torch.int32).to(device), place.to(torch.int32).to(device)
        self.table = Table(device, adamw_scalars.TABLE_COLUMNS)


def _by_kind(kinds: Sequence[tuple[int, Kind]]) -> list[tuple[Kind, list[int]]]:
    """The members of each kind, in the order of its first one."""
    found: dict[Kind, list[int]] = {}
    for i, kind in kinds:
        found.setdefault(kind, []).append(i)
    return list(found.items())


def _grad(grads: Sequence[Tensor | None], i: int) -> Tensor:
    grad = grads[i]
    assert grad is not None
    return grad


def _kind(slot: Slot) -> Kind:
    """Of a slot with its own tensors in the gradient's place."""
    # 16-byte accesses need the addresses and, for a mask of whole vectors, the length.
    addresses = [tensor.data_ptr() for tensor in slot.tensors(slot.param) if tensor is not None]
    is_aligned = slot.param.numel() % 16 == 0 and all(address % 16 == 0 for address in addresses)
    dtype = slot.param.dtype
    return Kind(dtype, dtype, slot.exp_avg.dtype, slot.master is not None, is_aligned)
