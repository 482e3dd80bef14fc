"""Experts on several ranks: tokens travel to the ranks of their experts, and each rank's sum comes back.

    tokens of this rank  --all-to-all-->  tokens of all ranks that have a choice among the local experts
    the local experts: one row a token, with its choices here and their weights
    their sums           --all-to-all-->  back to the tokens' ranks, added up over ranks

A token goes to a rank once, however many of its experts are there. How many go where is known when the router has
spoken: the host reads it once a layer. Between the exchanges lies the experts' own forward, which takes any number of
rows; choices of other ranks are one past its last expert.
"""

# Shapes: T tokens here, R ranks, K choices a token, n rows sent, m rows received, H width of a token.

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from deepwell.errors import ConfigError, UnsupportedError
from deepwell.kernels.quantize.torch_ops import ops

Forward = Callable[..., Tensor]
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
        return _all_to_all(rows, received, sent, group)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return Exchange.apply(grads[0], *ctx.way_back), None, None, None


class _StartedExchange(torch.autograd.Function):
    """An exchange that is under way when it returns: `works` has what to wait for before the result is read.

    In "fp8" rows travel as the bytes of their E4M3 values with a power-of-two scale each, and arrive rounded; the
    gradient goes back as it is.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, splits: tuple[list[int], list[int]], group: Any, fp8: bool, works: list[Any]
    ) -> Tensor:
        received, sent = splits
        ctx.way_back = (sent, received, group)
        if not fp8:
            out, work = _all_to_all(rows, received, sent, group, wait=False)
            works.append(work.wait)
            return out
        values, scales = ops.quantize_rows(rows)
        bytes_, first = _all_to_all(values.view(torch.uint8), received, sent, group, wait=False)
        scale, second = _all_to_all(scales, received, sent, group, wait=False)
        out = rows.new_empty((sum(received), rows.shape[1]))

        def arrive() -> None:
            first.wait()
            second.wait()
            with torch.no_grad():  # this fills what was returned, it is no step of its own
                out.copy_(bytes_.view(values.dtype).to(torch.float32) * scale[:, None])

        works.append(arrive)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return Exchange.apply(grads[0], *ctx.way_back), None, None, None, None


def _all_to_all(
    rows: Tensor, received: list[int], sent: list[int], group: Any, *, wait: bool = True
) -> tuple[Tensor, Any]:
    out = rows.new_empty((sum(received), *rows.shape[1:]))
    return out, dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group, async_op=not wait)


class _Trip(NamedTuple):
    """What goes where: rows to and from each rank; per row its token, and its choices as the receiver numbers them."""

    sent: list[int]
    received: list[int]
    token: Tensor
    choices: Tensor
    is_there: Tensor


class ExpertExchange:
    """Calls `inner`, the forward of the `local` experts of this rank, with the tokens of all ranks of a group.

    `is_fp8` is asked at every call whether tokens travel in FP8.
    """

    def __init__(self, inner: Forward, local: int, group: Any, is_fp8: Callable[[], bool] = lambda: False) -> None:
        self._inner, self._local, self._group, self._is_fp8 = inner, local, group, is_fp8
        self._world = dist.get_world_size(group)

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """As the experts' forward: tokens, their choices among all experts and weights."""
        return self.run(hidden_states, top_k_index, top_k_weights, None)[0]

    def run(
        self, x_TH: Tensor, index_TK: Tensor, weight_TK: Tensor, meanwhile: Callable[[], Tensor] | None
    ) -> tuple[Tensor, Tensor | None]:
        """The experts' sums, and what `meanwhile` gave, which runs while the tokens travel."""
        trip = self._plan(index_TK)
        splits = (trip.received, trip.sent)
        works: list[Callable[[], Any]] = []
        rows = _StartedExchange.apply(x_TH[trip.token], splits, self._group, self._is_fp8(), works)
        made = None if meanwhile is None else meanwhile()
        index = _all_to_all(trip.choices, *splits, self._group)[0]
        weight = Exchange.apply(weight_TK[trip.token] * trip.is_there, *splits, self._group)
        for wait in works:
            wait()
        given = _at_least(rows), _at_least(index, self._local), _at_least(weight)
        for each in given:
            torch._dynamo.maybe_mark_dynamic(each, 0)
        out = self._inner(*given)[: len(rows)]
        back = Exchange.apply(out, trip.sent, trip.received, self._group)
        y_TH = torch.zeros(x_TH.shape, dtype=torch.float32, device=x_TH.device)
        # A token is once in the rows of each rank, so that every sum has one order.
        for part, token in zip(back.split(trip.sent), trip.token.split(trip.sent), strict=True):
            y_TH = y_TH.index_add_(0, token, part.float())
        return y_TH.to(x_TH.dtype), made

    @torch.no_grad()
    def _plan(self, index_TK: Tensor) -> _Trip:
        tokens, world, local = index_TK.shape[0], self._world, self._local
        is_real = (index_TK >= 0) & (index_TK < world * local)
        rank = torch.where(is_real, index_TK // local, world)
        goes = torch.zeros(tokens, world + 1, dtype=torch.int64, device=index_TK.device).scatter_(1, rank, 1)
        goes = goes[:, :world].T.reshape(-1)  # rows by rank, then by token
        counts = goes.view(world, tokens).sum(1)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=self._group)
        # The one place where the host waits for the device.
        sent, received = torch.stack((counts, theirs)).tolist()
        total = sum(sent)
        place = torch.where(goes > 0, goes.cumsum(0) - 1, total)
        order = torch.empty(total + 1, dtype=torch.int64, device=goes.device)
        order = order.scatter_(0, place, torch.arange(len(goes), device=goes.device))[:total]
        token, target = order % max(1, tokens), order // max(1, tokens)
        index = index_TK[token] - target[:, None] * local
        is_there = (index >= 0) & (index < local)
        return _Trip(sent, received, token, torch.where(is_there, index, local), is_there)


