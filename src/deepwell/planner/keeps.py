"""What an engine holds on to between forward and backward, and the bytes that follow from it. Pure.

It decides as much as the layout. Deepwell's engine makes activation outputs again in the backward, keeps the inputs of
other linears as values, and computes head and loss in chunks whose gradients are made in the forward; that of an FP8
head's weight waits, as the FP8 values that it is made from.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepwell.planner.job import StepJob
from deepwell.planner.layout import Recompute
from deepwell.planner.memory import backward_bytes, saved_bytes
from deepwell.planner.shard import HALF, LocalBlock
from deepwell.planner.stack import Stack

# cuBLAS and cuDNN keep tens of megabytes inside torch's allocator on Hopper.
LIBRARIES = 32 << 20
_GATES = ("gate", "gate_up")


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeps:
    """What an engine holds on to between forward and backward."""

    # What comes again in the backward (engine/passes/recompute.py): activation outputs ("hidden"), norm outputs and FP8
    # FP8 values too ("copies"), or "nothing". None: as the stack's switches say.
    remakes: str | None = "hidden"
    fuses_head: bool = True  # head and loss in chunks; their gradients are made in the forward
    caches_weights: bool = False  # FP8 values of the weights, 2 bytes each
    late_gradients: bool = True  # gradients appear with the first backward; False: their buffers are always there
    element_bytes: float = HALF  # of activations and gradients

    @classmethod
    def of_stack(cls, name: str) -> Keeps:
        """Deepwell's own habits, or those of frameworks that keep what autograd saves and own gradient buffers."""
        if name == "deepwell":
            return cls()
        return cls(remakes=None, fuses_head=False, late_gradients=False)

    def applied_to(self, stack: Stack) -> Stack:
        """The stack with the switches that these habits mean."""
        if self.remakes is None:
            return stack
        # Where FP8 values are recomputed from what is kept anyway, they themselves are not kept.
        kept = {"compile": "off"} if self.remakes == "nothing" else {"compile": "on", "keeps_fp8": "off"}
        return stack.with_switches(**kept, keeps_inputs=self.remakes == "hidden", weight_copies=self.caches_weights)


# ---- one layer ----


def kept_bytes(block: LocalBlock, recompute: Recompute, job: StepJob, keeps: Keeps) -> float:
    """What one layer holds of one micro-batch between its forward and its backward."""
    kept = sum(saved_bytes(block, recompute, job.kernel, job.dropout).values())
    return kept * keeps.element_bytes / HALF


def working_bytes(block: LocalBlock, recompute: Recompute, job: StepJob, keeps: Keeps) -> float:
    """The most that one layer's backward holds besides: gradients around the MLP's activation, and what it redoes."""
    scale = keeps.element_bytes / HALF
    downs = [gemm for gemm in block.gemms if gemm.part == "down"]
    if keeps.remakes in (None, "nothing") or not downs:
        return scale * backward_bytes(block, recompute, job.kernel, job.dropout)
    inputs = 2 if any(gemm.part in _GATES for gemm in block.gemms) else 1
    # The gradient of the activation's output, those of its inputs, the stream's, and the weight's that was just made.
    widest = max(HALF * gemm.groups * ((1 + inputs) * gemm.m * gemm.k + gemm.k * gemm.n) for gemm in downs)
    working = widest + block.input_bytes
    if recompute.kind in ("full", "block"):
        working += sum(saved_bytes(block, Recompute(), job.kernel, job.dropout).values())
    return scale * working


# ---- head and loss ----


@dataclass(frozen=True, slots=True)
class HeadBytes:
    """Bytes of head and loss of one micro-batch at the moments that matter."""

    forward: float  # while the loss is computed
    between: float  # from there to the backward
    backward: float  # when the backward begins, besides; the weight's gradient apart
    weight_gradient: float  # comes with the backward; one that others were there before is added to them and gone


def chunk_bytes(width: int, fp8: bool) -> int:
    """Bytes of logits that a fused head holds at a time: kernels/head/linear_cross_entropy.py imports torch."""
    return min(1 << 30, (1 << 41) // width) if fp8 else 1 << 30


def head_bytes(job: StepJob, keeps: Keeps, logits: float) -> HeadBytes:
    """Head and loss of one micro-batch; `logits` is what they hold where they are not fused."""
    gemm = next((gemm for gemm in job.tail.gemms if gemm.role == "head"), None)
    size = keeps.element_bytes
    if gemm is None or not keeps.fuses_head or not logits:
        whole = logits * size / HALF
        return HeadBytes(whole, whole, 0.0, 0.0)
    rows = max(1, int(chunk_bytes(int(gemm.k), gemm.is_low) // (gemm.n * size)))
    chunks = max(1, -(-int(gemm.m) // rows))
    chunk = size * gemm.m / chunks * gemm.n
    hidden, weight = size * gemm.m * gemm.k, size * gemm.n * gemm.k
    if gemm.is_low:
        # Logits and their gradient's values of a chunk, all of that gradient transposed, both FP8 copies of the weight.
        codes = gemm.m * gemm.n
        forward = 1.5 * chunk + codes + 2.0 * gemm.n * gemm.k + 2 * hidden
        # What the weight's gradient is made from waits for the backward: these FP8 values, and those of the input.
        between = codes + gemm.m * gemm.k + hidden
        return HeadBytes(forward, between, 2 * hidden, weight)
    # The backward scales the gradients that the forward made: old and new stand beside each other.
    forward, between = chunk + weight + 2 * hidden, weight + hidden
    return HeadBytes(forward, between, 2 * hidden, weight)
