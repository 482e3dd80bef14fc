"""Keep what layers save for their backward in host memory: copied out while the next layer runs, back for the backward.

On a GPU copies out have a stream of their own, and the second layer behind waits for them: the tensors of two layers at
most are on the device. Copies back are on the stream that needs them. On a CPU the same copies are made, from host
memory to host memory: a model runs the same way on both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


class _OnHost(NamedTuple):
    values: Tensor
    device: torch.device


class HostMemory:
    """Where saved tensors go. `num_bytes` is how much has gone there so far."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._stream: torch.cuda.Stream | None = None
        # Tensors of layers that are being copied. They are held until the layers' stream has waited for the copies:
        # only then may it use their memory for others.
        self._leaving: deque[tuple[torch.cuda.Event, list[Tensor]]] = deque()

    def around(self, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        """`forward`, whose saved tensors go to the host, but for the module's parameters, which stay in any case."""

        def run(*args: Any, **kwargs: Any) -> Any:
            weights = {_storage(parameter) for parameter in module.parameters()}
            leaving: list[Tensor] = []

            def pack(tensor: Tensor) -> Tensor | _OnHost:
                return tensor if _storage(tensor) in weights else self._to_host(tensor, leaving)

            with saved_tensors_hooks(pack, self._to_device):
                out = forward(*args, **kwargs)
            if leaving and self._stream is not None:
                self._leaving.append((self._stream.record_event(), leaving))
                self._wait(1)
            return out

        return run

    def _wait(self, layers: int) -> None:
        """Until at most the tensors of so many layers are still being copied."""
        while len(self._leaving) > layers:
            event, tensors = self._leaving.popleft()
            torch.cuda.current_stream(tensors[0].device).wait_event(event)
            tensors.clear()  # autograd holds the hooks, and they this list, until the backward

    def _to_host(self, tensor: Tensor, leaving: list[Tensor]) -> Tensor | _OnHost:
        values = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        # Expanded, or a part of another: a graph counts on the strides that it saw. Scalars are not worth a copy.
        if tensor.dim() == 0 or values.stride() != tensor.stride():
            return tensor
        self.num_bytes += tensor.nbytes
        if tensor.is_cuda:
            self._stream = self._stream or torch.cuda.Stream(tensor.device)
            self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
            with torch.cuda.stream(self._stream):
                values.copy_(tensor, non_blocking=True)
            leaving.append(tensor)
        else:
            values.copy_(tensor)
        return _OnHost(values, tensor.device)

    def _to_device(self, packed: Tensor | _OnHost) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        self._wait(0)
        out = torch.empty_like(packed.values, device=packed.device)
        return out.copy_(packed.values, non_blocking=True)


def _storage(tensor: Tensor) -> int:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.untyped_storage()._cdata
