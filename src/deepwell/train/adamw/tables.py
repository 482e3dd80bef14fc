"""The fused optimizer's launches: which tensors share a kernel, their table of addresses, and one step over all.

A step is one launch for each kind of tensor (dtypes, moments, alignment), one more to work out the scalars, and with a
norm one for each dtype of the gradients. Addresses, steps and scalars lie in device memory: a step never waits for the
host and never compiles anew, whatever the learning rate is. On a CPU the reference runs instead, tensor by tensor.
"""

# Shapes: S slots (parameters), G parameter groups, C chunks of a launch.

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from deepwell.errors import ConfigError
from deepwell.kernels.device.address_table import Table
from deepwell.kernels.device.triton_support import cdiv, is_interpreted, on_device, tl
from deepwell.train.adamw import scalars as adamw_scalars
from deepwell.train.adamw import update as adamw
from deepwell.train.adamw.scalars import NORM_ROWS, NORM_TILES, NORM_WARPS, Hyper
from deepwell.train.adamw.update import Noise, UpdateConfig, adamw_ref, configs_for_moments

_TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, adamw.FP8: tl.uint8}
# Kinds of gradients seen (a parameter may go without one): each keeps its tables, the oldest goes first.
_MAX_LAYOUTS = 8


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Slot:
    """One parameter and its state, dense and laid out alike on one device (the optimizer checks it).

    FP8 moments have fp32 scales, one for each 128 elements in memory order.
    """

    param: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    exp_avg_scales: Tensor | None = None
    exp_avg_sq_scales: Tensor | None = None
    master: Tensor | None = None
    # The row of scalars it uses, and its number among all parameters: the key of its random bits.
    group: int = 0
    index: int = 0

    def addresses(self, grad: Tensor, number: int) -> tuple[int, ...]:
        """Its row of the table of addresses."""
        tensors = (self.param, grad, self.exp_avg, self.exp_avg_sq, self.exp_avg_scales, self.exp_avg_sq_scales)
        at = [0 if tensor is None else tensor.data_ptr() for tensor in (*tensors, self.master)]
        return (*at, self.param.numel(), number, self.index)


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """What tensors of one launch have in common."""

    param: torch.dtype
    grad: torch.dtype
    moment: torch.dtype
    has_master: bool
    is_aligned: bool


@dataclass(kw_only=True, slots=True, eq=False)
class _Launch:
    """The tables of one launch over flat tensors: rows of addresses and the chunks of the grid."""

    kind: Kind
    slots: list[int]
    table: Table
    chunk_row: Tensor
    chunk_place: Tensor


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
        self.steps = steps
        self.seed = seed
        self.clip_norm = clip_norm
        self.has_norm = clip_norm is not None or skip_nonfinite
        self.random_params = random_params
        self.random_moments = random_moments
        self._config = config
        self.control = torch.tensor([seed, 0, 0, 0], dtype=torch.int64, device=self.device)
        self.norm = torch.zeros((), dtype=torch.float32, device=self.device)
        self._hyper = torch.zeros(
            (len(self.slots), adamw_scalars.HYPER_COLUMNS), dtype=torch.float32, device=self.device
        )
        self._slot_group = torch.tensor([s.group for s in self.slots], dtype=torch.int32).to(self.device)
        self._layouts: dict[tuple[object, ...], _Layout] = {}
        self._kinds: dict[tuple[int, torch.dtype, bool], Kind] = {}
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
        """The kind of slot i, which changes with its gradient's dtype and alignment alone."""
        key = (i, grad.dtype, grad.data_ptr() % 16 == 0)
        if key not in self._kinds:
            self._kinds[key] = _kind(self.slots[i], grad)
        return self._kinds[key]

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
                **self._constants(kind),
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

    def _constants(self, kind: Kind) -> dict[str, Any]:
        """The constexprs of an update that follow from the kind of tensor."""
        return {
            "PARAM": _TRITON_DTYPES[kind.param],
            "GRAD": _TRITON_DTYPES[kind.grad],
            "MOMENT": _TRITON_DTYPES[kind.moment],
            "HAS_MASTER": kind.has_master,
            "RANDOM_PARAM": self._is_param_random(kind),
            "RANDOM_MOMENT": self._are_moments_random(kind),
            "ALIGNED": kind.is_aligned,
            "ASM": not is_interpreted(adamw._adamw_kernel),
        }

    def _is_param_random(self, kind: Kind) -> bool:
        return self.random_params and kind.param == torch.bfloat16 and not kind.has_master

    def _are_moments_random(self, kind: Kind) -> bool:
        return self.random_moments and kind.moment != torch.float32

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
            slot, grad = self.slots[i], _grad(grads, i)
            self.steps[i] += 1
            step = int(self.steps[i])
            kind = _kind(slot, grad)
            noise = Noise.of(
                slot.param,
                seed=self.seed,
                index=slot.index,
                step=step,
                for_param=self._is_param_random(kind),
                for_moments=self._are_moments_random(kind),
            )
            scales = None
            if slot.exp_avg_scales is not None and slot.exp_avg_sq_scales is not None:
                scales = (slot.exp_avg_scales, slot.exp_avg_sq_scales)
            adamw_ref(
                flat(slot.param),
                flat(grad),
                flat(slot.exp_avg),
                flat(slot.exp_avg_sq),
                Hyper.at_step(step, groups[slot.group], coefficient),
                scales=scales,
                master=None if slot.master is None else flat(slot.master),
                noise=noise,
            )


