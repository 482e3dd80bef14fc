"""The one vocabulary of ops: what capture finds, the planner costs, the kernels run and the report shows.

An op knows its weights, its GEMMs and its bytes as functions of `InputSizes` (batch, sequence length, tokens per
expert), so one capture answers for every length. `flops` counts contractions only, two per multiply-add, as MFU does;
pointwise ops are bound by memory and are costed by `bytes_moved`.
"""

# Legend: B batch, S sequence length, T = B*S tokens, K and N the inner and outer width of a GEMM, E experts.

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from deepwell.errors import ConfigError

DTYPE_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int64": 8, "int32": 4, "int8": 1, "bool": 1}

# Where a block's input edge comes from: the previous stage's hidden state, or anything older than that.
BLOCK_INPUT = "@in"
EARLIER = "@earlier"


@dataclass(frozen=True, slots=True)
class Extent:
    """A count that grows with the batch and the sequence: `factor * B**batch * S**seq`."""

    factor: int = 1
    batch: int = 0
    seq: int = 0

    def at(self, work: InputSizes) -> int:
        return self.factor * work.batch**self.batch * work.seq_len**self.seq

    def times(self, factor: int) -> Extent:
        return Extent(self.factor * factor, self.batch, self.seq)

    def __str__(self) -> str:
        symbols = ["B"] * self.batch + ["S"] * self.seq
        if self.factor != 1 or not symbols:
            symbols.append(str(self.factor))
        return "*".join(symbols)

    @classmethod
    def parse(cls, text: str) -> Extent:
        """Read what `str` wrote: "B*S*8"."""
        factor, batch, seq = 1, 0, 0
        for part in text.split("*"):
            if part == "B":
                batch += 1
            elif part == "S":
                seq += 1
            elif re.fullmatch(r"\d+", part):
                factor *= int(part)
            else:
                raise ConfigError(f"extent {text!r}: {part!r} is neither B, S nor a number")
        return cls(factor, batch, seq)


