"""A fingerprint of a weight's content: whether it is still what it was, whoever wrote into it and however.

    F = (sum_i m(i) * w(i),  sum_i m(i) * (w(i) >> 32))  mod 2^64

over the weight's 64-bit words w, with m(i) = odd(i // 1024) * odd(i % 1024) and odd(k) = splitmix64(k) | 1.

Numerics: integers, so the order of the sums does not matter. A change of one word always changes F. Any other change is
    missed with odds of 2^-33 at most: a change of the words' upper bits alone, as of signs, which leaves little of the
    first sum's 64 bits, is in the lower bits of the second.
Cost: memory bound, the weight is read once.
"""

from functools import lru_cache

import torch
from torch import Tensor

from deepwell.kernels.device.triton_support import cdiv, launch, on_device, runs_kernel, tl, triton

_COLUMNS = 1024
_BLOCK = 4096


# ---- reference: what the kernel must compute, in the plainest torch ----


def fingerprint_ref(weight: Tensor) -> Tensor:
    words = _words(weight)
    places = torch.arange(words.numel(), device=words.device)
    m = _odd(places // _COLUMNS) * _odd(places % _COLUMNS)
    return torch.stack([(m * words).sum(), (m * (words >> 32)).sum()])


def _words(weight: Tensor) -> Tensor:
    """The weight's bytes as int64, padded with zeros."""
    data = weight.detach().contiguous().reshape(-1).view(torch.uint8)
    left = -data.numel() % 8
    return (torch.nn.functional.pad(data, (0, left)) if left else data).view(torch.int64)


def _odd(k: Tensor) -> Tensor:
    """splitmix64 of each number, made odd; torch multiplies int64 modulo 2^64 and shifts their sign in."""
    z = (k + 1) * -0x61C8864680B583EB
    z = (z ^ ((z >> 30) & (2**34 - 1))) * -0x40A7B892E31B1A47
    z = (z ^ ((z >> 27) & (2**37 - 1))) * -0x6B2FB644ECCEEE15
    return (z ^ ((z >> 31) & (2**33 - 1))) | 1


@lru_cache(maxsize=64)
def _factors(count: int, device: torch.device) -> Tensor:
    """odd(0), odd(1) ... for one of the two indices."""
    return _odd(torch.arange(count, device=device))


# ---- kernel ----


@triton.jit
def _fingerprint_kernel(w_ptr, rows_ptr, columns_ptr, out_ptr, numel, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    w = tl.load(w_ptr + i, mask=i < numel, other=0)
    m = tl.load(rows_ptr + i // COLUMNS, mask=i < numel, other=0) * tl.load(columns_ptr + i % COLUMNS)
    # Sums modulo 2^64 do not depend on the order in which programs add theirs.
    tl.atomic_add(out_ptr, tl.sum(w * m), sem="relaxed")
    tl.atomic_add(out_ptr + 1, tl.sum((w >> 32) * m), sem="relaxed")


# ---- public wrapper ----


@torch.no_grad()
def fingerprint(weight: Tensor) -> Tensor:
    """Two int64 on the weight's device that tell its content; reads the weight once."""
    words = _words(weight)
    num_rows = -(-words.numel() // _COLUMNS)
    rows, columns = _factors(num_rows, words.device), _factors(_COLUMNS, words.device)
    if runs_kernel(weight, _fingerprint_kernel):
        out = torch.zeros(2, dtype=torch.int64, device=words.device)
        with on_device(weight):
            grid = (cdiv(words.numel(), _BLOCK),)
            launch(_fingerprint_kernel, grid)(
                words, rows, columns, out, words.numel(), COLUMNS=_COLUMNS, BLOCK=_BLOCK, num_warps=8
            )
        return out
    total = torch.zeros(2, dtype=torch.int64, device=words.device)
    # By parts that stay in a CPU's cache.
    for first in range(0, num_rows, 64):
        part = words[first * _COLUMNS : (first + 64) * _COLUMNS]
        whole = part[: part.numel() // _COLUMNS * _COLUMNS].view(-1, _COLUMNS)
        rest = part[whole.numel() :]
        for number, shift in enumerate((0, 32)):
            sums = (whole >> shift if shift else whole) @ columns if whole.numel() else columns[:0]
            total[number] += (sums * rows[first : first + len(whole)]).sum()
            if rest.numel():
                total[number] += ((rest >> shift) * columns[: rest.numel()]).sum() * rows[num_rows - 1]
    return total
