"""Host memory that a state is copied into, so that training can go on while it is written.

The buffers are kept from save to save: pinning memory takes longer than filling it. On a GPU the copies run on a
stream of their own beside the next forward and backward. Only the optimizer's update may not overtake them, and
`before_update` makes the compute stream wait for that, without stopping the host.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from deepwell.artifacts.tensor_file import as_bytes

# Torch rounds pinned memory up to a power of two: whole chunks waste nothing, and the last is as large as is needed.
_CHUNK = 64 << 20


class Staging:
    """The bytes of a list of tensors, one after the other, in host memory."""

    def __init__(self) -> None:
        self._chunks: list[Tensor] = []
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None

    def copy(self, tensors: Sequence[Tensor], changing: Sequence[bool]) -> None:
        """Begin to copy tensors; those that `changing` marks may change as soon as this returns."""
        device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
        self._reserve(sum(tensor.numel() * tensor.element_size() for tensor in tensors), pinned=device is not None)
        # A buffer may be written by the very next forward: it is copied on the device first, in the order of its work.
        pairs = list(zip(tensors, changing, strict=True))
        sources = [t.detach().clone() if t.is_cuda and now else t.detach() for t, now in pairs]
        self._copied = None
        if device is None:
            self._fill(sources)
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            self._fill(sources)
            for source, now in zip(sources, changing, strict=True):
                if source.is_cuda and now:
                    source.record_stream(self._stream)
            self._copied = torch.cuda.Event()
            self._copied.record(self._stream)

    def before_update(self) -> None:
        """Let the compute stream wait until the copies are done; the host does not wait."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def wait(self) -> None:
        """Wait until the copies are done."""
        if self._copied is not None:
            self._copied.synchronize()

    def read(self, begin: int, end: int) -> Iterator[memoryview]:
        """The copied bytes from `begin` to `end`; call `wait` before."""
        for number in range(begin // _CHUNK, -(-end // _CHUNK)):
            first = number * _CHUNK
            yield self._chunks[number][max(begin - first, 0) : end - first].numpy().data

    def free(self) -> None:
        """Give the memory back."""
        self.wait()
        self._chunks, self._stream, self._copied = [], None, None

    def _reserve(self, size: int, *, pinned: bool) -> None:
        has_room = sum(chunk.numel() for chunk in self._chunks) >= size
        if has_room and (not pinned or all(chunk.is_pinned() for chunk in self._chunks)):
            return
        self._chunks = []
        for begin in range(0, size, _CHUNK):
            self._chunks.append(torch.empty(min(_CHUNK, size - begin), dtype=torch.uint8, pin_memory=pinned))

    def _fill(self, sources: Sequence[Tensor]) -> None:
        at = 0
        for source in sources:
            data = as_bytes(source.contiguous())
            while data.numel():
                number, used = divmod(at, _CHUNK)
                size = min(data.numel(), _CHUNK - used)
                self._chunks[number][used : used + size].copy_(data[:size], non_blocking=True)
                data, at = data[size:], at + size
