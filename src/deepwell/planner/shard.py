"""One block of the IR as one rank of a layout sees it: local GEMMs, attention, passes over memory, saved tensors. Pure.

    local_block(ops, formats, sizes) -> LocalBlock        one micro-batch; no seconds yet, only shapes and bytes

Rules of sharding (Megatron's): projections into heads and into the MLP are split by columns, those out of them by rows;
norms and sums are split over tokens under sequence parallelism and repeated without it; experts are spread over `ep`
ranks and split by `etp`. What the ranks do together is what the IR says (`tests/planner/test_cost.py` holds it).
"""

import functools
import math
from dataclasses import dataclass, field, replace

from deepwell.graph.ops import (
    Activation,
    Add,
    Attention,
    Combine,
    Conv,
    Dispatch,
    Embedding,
    GroupedLinear,
    InputSizes,
    Linear,
    Loss,
    Matmul,
    Norm,
    Op,
    Rope,
    TopK,
)
from deepwell.planner.workload import ById

COLUMN_PARTS = {"q", "k", "v", "qkv", "q_b", "kv_b", "up", "gate", "gate_up", "in"}
ROW_PARTS = {"o", "down", "out"}
_LOW = {"fp8", "mxfp8", "mxfp6", "nvfp4", "mxfp4"}
_BF16 = ("bf16", "bf16", "bf16")
HALF = 2  # bytes of a bf16 or fp16 element


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSizes:
    micro_batch: int
    seq_len: int
    tp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    sequence_parallel: bool = False
    expert_load: float = 1.0  # rows of the busiest rank over the even share
    dropout: bool = False
    keeps_fp8: bool = True  # inputs of low-precision GEMMs are kept as their quantized copies
    # RMS norms and gates may run as separate torch ops, each of which keeps what its own backward needs.
    eager_norms: bool = False
    eager_gates: bool = False
    # A compiler recomputes norms and gates inside the backward's kernels: their results are not kept.
    recomputes_pointwise: bool = False
    keeps_inputs: bool = False  # what linears read is kept all the same, but for outputs of activations
    gathers_inputs: bool = False  # sequence parallelism keeps gathered inputs and does not gather again
    # Keys and values that context parallelism keeps: "gathered" from all ranks, with a mask that no kernel knows, or
    # "repeated" to as many heads as there are ranks. "": as they are.
    kv_exchange: str = ""

    @property
    def token_split(self) -> int:
        """Ranks over which a token-wise op is spread besides cp."""
        return self.tp if self.sequence_parallel else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalGemm:
    """One linear layer on one rank: `groups` products of [m, k] by [k, n], done forward and twice backward."""

    name: str
    role: str
    part: str
    m: float
    n: int
    k: int
    groups: int
    formats: tuple[str, str, str]
    quantizes_input: bool  # False where an earlier layer has quantized the same tensor already

    @property
    def is_low(self) -> bool:
        return any(name in _LOW for name in self.formats)

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k * self.groups


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalAttention:
    """Attention on one rank; `pairs` counts query-key pairs of one sequence and head on this rank."""

    batch: int
    heads: float
    kv_heads: float
    qk_dim: int
    v_dim: int
    q_len: float
    kv_len: float
    pairs: float
    causal: bool

    @property
    def flops(self) -> float:
        """Forward flops of the pairs that the mask leaves."""
        return 2.0 * self.batch * self.heads * self.pairs * (self.qk_dim + self.v_dim)

    @property
    def scores(self) -> float:
        """Elements of the full square that an unfused kernel writes."""
        return self.batch * self.heads * self.q_len * self.kv_len


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPass:
    kind: str  # norm, add, activation, rope, router, permute, embedding, loss, mixer
    role: str
    forward: float
    backward: float
    is_eager: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A tensor that the backward needs. `group` is what recomputing would free it: see Recompute.modules."""

    kind: str  # attention, mlp, experts, norm, stream, mixer
    group: str
    nbytes: float


@dataclass(slots=True, kw_only=True)
class LocalBlock:
    """Everything that time and memory need to know of a block on one rank, for one micro-batch."""

    input_bytes: float  # the hidden state that enters, as a rank keeps it for full recomputation
    boundary_bytes: float  # the hidden state of the micro-batch, before sequence parallelism splits it
    gemms: list[LocalGemm] = field(default_factory=list)
    attention: list[LocalAttention] = field(default_factory=list)
    passes: list[MemoryPass] = field(default_factory=list)
    matmul_flops: float = 0.0  # products of two activations that are no softmax attention
    saved: list[Saved] = field(default_factory=list)
    dense_params: float = 0.0
    expert_params: float = 0.0
    gathers: int = 0  # column-parallel inputs, gathered under sequence parallelism
    reduces: int = 0  # row-parallel outputs
    routed_bytes: float = 0.0  # rows that one rank sends to experts, bf16
    kv_bytes: float = 0.0  # keys and values of this rank's tokens
    top_k: int = 0
    widest: float = 0.0  # elements of the largest local tensor, for the backward's working set


@dataclass(slots=True)
class _Builder:
    block: LocalBlock
    sizes: RankSizes
    formats: dict[str, tuple[str, str, str]]
    sizing: InputSizes
    elements: dict[str, float]  # op -> local elements of its output
    kept: set[tuple[str, float]] = field(default_factory=set)
    quantized: set[str] = field(default_factory=set)
    gathered: set[str] = field(default_factory=set)
    ops: dict[str, Op] = field(default_factory=dict)

    @property
    def tokens(self) -> float:
        return float(self.sizing.tokens)

    def keep(self, tensor: str, kind: str, group: str, bytes_per_element: float, elements: float | None = None) -> None:
        """Note that the backward needs `tensor`; a tensor kept in two precisions is two entries."""
        size = self.elements.get(tensor, 0.0) if elements is None else elements
        if (tensor, bytes_per_element) not in self.kept:
            self.kept.add((tensor, bytes_per_element))
            self.block.saved.append(Saved(kind=kind, group=group, nbytes=size * bytes_per_element))

    def pass_over(self, kind: str, op: Op, forward: float, backward: float, is_eager: bool = False) -> None:
        one = MemoryPass(kind=kind, role=op.role, forward=forward, backward=backward, is_eager=is_eager)
        self.block.passes.append(one)


def expert_rows(sizes: RankSizes, tokens: float, top_k: int) -> float:
    """Rows that the experts of one rank compute: its share of the routed tokens, gathered over etp."""
    return tokens / sizes.tp * top_k * sizes.etp * sizes.expert_load


def _params(op: Op) -> int:
    return sum(p.count for p in op.params if p.tied_to is None)


def split_of(op: Linear) -> str:
    if op.role in ("head", "mixer"):
        return "column" if op.role == "head" or op.part == "in" or (not op.part and op.n >= op.k) else "row"
    if op.role in ("attention", "mlp", "shared_experts"):
        return "column" if op.part in COLUMN_PARTS else ("row" if op.part in ROW_PARTS else "none")
    return "none"


def _linear(b: _Builder, op: Linear, kv_heads: int | None) -> None:
    s, rows = b.sizes, float(op.rows.at(b.sizing))
    split, n, k = split_of(op), op.n, op.k
    if split == "column":
        # Key and value heads fewer than ranks are repeated.
        ranks = min(s.tp, kv_heads or s.tp) if op.part in ("k", "v") else s.tp
        n = max(1, math.ceil(op.n * (1.0 / ranks) - 1e-9))
        if s.tp > 1:
            b.gathered.add(op.inputs[0] if op.inputs else op.name)
    elif split == "row":
        k = max(1, math.ceil(op.k / s.tp))
        b.block.reduces += s.tp > 1
    else:
        rows /= s.token_split
    b.block.dense_params += _params(op) / (s.tp if split != "none" else 1)
    _gemm(b, op, rows, n, k, 1)
    out_rows = rows / s.token_split if split == "row" else rows
    b.elements[op.name] = out_rows * n
    if op.bias and op.role == "mlp" and op.part == "up":
        b.pass_over("activation", op, 0.0, HALF * b.elements[op.name])  # the bias gradient reads its output's once more


def _gemm(b: _Builder, op: Linear | GroupedLinear, rows: float, n: int, k: int, groups: int) -> None:
    formats = b.formats.get(op.name, _BF16)
    source = op.inputs[0] if op.inputs else op.name
    is_low = any(name in _LOW for name in formats)
    b.block.gemms.append(
        LocalGemm(
            name=op.name, role=op.role, part=op.part, m=rows / groups, n=n, k=k, groups=groups, formats=formats,
            quantizes_input=is_low and source not in b.quantized,
        )
    )  # fmt: skip
    if is_low:
        b.quantized.add(source)
    size = 1.0625 if is_low and b.sizes.keeps_fp8 else float(HALF)  # one byte and a scale for each 32, or for a row
    producer = b.ops.get(source)
    kind, group = _group_of(op, producer)
    if b.sizes.keeps_inputs and not isinstance(producer, Activation):
        size = 1.0 if is_low else float(HALF)
    elif b.sizes.recomputes_pointwise and isinstance(producer, (Norm, Activation)):
        return
    elements = b.elements.get(source, 0.0)
    if b.sizes.gathers_inputs and isinstance(op, Linear) and split_of(op) == "column":
        elements = rows * k
    b.keep(source, kind, group, size, elements)


def _group_of(op: Op, producer: Op | None) -> tuple[str, str]:
    """Under which heading a saved tensor is counted and which module's recomputation frees it."""
    kind = {"experts": "experts", "shared_experts": "mlp", "mlp": "mlp", "mixer": "mixer"}.get(op.role, "attention")
    if isinstance(producer, Norm):
        return "norm", "layernorm"
    if isinstance(producer, Activation):
        return kind, "moe_act" if op.role == "experts" else "mlp"
    if isinstance(producer, Attention):
        return "attention", "attn_out"
    if isinstance(producer, Dispatch):
        return "experts", "moe"
    return kind, "other"


