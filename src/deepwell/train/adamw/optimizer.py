"""adamw_dw: a drop-in torch.optim.AdamW that runs as one fused pass, in low precision where the caller wants it.

    optimizer = AdamWDW(model.parameters(), lr=3e-4, moments="fp8", clip_norm=1.0)

bf16 parameters without master weights are rounded at random, so that small updates are not lost; the random bits depend
on nothing but (seed, step, parameter, element), so a resumed run continues bit for bit. Nothing waits for the device:
step counts, clipping, skipped steps and a learning rate given as a tensor stay on it.
"""

from collections.abc import Callable, Iterable
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from deepwell.errors import ConfigError, UnsupportedError
from deepwell.train.adamw.moments import BLOCK, FP8, encode_ref
from deepwell.train.adamw.tables import FusedAdamW
from deepwell.train.adamw.update import Slot, UpdateConfig, flat

MOMENTS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": FP8}
_PARAM_DTYPES = (torch.float32, torch.bfloat16)
# What one set of parameters on a device must agree on; the rest may differ from group to group.
_SHARED = ("clip_norm", "seed", "stochastic_rounding", "skip_nonfinite")
# Options that decide what is kept of a parameter; with the shared ones, what the tables were made for.
_KEPT = ("moments", "master_weights")
# Options of torch.optim.AdamW that adamw_dw cannot follow, and why.
_REFUSED = {
    "amsgrad": "adamw_dw keeps no maximum of the second moment: use torch.optim.AdamW",
    "differentiable": "the fused update records no gradient: use torch.optim.AdamW",
}
# State that must come back from a checkpoint in its own dtype; torch would cast it to the parameter's.
_STATE = ("step", "exp_avg", "exp_avg_sq", "exp_avg_scales", "exp_avg_sq_scales", "master")