BATCH = Extent(batch=1)
SEQ = Extent(seq=1)
TOKENS = Extent(batch=1, seq=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSizes:
    """The sizes that a capture leaves open. `tokens_per_expert` None means an even spread of top-k choices."""

    batch: int = 1
    seq_len: int
    tokens_per_expert: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("batch", "seq_len"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} is {value!r}; it must be a whole number of at least 1")
        if self.tokens_per_expert is not None and min(self.tokens_per_expert, default=0) < 0:
            raise ConfigError(f"tokens_per_expert has a negative entry: {min(self.tokens_per_expert)}")

    @property
    def tokens(self) -> int:
        return self.batch * self.seq_len


@dataclass(frozen=True, slots=True, kw_only=True)
class Param:
    """A weight as it is stored. `tied_to` names the parameter that owns the storage; tied weights count once."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    tied_to: str | None = None

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.count * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemm:
    """One product `C[m, n] = A[m, k] @ B[k, n]` of the training step, done for `groups` independent pairs."""

    step: str  # "fwd", "dgrad" or "wgrad"
    m: int
    n: int
    k: int
    groups: int = 1

    @property
    def flops(self) -> int:
        return 2 * self.groups * self.m * self.n * self.k


@dataclass(frozen=True, slots=True, kw_only=True)
class Op(ABC):
    """What all ops share: its path inside the block, its place in the model, its producers and its weights."""

    kind: ClassVar[str]

    name: str
    role: str  # attention, mlp, experts, shared_experts, router, head, embedding, norm, residual, loss, mixer, other
    part: str = ""  # q, k, v, qkv, o, gate, up, gate_up, down, q_a, q_b, kv_a, kv_b ...
    inputs: tuple[str, ...] = ()
    params: tuple[Param, ...] = ()
    dtype: str = "bf16"

    @property
    def num_params(self) -> int:
        """Parameters this op owns; tied ones are counted where they live."""
        return sum(p.count for p in self.params if p.tied_to is None)

    @property
    @abstractmethod
    def shape(self) -> tuple[Extent | int, ...]:
        """Shape of the output, leading dimensions folded into rows."""

    def gemms(self, work: InputSizes) -> tuple[Gemm, ...]:
        """The matrix products of forward and backward; empty for pointwise ops."""
        return ()

    def flops(self, work: InputSizes) -> int:
        """Forward contraction flops."""
        return sum(g.flops for g in self.gemms(work) if g.step == "fwd")

    def train_flops(self, work: InputSizes) -> int:
        """Forward and backward contraction flops, without recomputation."""
        return sum(g.flops for g in self.gemms(work))

    @abstractmethod
    def elements_in(self, work: InputSizes) -> int:
        """Activation elements that one forward reads."""

    def elements_out(self, work: InputSizes) -> int:
        return math.prod(size.at(work) if isinstance(size, Extent) else size for size in self.shape)

    def weight_bytes(self, work: InputSizes) -> int:
        """Bytes of weights that one forward reads."""
        return sum(p.nbytes for p in self.params)

    def bytes_moved(self, work: InputSizes) -> int:
        """Bytes of one forward where every input and weight is read once and every output written once."""
        return (self.elements_in(work) + self.elements_out(work)) * DTYPE_BYTES[self.dtype] + self.weight_bytes(work)


def _linear_gemms(rows: int, k: int, n: int, groups: int = 1) -> tuple[Gemm, ...]:
    return (
        Gemm(step="fwd", m=rows, n=n, k=k, groups=groups),
        Gemm(step="dgrad", m=rows, n=k, k=n, groups=groups),
        Gemm(step="wgrad", m=n, n=k, k=rows, groups=groups),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _RowOp(Op):
    """An op over `rows` vectors; expert ops follow the given token counts instead of the even spread."""

    rows: Extent = TOKENS

    def rows_at(self, work: InputSizes) -> int:
        if self.role == "experts" and work.tokens_per_expert is not None:
            return sum(work.tokens_per_expert)
        return self.rows.at(work)


@dataclass(frozen=True, slots=True, kw_only=True)
class _VectorOp(_RowOp):
    """An op that reads and writes vectors of `width`, one for each row unless it says otherwise."""

    width: int

    @property
    def shape(self) -> tuple[Extent | int, ...]:
        return (self.rows, self.width)

    def elements_in(self, work: InputSizes) -> int:
        return self.rows_at(work) * self.width

    def elements_out(self, work: InputSizes) -> int:
        return self.rows_at(work) * self.width


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedding(_VectorOp):
    """A table lookup; it reads the rows that are looked up, not the table."""

    kind: ClassVar[str] = "embedding"
    vocab: int

    def weight_bytes(self, work: InputSizes) -> int:
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm(_VectorOp):
    kind: ClassVar[str] = "norm"
    norm: str  # "rms", "layer", "l2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear(_RowOp):
    """`y[rows, n] = x[rows, k] @ w + bias`, however the weight is stored."""

    kind: ClassVar[str] = "linear"
    k: int
    n: int
    bias: bool = False

    @property
    def shape(self) -> tuple[Extent | int, ...]:
        return (self.rows, self.n)

    def gemms(self, work: InputSizes) -> tuple[Gemm, ...]:
        return _linear_gemms(self.rows_at(work), self.k, self.n)

    def elements_in(self, work: InputSizes) -> int:
        return self.rows_at(work) * self.k


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedLinear(_RowOp):
    """One linear per expert over the rows routed to it; `rows` counts all experts together."""

    kind: ClassVar[str] = "grouped_linear"
    experts: int
    k: int
    n: int
    bias: bool = False

    @property
    def shape(self) -> tuple[Extent | int, ...]:
        return (self.rows, self.n)

    def expert_rows(self, work: InputSizes) -> tuple[int, ...]:
        """Rows of each expert; the even spread gives the remainder to the first ones."""
        if work.tokens_per_expert is not None:
            if len(work.tokens_per_expert) != self.experts:
                raise ConfigError(
                    f"tokens_per_expert has {len(work.tokens_per_expert)} entries; "
                    f"{self.name} has {self.experts} experts"
                )
            return work.tokens_per_expert
        each, rest = divmod(self.rows.at(work), self.experts)
        return tuple(each + (e < rest) for e in range(self.experts))

    def gemms(self, work: InputSizes) -> tuple[Gemm, ...]:
        # One entry per distinct row count, so that the planner sees the true shapes and the flops stay exact.
        counts: dict[int, int] = {}
        for rows in self.expert_rows(work):
            if rows:
                counts[rows] = counts.get(rows, 0) + 1
        return tuple(g for rows, groups in counts.items() for g in _linear_gemms(rows, self.k, self.n, groups))

    def elements_in(self, work: InputSizes) -> int:
        return self.rows_at(work) * self.k

    def elements_out(self, work: InputSizes) -> int:
        return self.rows_at(work) * self.n

    def weight_bytes(self, work: InputSizes) -> int:
        touched = sum(1 for rows in self.expert_rows(work) if rows)
        return sum(p.nbytes for p in self.params) * touched // self.experts


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope(_RowOp):
    kind: ClassVar[str] = "rope"
    q_heads: int
    kv_heads: int
    rotary_dim: int

    @property
    def shape(self) -> tuple[Extent | int, ...]:
        return (self.rows, (self.q_heads + self.kv_heads) * self.rotary_dim)

    def elements_in(self, work: InputSizes) -> int:
        return self.elements_out(work)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention(Op):
    """softmax(q k^T) v with grouped heads, at most `window` keys where it is set; sinks stand in `params`."""

    kind: ClassVar[str] = "attention"
    batch: Extent = BATCH
    q_len: Extent = SEQ
    kv_len: Extent = SEQ
    q_heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    causal: bool = True
    window: int | None = None

    @property
    def shape(self) -> tuple[Extent | int, ...]:
        rows = Extent(
            self.batch.factor * self.q_len.factor,
            self.batch.batch + self.q_len.batch,
            self.batch.seq + self.q_len.seq,
        )
        return (rows, self.q_heads * self.v_dim)

    def pairs(self, work: InputSizes) -> int:
        """Query-key pairs that the mask leaves, for one sequence and head."""
        q_len, kv_len = self.q_len.at(work), self.kv_len.at(work)
        if not self.causal:
            return q_len * min(kv_len, self.window or kv_len)
        window = min(self.window or kv_len, kv_len)
        # Query i sees keys 1..i (aligned at the end), at most `window` of them; queries before the first key see none.
        first = max(0, kv_len - q_len)
        q_len = min(q_len, kv_len)
        growing = max(0, min(kv_len, window) - first)
        ramp = (2 * first + growing + 1) * growing // 2
        return ramp + (q_len - growing) * window

    def gemms(self, work: InputSizes) -> tuple[Gemm, ...]:
        # The masked square as two products over the pairs that are left: m*n is replaced by the pair count.
        heads = self.batch.at(work) * self.q_heads
        pairs = self.pairs(work)
        qk = {"m": pairs, "n": 1, "k": self.qk_dim, "groups": heads}
        pv = {"m": pairs, "n": 1, "k": self.v_dim, "groups": heads}
        return (
            Gemm(step="fwd", **qk),
            Gemm(step="fwd", **pv),
            # Backward: dV and dP over v_dim, dQ and dK over qk_dim; the recomputed scores are the kernel's own affair.
            Gemm(step="dgrad", **qk),
            Gemm(step="dgrad", **qk),
            Gemm(step="dgrad", **pv),
            Gemm(step="dgrad", **pv),
        )

    def elements_in(self, work: InputSizes) -> int:
        q = self.q_len.at(work) * self.q_heads * self.qk_dim
        kv = self.kv_len.at(work) * self.kv_heads * (self.qk_dim + self.v_dim)
        return self.batch.at(work) * (q + kv)


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation(_VectorOp):
    """`f(x)`, or `f(gate) * up` where it is gated; `width` is the output's."""

    kind: ClassVar[str] = "activation"
    function: str  # "silu", "gelu", "gelu_tanh", "relu", ...
    gated: bool = False

    def elements_in(self, work: InputSizes) -> int:
        return self.elements_out(work) * (2 if self.gated else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Add(_VectorOp):
    """A sum of two hidden states: residual streams, shared experts, token and position embeddings."""

    kind: ClassVar[str] = "add"

    def elements_in(self, work: InputSizes) -> int:
        return 2 * self.elements_out(work)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopK(_RowOp):
    """The router's choice of `top_k` among `experts` for each row."""

    kind: ClassVar[str] = "topk"
    experts: int
    top_k: int
    scoring: str = "softmax"  # or "sigmoid"

    @property
    def shape(self) -> tuple[Extent | int, ...]:
        return (self.rows, self.top_k)

    def elements_in(self, work: InputSizes) -> int:
        return self.rows_at(work) * self.experts


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch(_VectorOp):
    """Gather tokens into expert order; `rows` counts the copies."""

    kind: ClassVar[str] = "dispatch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Combine(Op):
    """Weight the experts' outputs and add them back into token order."""

    kind: ClassVar[str] = "combine"
    rows: Extent = TOKENS
    top_k: int
    width: int

    @property
    def shape(self) -> tuple[Extent | int, ...]:
        return (self.rows, self.width)

    def elements_in(self, work: InputSizes) -> int:
        routed = self.rows.at(work) * self.top_k
        return (sum(work.tokens_per_expert) if work.tokens_per_expert is not None else routed) * self.width


@dataclass(frozen=True, slots=True, kw_only=True)
class Matmul(Op):
    """A product of two activations that is not softmax attention: linear attention, state-space scans, scores."""

    kind: ClassVar[str] = "matmul"
    batch: Extent
    m: Extent
    n: Extent
    k: Extent

    @property
    def shape(self) -> tuple[Extent | int, ...]:
        return (self.batch, self.m, self.n)

    def gemms(self, work: InputSizes) -> tuple[Gemm, ...]:
        m, n, k, groups = (e.at(work) for e in (self.m, self.n, self.k, self.batch))
        return (
            Gemm(step="fwd", m=m, n=n, k=k, groups=groups),
            Gemm(step="dgrad", m=m, n=k, k=n, groups=groups),
            Gemm(step="dgrad", m=k, n=n, k=m, groups=groups),
        )

    def elements_in(self, work: InputSizes) -> int:
        m, n, k, groups = (e.at(work) for e in (self.m, self.n, self.k, self.batch))
        return groups * k * (m + n)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conv(_RowOp):
    """A convolution as the GEMM it is: `rows` output positions, `k` inputs each (window x channels per group)."""

    kind: ClassVar[str] = "conv"
    k: int
    n: int

    @property
    def shape(self) -> tuple[Extent | int, ...]:
        return (self.rows, self.n)

    def gemms(self, work: InputSizes) -> tuple[Gemm, ...]:
        return _linear_gemms(self.rows_at(work), self.k, self.n)

    def elements_in(self, work: InputSizes) -> int:
        return self.elements_out(work)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss(_RowOp):
    """Cross entropy over `vocab` logits of each row."""

    kind: ClassVar[str] = "loss"
    vocab: int

    @property
    def shape(self) -> tuple[Extent | int, ...]:
        return (Extent(),)

    def elements_in(self, work: InputSizes) -> int:
        return self.rows_at(work) * self.vocab


@dataclass(frozen=True, slots=True, kw_only=True)
class Other(_VectorOp):
    """Anything the vocabulary has no word for; `function` says what it was. It keeps its weights and its bytes."""

    kind: ClassVar[str] = "other"
    function: str
    width: int = 1


KINDS: dict[str, type[Op]] = {
    cls.kind: cls
    for cls in (
        Embedding, Norm, Linear, GroupedLinear, Rope, Attention, Activation, Add, TopK, Dispatch, Combine, Matmul, Conv,
        Loss, Other,
    )
}  # fmt: skip

# Ops whose operands a precision policy may put into a low-precision format.
GEMM_KINDS = ("linear", "grouped_linear")
