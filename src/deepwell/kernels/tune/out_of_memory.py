"""Lack of memory, distinguished from what is a kernel's own fault: it says nothing of the kernel, and it may pass.

A product that runs out of memory raises, as torch's own do: a training loop catches that, takes a smaller batch and
goes on with the same kernels. A trial that runs out of memory is skipped: it is neither right nor wrong, and nothing of
it is kept on disk.
"""

SKIPPED = "skipped for lack of memory"
# torch's allocators, the CUDA driver (also through Triton), the C library and cuBLAS, in their own words. Triton's "out
# of resource: shared memory" is not among them: that is the kernel's tile.
_SIGNS = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "status_alloc_failed",
)


def says_shortage(text: str) -> bool:
    """Whether a message speaks of lack of memory."""
    lower = text.lower()
    return lower.startswith(SKIPPED) or any(sign in lower for sign in _SIGNS)


def is_shortage(error: BaseException) -> bool:
    """Whether an error is lack of memory, by its type or, of libraries that have no type for it, by its words."""
    import torch

    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or says_shortage(str(error))


def skipped(error: BaseException) -> str:
    """The reason of a trial that was skipped."""
    text = (str(error).strip().splitlines() or [""])[0]
    return f"{SKIPPED}: {type(error).__name__}" + (f": {text[:160]}" if text else "")