class AdamWDW(torch.optim.Optimizer):
    """AdamW with decoupled weight decay, fused over all parameters; registered as "adamw_dw".

    `moments`: "bf16", "fp32" or "fp8" (E4M3 with fp32 scales per 128 elements); None takes the parameter's own dtype,
    as torch does. `master_weights="fp32"` keeps an fp32 copy of bf16 parameters and updates that. `stochastic_rounding`
    is for whatever is kept in bf16 or FP8. `clip_norm` scales gradients to that global norm and, as `skip_nonfinite`
    alone does, skips a step whose norm is inf or NaN (`num_skipped` counts them); either reads the gradients once more.
    `lr` may be a tensor on the parameters' device. `moments` and `master_weights` may be set by group as well as lr,
    betas, eps, weight_decay, maximize. Groups and their options may be edited between steps.
    `fused` and `foreach` choose among torch's implementations; here there is one, and they change nothing. A step can
    always be captured in a CUDA graph, so `capturable` changes nothing either. Raises ConfigError on a wrong value, and
    on `amsgrad` and `differentiable`; UnsupportedError on sparse or complex parameters and gradients.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
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
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
            "master_weights": master_weights,
            "moments": moments,
            "stochastic_rounding": stochastic_rounding,
            "clip_norm": clip_norm,
            "skip_nonfinite": skip_nonfinite,
            "seed": seed,
        }
        self._config = config
        self._fused: dict[torch.device, _Device] = {}
        self._made_for: tuple[object, ...] = ()
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with their own options; see torch.optim.Optimizer."""
        super().add_param_group(param_group)
        number = len(self.param_groups) - 1
        _check_group(f"param_groups[{number}]", self.param_groups[number], self.param_groups[0])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns what `closure` returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        made_for = self._layout()
        if made_for != self._made_for or any(device.is_stale(self.state) for device in self._fused.values()):
            self._prepare()
            self._made_for = made_for
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
        return any(group["clip_norm"] is not None or group["skip_nonfinite"] for group in self.param_groups)

    @property
    def grad_norm(self) -> Tensor | None:
        """The gradients' norm before clipping at the last step, on the device; None without clip_norm."""
        devices = list(self._fused.values())
        return devices[0].fused.norm if devices and devices[0].fused.has_norm else None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state bit for bit; torch would cast moments and master weights to the parameter's dtype.

        That of a torch.optim.AdamW can be loaded too: what its groups do not have stays as it is here, and the moments
        are rounded to `moments` at the next step.
        """
        saved_groups, own_groups = state_dict["param_groups"], self.param_groups
        super().load_state_dict(state_dict)
        saved_ids = [i for group in saved_groups for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for saved_id, param in zip(saved_ids, params, strict=True):
            for key, value in state_dict["state"].get(saved_id, {}).items():
                if key in _STATE and isinstance(value, Tensor):
                    local = value.detach().to(param.device)
                    self.state[param][key] = local.clone() if local.data_ptr() == value.data_ptr() else local
        for number, (group, saved, own) in enumerate(zip(self.param_groups, saved_groups, own_groups, strict=True)):
            group.update({key: own[key] for key in self.defaults if key not in saved})
            _check_group(f"param_groups[{number}]", group, self.param_groups[0])

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)

    def __getstate__(self) -> dict[str, Any]:
        # Tables hold addresses: they are made anew from the state.
        return {**super().__getstate__(), "_fused": {}, "_made_for": (), "_config": self._config}

    def _layout(self) -> tuple[object, ...]:
        """Which parameters are updated, group by group, and the options that the tables depend on."""
        return tuple(
            (*(id(p) for p in group["params"] if self._is_updated(p)), *(group[key] for key in (*_SHARED, *_KEPT)))
            for group in self.param_groups
        )

    def _is_updated(self, param: Tensor) -> bool:
        """Whether a parameter needs state: a frozen one, as LoRA leaves most, does not."""
        return param.requires_grad or param.grad is not None or param in self.state

    def _prepare(self) -> None:
        """Make the state that is missing and the tables of each device."""
        members: dict[torch.device, list[tuple[int, int, Tensor]]] = {}
        index = 0
        for number, group in enumerate(self.param_groups):
            _check_group(f"param_groups[{number}]", group, self.param_groups[0])
            for param in group["params"]:
                if self._is_updated(param):
                    _check_state(f"the state of parameter {index}", param, self.state[param])
                    self._fit_state(param, group)
                    members.setdefault(param.device, []).append((index, number, param))
                index += 1
        if len(members) > 1 and self.clips_by_itself:
            where = ", ".join(map(str, members))
            raise UnsupportedError(f"clip_norm and skip_nonfinite need parameters on one device, got {where}")
        before, self._fused = self._fused, {}
        for device, found in members.items():
            made = self._fused[device] = _Device(self, device, found)
            if device in before:
                made.fused.num_skipped.copy_(before[device].fused.num_skipped)

    def _fit_state(self, param: Tensor, group: dict[str, Any]) -> None:
        """Make the parameter's state, or bring one that was loaded or made for other options to the group's."""
        state, dtype = self.state[param], param.dtype if group["moments"] is None else MOMENTS[group["moments"]]
        if "exp_avg" not in state:
            state["step"] = torch.zeros((), dtype=torch.int64, device=param.device)
            for key in ("exp_avg", "exp_avg_sq"):
                self._keep_moment(param, key, None, dtype)
        for key in ("exp_avg", "exp_avg_sq"):
            kept = _local(state[key])
            if kept.dtype != dtype or kept.stride() != _local(param).stride():
                self._keep_moment(param, key, _moment(kept, state.get(f"{key}_scales"), key), dtype)
        if group["master_weights"] != "fp32" or param.dtype == torch.float32:
            state.pop("master", None)
        elif "master" not in state:
            state["master"] = param.detach().to(torch.float32, memory_format=torch.preserve_format)

    def _keep_moment(self, param: Tensor, key: str, values: Tensor | None, dtype: torch.dtype) -> None:
        """Store a moment in a dtype, zero where no values are given; FP8 with its scales."""
        state = self.state[param]
        state[key], scales = _zeros(param, dtype), f"{key}_scales"
        state.pop(scales, None)
        if dtype == FP8:
            num_blocks = -(-_local(param).numel() // BLOCK)
            state[scales] = torch.ones(num_blocks, dtype=torch.float32, device=param.device)
            if values is not None:
                laid_out = torch.empty_like(_local(param), dtype=torch.float32).copy_(values)
                is_root = key == "exp_avg_sq"
                x = flat(laid_out.sqrt() if is_root else laid_out)
                encode_ref(x, flat(state[key]), state[scales], None, is_root=is_root)
        elif values is not None:
            _local(state[key]).copy_(values)

    def _slot(self, param: Tensor, group: int, index: int) -> Slot:
        state = self.state[param]
        local = {key: _local(state[key]) for key in _STATE[1:] if key in state}
        return Slot(param=_local(param).detach(), **local, group=group, index=index)


class _Device:
    """The fused optimizer of the parameters on one device, and the table of their groups' scalars there."""

    def __init__(self, owner: AdamWDW, device: torch.device, members: list[tuple[int, int, Tensor]]) -> None:
        self.params = [param for _, _, param in members]
        counts = [torch.as_tensor(owner.state[param]["step"]) for param in self.params]
        steps = torch.stack([count.to(device, torch.int64) for count in counts])
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
        self._states = [tuple(owner.state[param].values()) for param in self.params]
        self._groups = torch.zeros((len(owner.param_groups), 7), dtype=torch.float64, device=device)
        self._sent: list[list[float]] = []

    def is_stale(self, states: dict[Tensor, dict[str, Any]]) -> bool:
        """Whether a parameter lies elsewhere than when the tables were made, or its state was replaced."""
        for param, slot, known in zip(self.params, self.fused.slots, self._states, strict=True):
            if _local(param).data_ptr() != slot.param.data_ptr():
                return True
            state = states.get(param, {})
            if len(state) != len(known) or not all(map(is_, state.values(), known)):
                return True
        return False

    def step(self, groups: list[dict[str, Any]]) -> None:
        grads = [_gradient(param, i) for i, param in enumerate(self.params)]
        if self.is_sharded and self.fused.has_norm:
            raise UnsupportedError(
                "clip_norm and skip_nonfinite see one rank's shard of DTensor parameters; "
                "clip with torch.nn.utils.clip_grad_norm_ before step()"
            )
        self._send(groups)
        self.fused.step(grads, self._groups)
        # The kernels write by address. Whoever saved a parameter for a backward must see it, as of torch's own writes.
        increment_version([p for p, grad in zip(self.params, grads, strict=True) if grad is not None])

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
    if dtype != FP8:
        return torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
    return torch.zeros_like(_local(param), dtype=torch.uint8, memory_format=torch.preserve_format).view(FP8)


