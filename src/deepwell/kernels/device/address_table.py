"""A table of addresses in device memory: what one launch over many tensors reads them by."""

import torch


class Table:
    """A table of int64 words in device memory that is sent again only when it changed."""

    def __init__(self, device: torch.device, columns: int) -> None:
        self.device = device
        self.columns = columns
        self.words = torch.empty((0, columns), dtype=torch.int64, device=device)
        self._sent: list[tuple[int, ...]] = []

    def write(self, rows: list[tuple[int, ...]]) -> None:
        """Make `rows` the content."""
        if rows == self._sent:
            return
        self._sent = rows
        host = torch.tensor(rows, dtype=torch.int64)
        if self.device.type == "cuda":
            host = host.pin_memory()  # else the copy would wait for the GPU
        self.words = host.to(self.device, non_blocking=True)