class _Layout:
    """The launches for one choice of tensors that have a gradient, and of what dtype."""

    def __init__(self, owner: FusedAdamW, kinds: tuple[tuple[int, Kind], ...]) -> None:
        slots, device = owner.slots, owner.device
        self.active = torch.tensor([i for i, _ in kinds], dtype=torch.int32).to(device)
        self.flat = []
        for kind, members in _by_kind(kinds):
            config = owner.config_of(kind)
            self.flat.append(_new_launch(slots, kind, members, config.rows * config.tiles, device))
        # The norm asks for nothing but the gradients.
        read = [(i, replace(k, param=k.grad, moment=k.grad, has_master=False)) for i, k in kinds]
        self.norms = [
            _new_launch(slots, kind, members, NORM_ROWS * NORM_TILES, device)
            for kind, members in (_by_kind(read) if owner.has_norm else [])
        ]
        counts = [launch.chunk_row.numel() for launch in self.norms]
        self.partials = torch.zeros(sum(counts), dtype=torch.float64, device=device)
        self.norm_partials = self.partials.split(counts) if counts else ()

    def refresh(self, slots: tuple[Slot, ...], grads: Sequence[Tensor | None]) -> None:
        """Write the addresses anew where they changed: gradients are often allocated afresh for each step."""
        for launch in (*self.flat, *self.norms):
            launch.table.write([slots[i].addresses(_grad(grads, i), i) for i in launch.slots])


def _by_kind(kinds: Sequence[tuple[int, Kind]]) -> list[tuple[Kind, list[int]]]:
    """The members of each kind, in the order of its first one."""
    found: dict[Kind, list[int]] = {}
    for i, kind in kinds:
        found.setdefault(kind, []).append(i)
    return list(found.items())


def _new_launch(
    slots: tuple[Slot, ...], kind: Kind, members: list[int], chunk_rows: int, device: torch.device
) -> _Launch:
    chunk = chunk_rows * adamw.BLOCK
    counts = torch.tensor([-(-slots[i].param.numel() // chunk) for i in members], dtype=torch.int64)
    row = torch.arange(len(members)).repeat_interleave(counts)
    place = torch.arange(int(counts.sum())) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    return _Launch(
        kind=kind,
        slots=members,
        table=Table(device, adamw_scalars.TABLE_COLUMNS),
        chunk_row=row.to(torch.int32).to(device),
        chunk_place=place.to(torch.int32).to(device),
    )


def _grad(grads: Sequence[Tensor | None], i: int) -> Tensor:
    grad = grads[i]
    assert grad is not None
    return grad


def _kind(slot: Slot, grad: Tensor) -> Kind:
    state = (slot.exp_avg, slot.exp_avg_sq, slot.master, slot.exp_avg_scales, slot.exp_avg_sq_scales)
    tensors = [slot.param, grad, *(t for t in state if t is not None)]
    # 16-byte accesses need the addresses and, for a mask of whole vectors, the length.
    is_aligned = slot.param.numel() % 16 == 0 and all(t.data_ptr() % 16 == 0 for t in tensors)
    return Kind(
        param=slot.param.dtype,
        grad=grad.dtype,
        moment=slot.exp_avg.dtype,
        has_master=slot.master is not None,
        is_aligned=is_aligned,
    )


def flat(tensor: Tensor) -> Tensor:
    """All elements in memory order, as a view."""
    return tensor.as_strided((tensor.numel(),), (1,))


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one piece of memory without gaps or overlap, in whatever order of dimensions."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[1]):
        if size == 1:
            continue
        if stride != expected:
            return tensor.numel() == 0
        expected *= size
    return True