def _moment(kept: Tensor, scales: Tensor | None, key: str) -> Tensor:
    """A stored moment as numbers: the FP8 codes of the second one are those of its root."""
    if scales is None:
        return kept
    values = torch.empty_like(kept, dtype=torch.float32)
    flat(values).copy_(flat(kept).float() * scales.repeat_interleave(BLOCK)[: kept.numel()])
    return values.square() if key == "exp_avg_sq" else values


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
    for key, why in _REFUSED.items():
        if group[key]:
            raise ConfigError(f"{name}: {key}={group[key]!r}; {why}")
    if group["fused"] and group["foreach"]:
        raise ConfigError(f"{name}: fused and foreach are both True; torch takes one of them, and here neither matters")
    betas = group["betas"] = tuple(map(_number, group["betas"]))
    if len(betas) != 2 or any(not 0.0 <= beta < 1.0 for beta in betas):
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


def _number(value: float | Tensor) -> float:
    return value.item() if isinstance(value, Tensor) else value


def _check_param(name: str, param: Tensor) -> None:
    if param.is_complex():
        raise UnsupportedError(f"{name} is complex; adamw_dw updates real parameters: use torch.view_as_real")
    if param.dtype not in _PARAM_DTYPES:
        raise ConfigError(f"{name} has dtype {param.dtype}; adamw_dw updates float32 and bfloat16 parameters")
    if param.layout != torch.strided:
        raise UnsupportedError(f"{name} is sparse ({param.layout}); adamw_dw updates dense parameters")
    if not is_dense(_local(param)):
        raise UnsupportedError(f"{name} has gaps or overlaps (strides {param.stride()}); make it contiguous")


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one piece of memory without gaps or overlap, in whatever order of dimensions."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[1]):
        if size != 1 and stride != expected:
            return tensor.numel() == 0
        expected *= size
    return True


def _check_state(name: str, param: Tensor, state: dict[str, Any]) -> None:
    """Raise ConfigError for a loaded state that is not one of this parameter: the kernels go by addresses alone."""
    local = _local(param)
    blocks = -(-local.numel() // BLOCK)
    for key in (key for key in _STATE[1:] if key in state):
        kept, moment = _local(state[key]), state.get(key.removesuffix("_scales"))
        is_scales = key.endswith("_scales")
        if tuple(kept.shape) != ((blocks,) if is_scales else tuple(local.shape)) or kept.device != local.device:
            raise ConfigError(f"{name}: {key} is {tuple(kept.shape)} on {kept.device}, unlike its parameter")
        if is_scales and (kept.dtype != torch.float32 or moment is None or moment.dtype != FP8):
            raise ConfigError(f"{name}: {key} must be float32 and of float8_e4m3fn moments")
        if key == "master" and (kept.dtype != torch.float32 or kept.stride() != local.stride()):
            raise ConfigError(f"{name}: a master copy is float32 and laid out as its parameter")
        if kept.dtype == FP8 and f"{key}_scales" not in state:
            raise ConfigError(f"{name}: {key} is float8_e4m3fn and has no scales")


OPTIMIZERS = {"adamw_dw": AdamWDW}
