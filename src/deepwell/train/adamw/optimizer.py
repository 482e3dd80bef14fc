"""adamw_dw: a drop-in torch.optim.AdamW that runs as one fused pass, in low precision where the caller wants it.

    optimizer = AdamWDW(model.parameters(), lr=3e-4, moments="fp8", clip_norm=1.0)

bf16 parameters without master weights are rounded at random, so that small updates are not lost; the random bits depend
on nothing but (seed, step, parameter, element), so a resumed run continues bit for bit. Nothing waits for the device:
step counts, clipping, skipped steps and a learning rate given as a tensor stay on it.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from deepwell.errors import ConfigError, UnsupportedError
from deepwell.train.adamw import update as adamw
from deepwell.train.adamw.slot import Slot
from deepwell.train.adamw.tables import FusedAdamW, is_dense
from deepwell.train.adamw.update import UpdateConfig

MOMENTS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": adamw.FP8}
_PARAM_DTYPES = (torch.float32, torch.bfloat16)
# What one set of parameters on a device must agree on; the rest may differ from group to group.
_SHARED = ("clip_norm", "seed", "stochastic_rounding", "skip_nonfinite")
# State that must come back from a checkpoint in its own dtype; torch would cast it to the parameter's.
_STATE = ("step", "exp_avg", "exp_avg_sq", "exp_avg_scales", "exp_avg_sq_scales", "master")


class AdamWDW(torch.optim.Optimizer):
    """AdamW with decoupled weight decay, fused over all parameters; registered as "adamw_dw".

    `moments`: "bf16", "fp32" or "fp8" (E4M3 with fp32 scales per 128 elements); None takes the parameter's own dtype,
    as torch does. `master_weights="fp32"` keeps an fp32 copy of bf16 parameters and updates that. `stochastic_rounding`
    is for whatever is kept in bf16 or FP8. `clip_norm` scales gradients to that global norm and, as `skip_nonfinite`
    alone does, skips a step whose norm is inf or NaN (`num_skipped` counts them); either reads the gradients once more.
    `lr` may be a tensor on the parameters' device. `moments` and `master_weights` may be set by group as well as lr,
    betas, eps, weight_decay, maximize.
    Raises ConfigError on a wrong value, UnsupportedError on sparse or complex parameters and gradients.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        master_weights: str | None = None,
        moments: str | None = "bf16",
        stochastic_rounding: bool = True,
        clip_norm: float | None = None,
        skip_nonfinite: bool = False,
        seed: int = 0,
        config: UpdateConfig | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "master_weights": master_weights,
            "moments": moments,
            "stochastic_rounding": stochastic_rounding,
            "clip_norm": clip_norm,
            "skip_nonfinite": skip_nonfinite,
            "seed": seed,
        }
        self._config = config
        self._fused: dict[torch.device, _Device] = {}
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with their own options; see torch.optim.Optimizer."""
        super().add_param_group(param_group)
        number = len(self.param_groups) - 1
        _check_group(f"param_groups[{number}]", self.param_groups[number], self.param_groups[0])
        self._fused = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns what `closure` returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._fused or any(device.is_stale() for device in self._fused.values()):
            self._prepare()
        for device in self._fused.values():
            device.step(self.param_groups)
        return loss

    @property
    def num_skipped(self) -> int:
        """How many steps this process skipped for inf or NaN gradients. Reading it waits for the device."""
        return sum(int(device.fused.num_skipped) for device in self._fused.values())

    @property
    def clips_by_itself(self) -> bool:
        """Whether a step takes the gradients' norm, clips to it or skips by it: `clip_norm` or `skip_nonfinite`."""
        first = self.param_groups[0]
        return first["clip_norm"] is not None or bool(first["skip_nonfinite"])

    @property
    def grad_norm(self) -> Tensor | None:
        """The gradients' norm before clipping at the last step, on the device; None without clip_norm."""
        devices = list(self._fused.values())
        return devices[0].fused.norm if devices and devices[0].fused.has_norm else None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state bit for bit; torch would cast moments and master weights to the parameter's dtype."""
        saved_groups = state_dict["param_groups"]
        super().load_state_dict(state_dict)
        saved_ids = [i for group in saved_groups for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for saved_id, param in zip(saved_ids, params, strict=True):
            for key, value in state_dict["state"].get(saved_id, {}).items():
                if key in _STATE and isinstance(value, Tensor):
                    local = value.detach().to(param.device)
                    self.state[param][key] = local.clone() if local.data_ptr() == value.data_ptr() else local
        for number, group in enumerate(self.param_groups):
            _check_group(f"param_groups[{number}]", group, self.param_groups[0])
        self._fused = {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)
        self._fused = {}

    def __getstate__(self) -> dict[str, Any]:
        # Tables hold addresses: they are made anew from the state.
        return {**super().__getstate__(), "_fused": {}, "_config": self._config}

    def _prepare(self) -> None:
        """Make the state that is missing and the tables of each device."""
        members: dict[torch.device, list[tuple[int, int, Tensor]]] = {}
        index = 0
        for number, group in enumerate(self.param_groups):
            for param in group["params"]:
                self._init_state(param, group)
                members.setdefault(param.device, []).append((index, number, param))
                index += 1
        first = self.param_groups[0]
        if len(members) > 1 and (first["clip_norm"] is not None or first["skip_nonfinite"]):
            where = ", ".join(map(str, members))
            raise UnsupportedError(f"clip_norm and skip_nonfinite need parameters on one device, got {where}")
        self._fused = {device: _Device(self, device, found) for device, found in members.items()}

    def _init_state(self, param: Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if state:
            return
        dtype = param.dtype if group["moments"] is None else MOMENTS[group["moments"]]
        state["step"] = torch.zeros((), dtype=torch.int64, device=param.device)
        state["exp_avg"] = _zeros(param, dtype)
        state["exp_avg_sq"] = _zeros(param, dtype)
        if dtype == adamw.FP8:
            num_blocks = -(-_local(param).numel() // adamw.BLOCK)
            state["exp_avg_scales"] = torch.ones(num_blocks, dtype=torch.float32, device=param.device)
            state["exp_avg_sq_scales"] = torch.ones(num_blocks, dtype=torch.float32, device=param.device)
        if group["master_weights"] == "fp32" and param.dtype != torch.float32:
            state["master"] = param.detach().to(torch.float32, memory_format=torch.preserve_format)

    def _slot(self, param: Tensor, group: int, index: int) -> Slot:
        state = self.state[param]
        local = {key: _local(state[key]) for key in _STATE[1:] if key in state}
        return Slot(param=_local(param).detach(), **local, group=group, index=index)


class _Device:
    """The fused optimizer of the parameters on one device, and the table of their groups' scalars there."""

    def __init__(self, owner: AdamWDW, device: torch.device, members: list[tuple[int, int, Tensor]]) -> None:
        self.params = [param for _, _, param in members]
        steps = torch.stack([owner.state[param]["step"].to(device, torch.int64) for param in self.params])
        for param, step in zip(self.params, steps.unbind(), strict=True):
            owner.state[param]["step"] = step  # a view: the device counts in the table
        first = owner.param_groups[0]
        self.fused = FusedAdamW(
            [owner._slot(param, group, index) for index, group, param in members],
            steps=steps,
            seed=first["seed"],
            clip_norm=first["clip_norm"],
            skip_nonfinite=first["skip_nonfinite"],
            random_params=first["stochastic_rounding"],
            random_moments=first["stochastic_rounding"],
            config=owner._config,
        )
        self.is_sharded = any(_local(param) is not param for param in self.params)
        self._groups = torch.zeros((len(owner.param_groups), 7), dtype=torch.float64, device=device)
        self._sent: list[list[float]] = []

    def is_stale(self) -> bool:
        """Whether a parameter lies elsewhere than when the tables were made (its .data was replaced)."""
        slots = self.fused.slots
        return any(_local(p).data_ptr() != slot.param.data_ptr() for p, slot in zip(self.params, slots, strict=True))

    def step(self, groups: list[dict[str, Any]]) -> None:
        grads = [_gradient(param, i) for i, param in enumerate(self.params)]
        if self.is_sharded and self.fused.has_norm:
            raise UnsupportedError(
                "clip_norm and skip_nonfinite see one rank's shard of DTensor parameters; "
                "clip with torch.nn.utils.clip_grad_norm_ before step()"
            )
        self._send(groups)
        self.fused.step(grads, self._groups)

    def _send(self, groups: list[dict[str, Any]]) -> None:
        """Bring the groups' scalars to the device where they changed; a tensor lr is copied there each time."""
        rows = [_scalars(group) for group in groups]
        if rows != self._sent:
            self._sent = rows
            host = torch.tensor(rows, dtype=torch.float64)
            if self._groups.is_cuda:
                host = host.pin_memory()
            self._groups.copy_(host, non_blocking=True)
        for row, group in zip(self._groups, groups, strict=True):
            if isinstance(group["lr"], Tensor):
                row[0].copy_(group["lr"].reshape(()), non_blocking=True)


def _scalars(group: dict[str, Any]) -> list[float]:
    """A group's row: lr (0 for a tensor, which is copied), betas, eps, weight decay, the gradient's sign, clip_norm."""
    lr = 0.0 if isinstance(group["lr"], Tensor) else float(group["lr"])
    sign = -1.0 if group["maximize"] else 1.0
    clip_norm = 0.0 if group["clip_norm"] is None else float(group["clip_norm"])
    return [lr, *map(float, group["betas"]), float(group["eps"]), float(group["weight_decay"]), sign, clip_norm]


def _zeros(param: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeros laid out as the parameter. FP8 has no zeros on every device, its bytes have."""
    if dtype != adamw.FP8:
        return torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
    return torch.zeros_like(_local(param), dtype=torch.uint8, memory_format=torch.preserve_format).view(adamw.FP8)


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; any other tensor as it is."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def _gradient(param: Tensor, number: int) -> Tensor | None:
    """The parameter's gradient in the parameter's layout. Raises UnsupportedError for a sparse one."""
    grad = param.grad
    if grad is None:
        return None
    if grad.layout != torch.strided:
        raise UnsupportedError(
            f"the gradient of parameter {number} ({tuple(param.shape)}) is sparse; adamw_dw takes dense gradients: "
            "build the embedding with sparse=False"
        )
    grad, local = _local(grad).detach(), _local(param)
    if grad.dtype not in _PARAM_DTYPES:
        raise ConfigError(
            f"the gradient of parameter {number} has dtype {grad.dtype}; adamw_dw takes float32 and bfloat16"
        )
    if grad.stride() != local.stride():
        grad = torch.empty_like(local, dtype=grad.dtype, memory_format=torch.preserve_format).copy_(grad)
    return grad


def _check_group(name: str, group: dict[str, Any], first: dict[str, Any]) -> None:
    """Raise ConfigError or UnsupportedError naming the option or parameter of a group that is wrong."""
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ConfigError(f"{name}: lr must hold one number, got shape {tuple(lr.shape)}")
    betas = group["betas"]
    if len(betas) != 2 or any(isinstance(beta, Tensor) or not 0.0 <= beta < 1.0 for beta in betas):
        raise ConfigError(f"{name}: betas must be two numbers in [0, 1), got {betas!r}")
    for key in ("lr", "eps", "weight_decay"):
        if not isinstance(group[key], Tensor) and not group[key] >= 0.0:
            raise ConfigError(f"{name}: {key} must not be negative, got {group[key]!r}")
    if group["moments"] is not None and group["moments"] not in MOMENTS:
        raise ConfigError(f"{name}: moments must be one of {', '.join(MOMENTS)} or None, got {group['moments']!r}")
    if group["master_weights"] not in {None, "fp32"}:
        raise ConfigError(f"{name}: master_weights must be 'fp32' or None, got {group['master_weights']!r}")
    if group["clip_norm"] is not None and not group["clip_norm"] > 0.0:
        raise ConfigError(f"{name}: clip_norm must be positive or None, got {group['clip_norm']!r}")
    for key in _SHARED:
        if group[key] != first[key]:
            raise ConfigError(f"{name}: {key}={group[key]!r} differs from {first[key]!r} of the first group; it is one")
    for i, param in enumerate(group["params"]):
        _check_param(f"{name}['params'][{i}]", param)


def _check_param(name: str, param: Tensor) -> None:
    if param.is_complex():
        raise UnsupportedError(f"{name} is complex; adamw_dw updates real parameters: use torch.view_as_real")
    if param.dtype not in _PARAM_DTYPES:
        raise ConfigError(f"{name} has dtype {param.dtype}; adamw_dw updates float32 and bfloat16 parameters")
    if param.layout != torch.strided:
        raise UnsupportedError(f"{name} is sparse ({param.layout}); adamw_dw updates dense parameters")
    if not is_dense(_local(param)):
        raise UnsupportedError(f"{name} has gaps or overlaps (strides {param.stride()}); make it contiguous")


OPTIMIZERS = {"adamw_dw": AdamWDW}