def _at_least(rows: Tensor, fill: float = 0.0) -> Tensor:
    """Rows without a choice behind those of a rank that nearly no token came to."""
    missing = _LEAST_ROWS - len(rows)
    return rows if missing <= 0 else torch.cat([rows, rows.new_full((missing, *rows.shape[1:]), fill)])


def shard_experts(module: nn.Module, mesh: DeviceMesh, path: str = "experts") -> None:
    """Leave this rank its experts, in place: parameters become DTensors, `Shard(0)` on the mesh.

    Raises ConfigError where the ranks do not divide the experts, UnsupportedError where a parameter is not one row for
    each expert.
    """
    holder: Any = module
    ranks, experts = mesh.size(), int(holder.num_experts)
    if experts % ranks:
        raise ConfigError(f"ep is {ranks} and {path} has {experts} experts; ep must divide their number")
    for owner_path, owner in module.named_modules():
        for name, parameter in list(owner._parameters.items()):
            if parameter is None:
                continue
            if parameter.dim() == 0 or parameter.shape[0] != experts:
                full = ".".join(filter(None, (path, owner_path, name)))
                raise UnsupportedError(
                    f"ep: {full} is {tuple(parameter.shape)}, not one row for each of the {experts} experts; "
                    "leave ep at 1"
                )
            shards = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
            owner._parameters[name] = nn.Parameter(shards, requires_grad=parameter.requires_grad)
    holder.num_experts = experts // ranks


def spread_experts(module: nn.Module, mesh: DeviceMesh, *, is_fp8: Callable[[], bool] = lambda: False) -> None:
    """Spread an experts module over the ranks of a mesh and send tokens between them; its forward stays what it was.

    For models that no trainer spreads. FSDP2 may shard the parameters once more, on a mesh across this one.
    """
    shard_experts(module, mesh)
    holder: Any = module
    module.forward = ExpertExchange(module.forward, holder.num_experts, mesh.get_group(), is_fp8)
