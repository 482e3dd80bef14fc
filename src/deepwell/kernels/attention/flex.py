"""Causal attention inside documents, windows and under a soft cap, by FlexAttention, whose kernels Inductor writes.

    s[i, j] = scale * q[i] . k[j]       under a cap c (Gemma 2): c * tanh(s / c)
    open where j <= i; with a window w, j > i - w; with documents, d[i] == d[j], numbers of any kind and order
    out[i] = sum_j softmax_j(s[i, j]) v[j]

Of blocks of 128 x 128 pairs, those without an open pair are skipped, and those that are open as a whole need no mask.
Which is which follows from the block's place and, with documents, from the least and the greatest number in it: no
mask of S x S, and nothing that the host waits for. (torch's flash attention takes packed sequences by their bounds: how
many there are must be known when it is launched.)
Numerics: bf16 or fp16 operands, fp32 sums, cap and softmax, p rounded to the operands' dtype for its GEMM. In eager
    mode FlexAttention holds all scores; it is for graphs that Inductor compiles.
Cost: 4 flops a pair of an open block and a head's width forward, 10 backward; lists of (S / 128)^2 blocks.
"""

# Shapes: B batch, H query heads, G key-value heads, S tokens, D width of a head, V width of its values.

import json
import logging
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from deepwell.kernels.attention.flash import NO_WINDOW
from deepwell.kernels.attention.proof import TimedShape, case_of, in_units
from deepwell.kernels.tune.cache import cache_of
from deepwell.kernels.tune.candidate import Candidate, Choice
from deepwell.kernels.tune.choose import Rules, TimingSetup, choose, known_choice
from deepwell.kernels.tune.out_of_memory import is_shortage, skipped
from deepwell.kernels.tune.problem import Problem
from deepwell.kernels.tune.sandbox import ask_fresh_process
from deepwell.kernels.tune.sources import sources_hash
from deepwell.kernels.tune.verify import FLOORS_DB, Case

_log = logging.getLogger("deepwell.kernels")

OP = "flex_attention"
NO_CAP = 0.0
BLOCK = 128
FLEX, AS_WRITTEN = "flex", "as_written"
_RULES = Rules(default=AS_WRITTEN, least_gain=0.02, record=False)
_ENTRY = "from deepwell.kernels.attention.flex import main; main()"
# Inductor compiles forward and backward of three proofs and of both at the size asked for.
_TIMEOUT_S = 900.0


# ---- reference: what the kernels must compute, in the plainest torch ----


def _is_open(documents_BS: Tensor | None, size: int, window: int, device: torch.device) -> Tensor:
    """[B or 1, 1, S, S]."""
    at = torch.arange(size, device=device)
    d = at[:, None] - at[None, :]
    is_open = ((d >= 0) if window == NO_WINDOW else (d >= 0) & (d < window))[None, None]
    if documents_BS is None:
        return is_open
    return is_open & (documents_BS[:, None, :, None] == documents_BS[:, None, None, :])


def flex_attention_ref(
    q_BHSD: Tensor, k_BGSD: Tensor, v_BGSV: Tensor, documents_BS: Tensor | None, scale: float, window: int, cap: float
) -> Tensor:
    """Reference for `flex_attention`, in fp32 or the operands' own dtype where that is wider."""
    wide, times = torch.promote_types(q_BHSD.dtype, torch.float32), q_BHSD.shape[1] // k_BGSD.shape[1]
    k, v = (t.repeat_interleave(times, 1).to(wide) for t in (k_BGSD, v_BGSV))
    s = q_BHSD.to(wide) @ k.mT * scale
    s = s if cap == NO_CAP else cap * torch.tanh(s / cap)
    s = s.masked_fill(~_is_open(documents_BS, q_BHSD.shape[2], window, s.device), -math.inf)
    return (s.softmax(-1) @ v).to(q_BHSD.dtype)


# ---- what runs ----