def _grouped(b: _Builder, op: GroupedLinear) -> None:
    s = b.sizes
    local = max(1, op.experts // s.ep)
    rows = expert_rows(s, b.tokens, max(1, op.rows.factor))
    is_row = op.part == "down"
    n, k = (op.n, op.k // s.etp) if is_row else (op.n // s.etp, op.k)
    b.block.expert_params += _params(op) / (s.ep * s.etp)
    _gemm(b, op, rows, n, k, local)
    b.elements[op.name] = rows * n
    if op.bias:
        # Biases of experts are added row by row and their gradients summed by group: passes of their own.
        b.pass_over("expert_bias", op, 6 * HALF * rows * n, 4 * HALF * rows * n)


def _attention(b: _Builder, op: Attention) -> None:
    s = b.sizes
    whole = InputSizes(batch=s.micro_batch, seq_len=s.seq_len)
    heads, kv_heads = op.q_heads / s.tp, max(1.0, op.kv_heads / s.tp)
    # Kernels with learned sinks mask a window and do not skip what lies outside it.
    pairs = replace(op, window=None).pairs(whole) if op.params and op.window else op.pairs(whole)
    tokens = op.batch.at(whole) * op.q_len.at(whole) / s.cp
    b.block.attention.append(
        LocalAttention(
            batch=op.batch.at(whole), heads=heads, kv_heads=kv_heads, qk_dim=op.qk_dim, v_dim=op.v_dim,
            q_len=op.q_len.at(whole) / s.cp, kv_len=op.kv_len.at(whole), pairs=pairs / s.cp, causal=op.causal,
        )
    )  # fmt: skip
    out = tokens * heads * op.v_dim
    b.elements[op.name] = out
    kv = kv_heads * (op.qk_dim + op.v_dim)
    if s.kv_exchange:
        kv *= s.cp if s.kv_exchange == "gathered" else math.lcm(round(kv_heads), s.cp) / kv_heads
    qkv = tokens * (heads * op.qk_dim + kv)
    if s.kv_exchange == "gathered":
        b.keep(f"{op.name}.mask", "attention", "other", HALF, op.q_len.at(whole) / s.cp * op.kv_len.at(whole))
    is_latent = any(o.part == "kv_b" for o in b.ops.values())
    b.keep(f"{op.name}.qkv", "attention", "mla_up_proj" if is_latent else "qkv", HALF, qkv)
    b.keep(op.name, "attention", "attn_out", HALF, out)
    b.block.kv_bytes += tokens * kv_heads * (op.qk_dim + op.v_dim) * HALF
    b.block.dense_params += _params(op) / s.tp


def _token_op(b: _Builder, op: Op) -> None:
    """Norms, sums, activations, rope and routing: bytes only."""
    s, t = b.sizes, b.tokens
    if isinstance(op, Norm):
        inside_heads = op.rows.factor > 1
        e = op.rows.at(b.sizing) * op.width / (s.tp if inside_heads else s.token_split)
        if s.eager_norms and op.norm == "rms":
            # To fp32, square, mean, scale, back and times the weight: each its own pass.
            b.pass_over("norm", op, 36 * e, 50 * e, is_eager=True)
        else:
            b.pass_over("norm", op, 2 * HALF * e, 3 * HALF * e)
        b.keep(op.inputs[0] if op.inputs else "@in", "norm", "qkv" if inside_heads else "stream", HALF, e)
        if s.eager_norms and op.norm == "rms":
            # The input in fp32, and the normalized one before its weight.
            b.keep(f"{op.name}.fp32", "norm", "layernorm", 6, e)
    elif isinstance(op, Add):
        e = op.rows.at(b.sizing) * op.width / s.token_split
        b.pass_over("add", op, 3 * HALF * e, 1.5 * HALF * e)
        if s.dropout and op.role == "residual":
            b.keep(f"{op.name}.mask", "norm", "other", 1, e)
            b.pass_over("add", op, 3 * e, 3 * e)
    elif isinstance(op, Activation):
        is_expert = op.role == "experts"
        rows = expert_rows(s, t, max(1, op.rows.factor)) if is_expert else float(op.rows.at(b.sizing))
        e = rows * op.width / (s.etp if is_expert else s.tp)
        inputs = 2 if op.gated else 1
        is_split = (s.eager_gates and op.gated) or op.function == "clamped_swiglu"
        extra = 2.0 * HALF * e if is_split else 0.0
        b.pass_over("activation", op, (inputs + 1) * HALF * e + extra, (2 * inputs + 1) * HALF * e + 2 * extra)
        kind = "experts" if is_expert else "mlp"
        b.keep(op.inputs[0], kind, "moe" if is_expert else "mlp", HALF, inputs * e)
        if s.eager_gates and op.gated:
            b.keep(f"{op.name}.gate", kind, "moe" if is_expert else "mlp", HALF, e)
    elif isinstance(op, Rope):
        e = op.rows.at(b.sizing) * op.rotary_dim * (op.q_heads / s.tp + max(1.0, op.kv_heads / s.tp))
        passes = 8 if s.eager_gates else 2  # slices, a negation, a concatenation, two products and a sum
        b.pass_over("rope", op, passes * HALF * e, passes * HALF * e, is_eager=s.eager_gates)
    elif isinstance(op, TopK):
        e = t / s.tp * op.experts
        # Scores, bias, top-k, normalization, masks and counts in fp32, mostly as separate ops.
        b.pass_over("router", op, 25 * 4 * e, 25 * 4 * e)
        b.keep(op.name, "experts", "other", 8, e)
        b.block.top_k = max(b.block.top_k, op.top_k)
        e = t / s.tp * op.top_k
    elif isinstance(op, Dispatch):
        e = expert_rows(s, t, max(1, op.rows.factor)) * op.width
        b.pass_over("permute", op, 2 * HALF * e, 2 * HALF * e)
        b.block.routed_bytes = t / s.tp * max(1, op.rows.factor) * op.width * HALF * s.expert_load
    elif isinstance(op, Combine):
        e = expert_rows(s, t, op.top_k) * op.width
        b.pass_over("permute", op, 2 * HALF * e, 2 * HALF * e)
        e = t / s.tp * op.width
    elif isinstance(op, Embedding):
        e = op.rows.at(b.sizing) * op.width / s.token_split
        b.pass_over("embedding", op, 2 * HALF * e, 4 * HALF * e)
    else:
        e = b.elements.get(op.inputs[0], 0.0) if op.inputs else 0.0
    b.elements[op.name] = e
    b.block.dense_params += _params(op) / (s.tp if isinstance(op, Embedding) else 1)


def _mixer(b: _Builder, op: Op) -> None:
    """State-space scans, convolutions and what the vocabulary has no word for, split over heads by tp."""
    s = b.sizes
    e = op.elements_out(b.sizing) / s.tp
    read = op.elements_in(b.sizing) / s.tp
    b.block.matmul_flops += op.flops(b.sizing) / s.tp
    b.pass_over("mixer", op, 3 * HALF * (read + e), 6 * HALF * (read + e))
    if isinstance(op, Conv) or op.flops(b.sizing):
        # The scan's kernel keeps the projection's output, which is the convolution's input, and recomputes the rest.
        b.keep(f"{op.name}.in", "mixer", "other", HALF, read if isinstance(op, Conv) else 0.0)
    b.elements[op.name] = e
    b.block.dense_params += _params(op) / s.tp


def _add_op(b: _Builder, op: Op, kv_heads: int | None) -> None:
    b.ops[op.name] = op
    if isinstance(op, Linear):
        _linear(b, op, kv_heads)
    elif isinstance(op, GroupedLinear):
        _grouped(b, op)
    elif isinstance(op, Attention):
        _attention(b, op)
    elif isinstance(op, Loss):
        e = op.rows.at(b.sizing) * op.vocab / b.sizes.tp
        b.pass_over("loss", op, e, e)  # in elements: how many bytes each costs is the stack's affair
        b.elements[op.name] = 1.0
    elif isinstance(op, (Matmul, Conv)) or op.kind == "other":
        _mixer(b, op)
    else:
        _token_op(b, op)


def _build(ops: tuple[Op, ...], formats: dict[str, tuple[str, str, str]], sizes: RankSizes) -> LocalBlock:
    local_seq = max(1, sizes.seq_len // sizes.cp)
    sizing = InputSizes(batch=sizes.micro_batch, seq_len=local_seq)
    entering = float(sizing.tokens) * _hidden(ops)
    block = LocalBlock(input_bytes=HALF * entering / sizes.token_split, boundary_bytes=HALF * entering)
    b = _Builder(block, sizes, formats, sizing, {"@in": entering / sizes.token_split})
    kv_heads = next((op.kv_heads for op in ops if isinstance(op, Attention)), None)
    for op in ops:
        _add_op(b, op, kv_heads)
    block.gathers = len(b.gathered)
    block.widest = max((e for name, e in b.elements.items() if not isinstance(b.ops.get(name), Loss)), default=0.0)
    return block


def _hidden(ops: tuple[Op, ...]) -> int:
    for op in ops:
        if isinstance(op, (Norm, Embedding)) and op.rows.factor == 1:
            return op.width
    return next((op.k for op in ops if isinstance(op, Linear)), 1)


@functools.lru_cache(maxsize=65536)
def _cached(ops: ById, formats: tuple[tuple[str, tuple[str, str, str]], ...], sizes: RankSizes) -> LocalBlock:
    return _build(ops.value, dict(formats), sizes)


def local_block(
    ops: tuple[Op, ...], formats: tuple[tuple[str, tuple[str, str, str]], ...], sizes: RankSizes
) -> LocalBlock:
    """The block on one rank for one micro-batch; equal questions are answered once."""
    return _cached(ById(ops), formats, sizes)
