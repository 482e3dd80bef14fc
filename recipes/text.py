"""Text that every machine has: the sources of Python's standard library, as bytes."""

import sysconfig
from pathlib import Path

import torch
from torch import Tensor


def standard_library_bytes(limit: int = 4_000_000) -> bytes:
    """The standard library's sources in a fixed order, at most `limit` bytes."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    out = bytearray()
    for path in sorted(folder.glob("*.py")):
        out += path.read_bytes()
        if len(out) >= limit:
            break
    return bytes(out[:limit])


def batches(text: bytes, batch: int, seq_len: int, count: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """`count` pairs of tokens and next tokens, drawn at random places, the same for the same seed."""
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, len(data) - seq_len - 1, (count, batch), generator=generator)
    windows = starts[..., None] + torch.arange(seq_len + 1)
    return [(data[w][:, :-1], data[w][:, 1:]) for w in windows]