def flex_attention(
    q_BHSD: Tensor, k_BGSD: Tensor, v_BGSV: Tensor, documents: Tensor | None, scale: float, window: int, cap: float
) -> Tensor:
    """Causal attention [B, H, S, V]. `documents` are [B, S], [1, S] or [S]; `window` counts the query's own key."""
    from torch._higher_order_ops.flex_attention import flex_attention as attend
    from torch.nn.attention.flex_attention import _apply_kernel_options

    batch, _, size, _ = q_BHSD.shape
    if documents is not None:
        documents = documents.reshape(-1, size).expand(batch, size).contiguous()

    def score_mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s if cap == NO_CAP else cap * torch.tanh(s / cap)

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor, *numbers: Tensor) -> Tensor:
        is_open = j <= i if window == NO_WINDOW else (j <= i) & (i - j < window)
        return is_open & (numbers[0][b, i] == numbers[0][b, j]) if numbers else is_open

    blocks = open_blocks(documents, size, window, q_BHSD.device)
    options: Any = _apply_kernel_options(q_BHSD, k_BGSD, v_BGSV, q_BHSD.is_cuda, None)
    numbers = () if documents is None else (documents,)
    return attend(q_BHSD, k_BGSD, v_BGSV, score_mod, (*blocks[:-1], mask_mod), scale, options, (), numbers)[0]


def open_blocks(documents_BS: Tensor | None, size: int, window: int, device: torch.device) -> tuple[Any, ...]:
    """The blocks with open pairs as FlexAttention takes them, those that are open as a whole apart."""
    from torch.nn.attention.flex_attention import BlockMask

    count = -(-size // BLOCK)
    first = torch.arange(count, device=device) * BLOCK
    last = (first + BLOCK - 1).clamp(max=size - 1)
    (q_first, k_first), (q_last, k_last) = ((t[:, None], t[None, :]) for t in (first, last))
    is_some, is_whole = (k_first <= q_last)[None], (k_last <= q_first)[None]
    if window != NO_WINDOW:
        is_some, is_whole = is_some & (q_first - k_last < window), is_whole & (q_last - k_first < window)
    if documents_BS is not None:
        rest = documents_BS[:, -1:].expand(-1, count * BLOCK - size)  # numbers that the last block has anyway
        numbers = torch.cat([documents_BS, rest], 1).unflatten(1, (count, BLOCK))
        least, greatest = numbers.amin(2), numbers.amax(2)
        (q_least, k_least), (q_most, k_most) = ((t[:, :, None], t[:, None, :]) for t in (least, greatest))
        is_some = is_some & (q_least <= k_most) & (k_least <= q_most)
        is_whole = is_whole & (q_least == k_most) & (q_most == k_least)
    listed = [_listed(chosen[:, None]) for chosen in (is_some & ~is_whole, is_whole)]
    return BlockMask.from_kv_blocks(*listed[0], *listed[1], BLOCK, seq_lengths=(size, size)).as_tuple()


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """(how many blocks of keys a block of queries has, their numbers, those that are chosen first)."""
    order = torch.argsort(chosen.to(torch.int32), dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32), order.to(torch.int32)


# ---- whether it gains ----


@dataclass(frozen=True, slots=True, kw_only=True)
class FlexShape(TimedShape):
    """One attention: its sizes, its window and cap, and whether it has documents."""

    window: int = NO_WINDOW
    cap: float = NO_CAP
    has_documents: bool = False

    def operands(self, device: str, dtype: torch.dtype, lengths: int = 0) -> tuple[Any, ...]:
        """q, k, v, documents (one a sequence, or of some `lengths`), the mask that is written out, and dout."""
        q, k, v, dout = self.tensors(device, dtype)
        at = torch.arange(self.S, device=device).expand(self.B, -1)
        row = torch.arange(self.B, device=device)[:, None]
        documents = (at + 7 * row) // lengths if lengths else torch.zeros_like(at)
        given = documents if self.has_documents else None
        mask = _is_open(given, self.S, self.window, q.device)
        if self.cap != NO_CAP:
            mask = torch.zeros((), dtype=dtype, device=device).masked_fill(~mask, torch.finfo(dtype).min)
        return q, k, v, given, mask, dout


@lru_cache(maxsize=256)
def gains(shape: FlexShape, dtype: torch.dtype, device: str) -> bool:
    """Whether FlexAttention is right here and faster than what is written, measured once on this kind of device.

    It is timed with one document a sequence: the more there are, the less it has to do. On a GPU in a process of its
    own, for Inductor does not compile one graph while it is asked to compile another.
    """
    problem, candidates = _problem(shape, dtype, device), built_in(OP)
    choice = known_choice(problem, candidates)
    if choice is None:
        choice, reason = measured_apart(shape, dtype, device) if "cuda" in device else _measured(shape, dtype, device)
        if choice is None:
            _log.warning("%s: FlexAttention is not used in this process, it was not timed: %s", problem.key, reason)
            return False
        cache_of(device).keep_choice(problem.key, candidates, choice)
    _log.info("%s", choice)
    return choice.kernel == FLEX


def _problem(shape: FlexShape, dtype: torch.dtype, device: str) -> Problem:
    more = f" w{shape.window} c{shape.cap:g} d{shape.has_documents:d}"
    return shape.problem(OP, dtype, device, more)


def _measured(shape: FlexShape, dtype: torch.dtype, device: str) -> tuple[Choice | None, str]:
    """(the choice, or None and why nothing was measured)."""
    problem = _problem(shape, dtype, device)
    try:
        return choose(problem, built_in(OP), partial(_setup, shape, dtype, device), rules=_RULES), ""
    except RuntimeError as error:
        if not is_shortage(error):
            raise
        return None, skipped(error)


def measured_apart(shape: FlexShape, dtype: torch.dtype, device: str) -> tuple[Choice | None, str]:
    """The same in a fresh interpreter."""
    request = {"shape": asdict(shape), "dtype": str(dtype).removeprefix("torch."), "device": device}
    said, reason = ask_fresh_process(_ENTRY, request, _TIMEOUT_S)
    if said is None or "choice" not in said:
        return None, reason or "its process answered no choice"
    return (Choice.from_dict(said["choice"]) if said["choice"] else None), said["reason"]


def main() -> None:
    """The fresh interpreter: read a request, print the choice as JSON."""
    request = json.loads(sys.stdin.read())
    shape, dtype = FlexShape(**request["shape"]), getattr(torch, request["dtype"])
    choice, reason = _measured(shape, dtype, request["device"])
    print(json.dumps({"choice": choice and choice.to_dict(), "reason": reason}), flush=True)


def built_in(op: str) -> tuple[Candidate, ...]:
    """FlexAttention, and what stands in the graph without it, which needs no proof."""
    return tuple(
        Candidate(
            name=name,
            op=op,
            precision="bf16",
            fn=lambda *given, name=name: _ready(name, *given)(),
            origin="vendor" if name == FLEX else "reference",
            trusted=True,
            fingerprint=sources_hash(sys.modules[__name__]),
        )
        for name in (AS_WRITTEN, FLEX)
    )


def as_written(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, cap: float) -> Tensor:
    """SDPA with a mask of all pairs; under a cap products and a softmax, as Hugging Face writes it."""
    if cap == NO_CAP:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    batch, groups, size, _ = k.shape
    grown = (batch, groups, q.shape[1] // groups, size, -1)
    k, v = (t[:, :, None].expand(grown).reshape(batch, q.shape[1], size, t.shape[-1]) for t in (k, v))
    s = torch.tanh(q @ k.mT * scale / cap) * cap + mask
    return s.softmax(-1, dtype=torch.float32).to(q.dtype) @ v


def _ready(name: str, *given: Any) -> Callable[[], tuple[Tensor, ...]]:
    """A call that gives (out, dq, dk, dv) of operands, window and cap, compiled on a GPU."""
    (q, k, v, documents, mask, dout), window, cap = given[:6], given[6], given[7]
    scale = q.shape[-1] ** -0.5
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    if name == FLEX:
        run = compiled(flex_attention, leaves, (documents, scale, window, cap), by_inductor=q.is_cuda)
    else:
        run = compiled(as_written, leaves, (mask, scale, cap), by_inductor=q.is_cuda)

    def both() -> tuple[Tensor, ...]:
        with torch.enable_grad():
            out = run(*leaves)
            return out.detach(), *torch.autograd.grad(out, leaves, dout)

    return both


def compiled(
    target: Callable[..., Tensor], leaves: list[Tensor], others: tuple[Any, ...], *, by_inductor: bool
) -> Callable[..., Tensor]:
    """What Inductor makes of a call, or the call itself."""
    if not by_inductor:
        return lambda *operands: target(*operands, *others)
    from torch._inductor.compile_fx import compile_fx

    graph = fx.Graph()
    operands = [graph.placeholder(name) for name in ("q", "k", "v")]
    tensors = [other for other in others if isinstance(other, Tensor)]
    inputs = iter([graph.placeholder(f"other_{i}") for i in range(len(tensors))])
    filled = [next(inputs) if isinstance(other, Tensor) else other for other in others]
    graph.output((graph.call_function(target, (*operands, *filled)),))
    with torch.enable_grad():
        run: Any = compile_fx(fx.GraphModule({}, graph), [*leaves, *tensors])
    return lambda *now: run(*now, *tensors)[0]


def cases(candidate: Candidate, problem: Problem) -> Iterator[Case]:
    """Documents, windows and caps, alone and together, fewer key-value heads, a ragged length."""
    dtype = getattr(torch, problem.dtype)
    shapes = (
        FlexShape(B=2, H=4, G=2, S=400, D=64, V=64, has_documents=True),
        FlexShape(B=2, H=4, G=2, S=384, D=128, V=128, window=150, cap=5.0),
        FlexShape(B=1, H=2, G=2, S=300, D=64, V=64, window=200, cap=5.0, has_documents=True),
    )
    for shape in shapes:
        given = shape.operands(problem.device, dtype, lengths=130)
        q, k, v, dout = (t.double().requires_grad_() for t in (*given[:3], given[5]))
        with torch.enable_grad():
            out = flex_attention_ref(q, k, v, given[3], shape.D**-0.5, shape.window, shape.cap)
            grads = torch.autograd.grad(out, (q, k, v), dout)
        names = ("q", "k", "v", "documents", "mask", "dout", "window", "cap")
        yield case_of(str(shape), (*given, shape.window, shape.cap), names, (out.detach(), *grads))


def _setup(shape: FlexShape, dtype: torch.dtype, device: str) -> TimingSetup:
    """Both at this very shape, compared by the first head's results with the reference's."""
    given = (*shape.operands(device, dtype), shape.window, shape.cap)
    wanted = _first_group(shape, given)
    groups = shape.H // shape.G

    def case(candidate: Candidate) -> Case:
        # What the model has written is its own affair: in bf16 it rounds scores and cap.
        floor_db = FLOORS_DB["bf16"] if candidate.name == FLEX else 0.0
        return Case(label=str(shape), operands=(), wanted=in_units(wanted, wanted), floor_db=floor_db)

    def call(candidate: Candidate, operands: tuple[Any, ...]) -> Callable[[], Tensor]:
        run = _ready(candidate.name, *operands)
        return lambda: in_units([t[:1, : groups if i < 2 else 1] for i, t in enumerate(run())], wanted)

    return TimingSetup(inputs=[given], call=call, case=case)


def _first_group(shape: FlexShape, given: tuple[Any, ...]) -> list[Tensor]:
    """(out, dq, dk, dv) of the first sequence and its first key-value head, by the reference in fp32."""
    heads = shape.H // shape.G
    q, dout = (t[:1, :heads].float().requires_grad_() for t in (given[0], given[5]))
    k, v = (t[:1, :1].float().requires_grad_() for t in given[1:3])
    documents = None if given[3] is None else given[3][:1]
    with torch.enable_grad():
        out = flex_attention_ref(q, k, v, documents, shape.D**-0.5, shape.window, shape.cap)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]
