"""What only looks like a pattern: spellings close to those that passes know compute what the model wrote.

All passes on Dynamo's graph run on a small function, which must then give eager's values and gradients. Findings have
names; the rest comes from a seeded generator of spellings, in both dtypes, with fixed and with open sizes.
"""

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from compared import Case, check, check_all, outcome, rewritten
from torch import Tensor

from deepwell.engine.passes.attention import masks

# ---- attention ----


def qkv(heads: int = 4, kv_heads: int = 4, size: int = 10) -> list[Tensor]:
    g = torch.Generator().manual_seed(3)
    shapes = ((2, heads, size, 8), (2, kv_heads, size, 8), (2, kv_heads, size, 8))
    return [torch.randn(*shape, generator=g).requires_grad_() for shape in shapes]


def masked(make: Callable[[int], Tensor]) -> Callable[..., Tensor]:
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=make(q.shape[2]))


def triangle(size: int) -> Tensor:
    at = torch.arange(size)
    return at[:, None] >= at[None]


def within(rule: Callable[[Tensor, Tensor], Tensor]) -> Callable[[int], Tensor]:
    def make(size: int) -> Tensor:
        at = torch.arange(size)
        return triangle(size) & rule(at[:, None], at[None])

    return make


WINDOWS = {
    "float": lambda i, j: i - j < 16.0,
    "scaled": lambda i, j: (i - j) * 0.05 < 1,
    "shifted": lambda i, j: (i >> 4) == (j >> 4),
    "divided": lambda i, j: i // 16 == j // 16,
    "squared": lambda i, j: (i - j) ** 2 < 256,
    "two numbers": lambda i, j: i - 8 < j + 8,
    "remainder": lambda i, j: (i % 16) >= (j % 16),
    "small dtype": lambda i, j: i.to(torch.bfloat16) - j.to(torch.bfloat16) < 16,
    "bytes": lambda i, j: i.to(torch.int8) + 110 >= 0,
    "a tensor": lambda i, j: i - j < torch.tensor(16),
    "alpha": lambda i, j: torch.add(i, j, alpha=-1) < 16,
}


@pytest.mark.parametrize("rule", WINDOWS)
def test_a_window_that_is_no_whole_number_stays_at_open_sizes(rule: str) -> None:
    function = masked(within(WINDOWS[rule]))
    run, counts = rewritten(function, dynamic=True)
    for size in (10, 40):  # at 10 each is a triangle
        inputs = qkv(size=size)
        torch.testing.assert_close(run(*inputs), function(*inputs))
    assert counts["causal_mask"] == 0


def test_a_triangle_of_shifted_positions_is_dropped_at_open_sizes() -> None:
    run, counts = rewritten(masked(within(lambda i, j: i + 3 >= j + 3)), dynamic=True)
    for size in (10, 40):
        inputs = qkv(size=size)
        torch.testing.assert_close(run(*inputs), masked(triangle)(*inputs))
    assert counts["causal_mask"] == 1


def test_a_mask_of_one_entry_is_no_triangle() -> None:
    for mask in (lambda n: torch.ones(1, 1, dtype=torch.bool), lambda n: torch.zeros(1, 1)):
        assert "causal_mask" not in check(masked(mask), qkv())


def test_a_random_mask_stays_and_takes_its_own_numbers() -> None:
    assert "causal_mask" not in check(masked(lambda n: (torch.rand(n, n) < 2.0) & triangle(n)), qkv())


def test_a_mask_is_evaluated_in_the_order_of_its_writes() -> None:
    def mask(n: int) -> Tensor:
        ones = torch.ones(n, n, dtype=torch.bool)
        before = ones.clone()
        return ones.tril_() | ~before

    assert check(masked(mask), qkv())["causal_mask"] == 1

    def late(n: int) -> Tensor:
        ones = torch.ones(n, n, dtype=torch.bool)
        before = ones.clone()
        return before & (ones.tril_() | before)

    assert "causal_mask" not in check(masked(late), qkv())


@pytest.mark.parametrize(("length", "is_one_sequence"), [(10, True), (5, False)])
def test_a_search_for_packed_sequences_that_finds_none_is_no_mask(monkeypatch, length, is_one_sequence) -> None:
    def mask(n: int) -> Tensor:  # as Hugging Face builds it without a cache
        position = (torch.arange(n) % length)[None]
        begins = torch.diff(position, prepend=position[:, :1] - 1, dim=-1) != 1
        number = begins.cumsum(-1)
        return (number[:, None, :, None] == number[:, None, None, :]) & triangle(n)[None, None]

    monkeypatch.setattr(masks, "_LARGEST", 0)  # a batch of long sequences has too many pairs to compute
    function = masked(lambda n: mask(n).expand(2, 1, n, n))
    assert check(function, qkv()).get("causal_mask", 0) == is_one_sequence


SEARCHES = {
    "none packed": (lambda p: p[:, :1] - 1, 1, True),
    "a rise of 2": (lambda p: p[:, :1] - 1, 2, False),
    "a start at 1": (lambda p: p[:, :1] * 0 + 1, 1, False),
    "from the second on": (lambda p: p[:, 1:2] - 1, 1, False),
}


@pytest.mark.parametrize("search", SEARCHES)
def test_a_search_for_packed_sequences_is_followed_at_open_sizes(search: str) -> None:
    ahead, times, is_triangle = SEARCHES[search]

    def mask(n: int) -> Tensor:
        position = torch.arange(n)[None].expand(2, -1) * times if times > 1 else torch.arange(n)[None].expand(2, -1)
        number = (torch.diff(position, prepend=ahead(position), dim=-1) != 1).cumsum(-1)
        rows = torch.arange(2)[:, None, None, None]
        at = torch.arange(n)
        same = number[rows, at[None, None, :, None]] == number[rows, at[None, None, None, :]]
        return triangle(n)[None, None] & same

    run, counts = rewritten(masked(mask), dynamic=True)
    for size in (10, 40):
        inputs = qkv(size=size)
        torch.testing.assert_close(run(*inputs), masked(mask)(*inputs))
    assert counts["causal_mask"] == is_triangle


def test_a_window_of_the_smaller_of_two_sizes_stays() -> None:
    def mask(n: int) -> Tensor:
        return within(lambda i, j: i - j < torch.sym_min(n, 16))(n)

    run, counts = rewritten(masked(mask), dynamic=True)
    for size in (10, 40):
        inputs = qkv(size=size)
        torch.testing.assert_close(run(*inputs), masked(within(lambda i, j: i - j < 16))(*inputs))
    assert counts["causal_mask"] == 0


def grown(x: Tensor, times: int, pick: Any = slice(None)) -> Tensor:
    x = x[:, pick]
    batch, heads, size, dim = x.shape
    return x[:, :, None].expand(batch, heads, times, size, dim).reshape(batch, heads * times, size, dim)


def test_some_of_the_heads_repeated_are_not_all() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x[:, 0:1, None].expand(2, 1, 4, 10, 8).reshape(2, 4, 10, 8) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v)

    assert "kv_heads" not in check(attend, qkv(kv_heads=2))
    alike = check(lambda q, k, v: F.scaled_dot_product_attention(q, grown(k, 2), grown(v, 2)), qkv(kv_heads=2))
    assert alike["kv_heads"] == 1


def test_one_head_of_queries_for_all_repeated_ones_stays() -> None:
    check(lambda q, k, v: F.scaled_dot_product_attention(q[:, :1], grown(k, 2), grown(v, 2)), qkv(kv_heads=2))


# ---- casts that round, numbers that are open ----


def test_attention_whose_result_is_written_into_stays() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.transpose(-1, -2)).softmax(-1) @ v

    # SDPA keeps its result for the backward.
    assert "attention" not in check(lambda q, k, v: attend(q, k, v).add_(v), qkv())
    assert check(lambda q, k, v: attend(q, k, v) + v, qkv())["attention"] == 1


def test_a_norm_of_rounded_rows_is_not_that_of_the_rows() -> None:
    def norm(x: Tensor, w: Tensor) -> Tensor:
        h = x.to(torch.bfloat16).float()
        return w * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5))

    assert "rms_norm" not in check(norm, [_numbers(2, 8, 8), _numbers(8)])


def test_a_norm_of_whole_numbers_is_that_of_the_numbers() -> None:
    def norm(x: Tensor, w: Tensor) -> Tensor:
        whole = (9 * x).to(torch.int32).float()
        return w * (whole * torch.rsqrt(whole.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    check(norm, [_numbers(2, 8, 8), _numbers(8)])


def test_a_loss_of_rounded_logits_is_not_that_of_the_logits() -> None:
    for dtype in (torch.bfloat16, torch.float64):
        counts = check(
            lambda x, w, dtype=dtype: F.cross_entropy(F.linear(x, w).to(dtype).float(), torch.arange(8)),
            [_numbers(8, 8), _numbers(24, 8)],
        )
        assert "cross_entropy" not in counts


def test_a_padding_index_that_is_an_open_number_is_left_to_torch() -> None:
    index = torch.arange(6).view(2, 3)
    for look_up in (F.embedding, lambda i, w, at: torch.embedding(w, i, at)):
        run, _ = rewritten(look_up, dynamic=True)
        for at in (2, 4):
            leaf = _numbers(24, 8)
            run(index, leaf, at).sum().backward()
            assert leaf.grad is not None and leaf.grad[at].eq(0).all() and leaf.grad[1].eq(1).all()
        torch._dynamo.reset()


# ---- generated spellings ----


def _rms_norm(r: random.Random) -> Case:
    power = r.choice([lambda x: x.pow(2), lambda x: x * x, torch.square, lambda x: x**2, lambda x: x.pow(3).abs()])
    mean = r.choice(
        [
            lambda x: x.mean(-1, keepdim=True),
            lambda x: x.mean(dim=(-1,), keepdim=True),
            lambda x: torch.mean(x, 2, True),
            lambda x: x.mean(1, keepdim=True),
            lambda x: x.mean((1, 2), keepdim=True),
            lambda x: x.sum(-1, keepdim=True) / 7,
        ]
    )
    eps = r.choice([1e-6, 1e-2, 1, torch.tensor(1e-3)])
    shift = r.choice(
        [lambda m: m + eps, lambda m: eps + m, lambda m: torch.add(m, eps, alpha=3), lambda m: m - eps, torch.abs]
    )
    root = r.choice([torch.rsqrt, lambda m: 1 / torch.sqrt(m), lambda m: m**-0.5, lambda m: 2 / m.sqrt(), torch.sqrt])
    gain = r.choice([lambda y, w: w * y, lambda y, w: y * (1 + w), lambda y, w: y.mul_(w), lambda y, w: y * w[:, None]])
    cast = r.choice([lambda x: x, lambda x: x.float(), lambda x: x.double(), lambda x: x.to(torch.bfloat16)])
    both = r.random() < 0.3

    def norm(x: Tensor, w: Tensor) -> Any:
        h = cast(x)
        factor = root(shift(mean(power(h))))
        y = gain((h * factor).to(x.dtype), w)
        return (y, factor) if both else y

    return norm, [_numbers(2, 8, 8), _numbers(8)]


def _activation(r: random.Random) -> Case:
    half, cubic, width = r.choice([0.5, 0.5, 0.25]), r.choice([0.044715, 0.044715, 0.0447]), math.sqrt(2 / math.pi)
    width = r.choice([width, width, 0.8])
    bend = r.choice(
        [
            lambda x: half * x * (1 + torch.tanh(width * (x + cubic * x.pow(3)))),
            lambda x: half * x * (1.0 + torch.tanh(x * width * (1.0 + cubic * x * x))),
            lambda x: x * half * (1 + torch.erf(x / math.sqrt(2))),
            lambda x: x * half * (1 + torch.erf(x * 0.7071)),
            lambda x: x * torch.sigmoid(x),
            lambda x: x * torch.sigmoid(1.702 * x),
            lambda x: x * torch.sigmoid(x).to(torch.bool),
            lambda x: x * torch.sigmoid(x).round().long(),
            F.silu,
            lambda x: F.silu(x, inplace=True),
            lambda x: F.gelu(x, approximate="tanh"),
            lambda x: F.relu(x).square(),
        ]
    )
    join = r.choice(
        [
            lambda a, b: bend(a) * b,
            lambda a, b: b * bend(a),
            lambda a, b: bend(a).mul_(b),
            lambda a, b: bend(a) * b[:, :1],
            lambda a, b: bend(a) * b.detach(),
            lambda a, b: torch.add(bend(a), b, alpha=2),
        ]
    )
    split = r.choice(
        [
            lambda x: x.chunk(2, -1),
            lambda x: x.chunk(2, 1),
            lambda x: (x[..., ::2], x[..., 1::2]),
            lambda x: x.split([4, 4], 2)[::-1],
        ]
    )
    return (lambda x, w: join(*split(F.linear(x, w)))), [_numbers(2, 8, 8), _numbers(8, 8)]


def _rope(r: random.Random) -> Case:
    def halves(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat((-b, a), -1)

    turn = r.choice(
        [
            halves,
            lambda x: -halves(x),
            lambda x: torch.cat((-x[..., 4:], x[..., :4]), dim=-1),
            lambda x: torch.cat((-x[..., 5:], x[..., :5]), dim=-1),
            lambda x: torch.cat((x[..., 4:], x[..., :4]), dim=-1),
            lambda x: torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2),
            lambda x: x.roll(4, -1),
        ]
    )
    spread = r.choice([lambda c: c, lambda c: c[None, None], lambda c: c.unsqueeze(1), lambda c: c[:, None, :1]])
    join = r.choice(
        [
            lambda x, c, s: x * c + turn(x) * s,
            lambda x, c, s: x * c - turn(x) * s,
            lambda x, c, s: torch.add(x * c, turn(x) * s, alpha=0.5),
            lambda x, c, s: (x * c).add_(turn(x) * s),
            lambda x, c, s: turn(x) * s + x * c,
            lambda x, c, s: x * c + turn(x) * c,
        ]
    )
    return (lambda x, c, s: join(x, spread(c), spread(s))), [_numbers(2, 4, 8, 8), _numbers(8, 8), _numbers(8, 8)]


def _loss(r: random.Random) -> Case:
    how: dict[str, Any] = {}
    if r.random() < 0.6:
        how |= r.choice(
            [
                {"reduction": "sum"}, {"reduction": "none"}, {"size_average": False}, {"reduce": False},
                {"ignore_index": 3}, {"ignore_index": -1}, {"label_smoothing": 0.1}, {"weight": torch.arange(24.0)},
            ]
        )  # fmt: skip
    step = r.choice(
        [
            lambda z: z, lambda z: z * 2, lambda z: z / 3, lambda z: 3 / (z.abs() + 1), lambda z: 5 * torch.tanh(z / 5),
            lambda z: 5 * torch.tanh(z / 4), lambda z: torch.tanh(torch.tanh(z)), lambda z: z.bfloat16().float(),
            lambda z: z + 1, lambda z: z.to(torch.int32).to(torch.float32) + z, lambda z: torch.mul(z, z),
            lambda z: z.clamp(-1, 1), lambda z: z * torch.tensor(2.0), lambda z: z.flip(-1), lambda z: z.double(),
        ]
    )  # fmt: skip
    both = r.random() < 0.3
    in_rows = r.random() < 0.8

    def loss(x: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
        z = step(F.linear(x, w, b))
        made = F.cross_entropy(z.flatten(0, 1), y.flatten(), **how) if in_rows else F.cross_entropy(z.mT, y, **how)
        return (made, z.sum(-1)) if both else made

    labels = torch.randint(0, 24, (2, 8), generator=torch.Generator().manual_seed(r.randrange(99)))
    return loss, [_numbers(2, 8, 8), _numbers(24, 8), _numbers(24), labels]


def _lookup(r: random.Random) -> Case:
    how = r.choice([{}, {"padding_idx": 2}, {"padding_idx": -1}, {"scale_grad_by_freq": True}, {"max_norm": 1.0}])
    table = r.choice([lambda w: w, lambda w: w * 2, lambda w: w.t().contiguous().t(), lambda w: w[:20]])
    call = r.choice([lambda i, w: F.embedding(i, w, **how), lambda i, w: torch.embedding(w, i, 2), lambda i, w: w[i]])
    index = torch.randint(0, 20, (2, 8), generator=torch.Generator().manual_seed(r.randrange(99)))
    return (lambda i, w: call(i, table(w)) * 2), [index, _numbers(24, 8)]


def _residual(r: random.Random) -> Case:
    add = r.choice(
        [
            lambda a, b: a + b,
            lambda a, b: torch.add(a, b, alpha=0.5),
            lambda a, b: a.add_(b),
            lambda a, b: a + b[:1],
            lambda a, b: a - b,
            lambda a, b: a + 2 * b,
            lambda a, b: (a + b).to(torch.bfloat16).float(),
        ]
    )
    norm = r.choice(
        [
            lambda x, w: F.rms_norm(x, (8,), w, 1e-5),
            lambda x, w: F.rms_norm(x, (8,), None),
            lambda x, w: F.rms_norm(x, (8, 8)),
            lambda x, w: F.layer_norm(x, (8,), w),
            lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)),
        ]
    )
    after = r.choice([lambda h, y: h + y, lambda h, y: y, lambda h, y: h.mul_(2) + y, lambda h, y: (h, y)])

    def block(a: Tensor, b: Tensor, w: Tensor, v: Tensor) -> Any:
        h = add(a, b)
        return after(h, F.linear(norm(h, w), v))

    return block, [_numbers(2, 8, 8), _numbers(2, 8, 8), _numbers(8), _numbers(8, 8)]


FAMILIES = {
    "rms norm": _rms_norm,
    "activation": _activation,
    "rope": _rope,
    "loss": _loss,
    "lookup": _lookup,
    "residual": _residual,
}


def _numbers(*shape: int) -> Tensor:
    seed = math.prod(shape) * len(shape)
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def _try(family: str, seed: int) -> None:
    """One spelling: where eager takes it, the rewritten graph gives the same."""
    r = random.Random(f"{family} {seed}")
    function, inputs = FAMILIES[family](r)
    frozen = r.randrange(len(inputs)) if r.random() < 0.2 else None
    inputs = [x.detach() if i == frozen else x for i, x in enumerate(inputs)]
    try:
        outcome(function, inputs)
    except (RuntimeError, IndexError):
        return  # no model writes that
    check(function, inputs, dynamic=r.random() < 0.2)


@pytest.mark.parametrize("family", FAMILIES)
def test_spellings_compute_what_they_say(family: str) -> None:
    for seed in range(6):
        _try(family, seed)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
@pytest.mark.parametrize("family", FAMILIES)
def test_many_spellings_compute_what_they_say(family: str, part: int) -> None:
    for seed in range(100 + 30 * part, 130 + 30 * part):
        _try(family, seed)


# ---- parts under no_grad, and biases of other shapes ----


def cut(function: Callable[..., Any], *given: Any) -> Any:
    with torch.no_grad():
        return function(*given)


def mean_square(x: Tensor) -> Tensor:
    return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


def norm(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, (8,), w, 1e-5)


def tanh_of(x: Tensor) -> Tensor:
    return torch.tanh(0.7978845608028654 * (x + 0.044715 * x**3))


def turned(x: Tensor) -> Tensor:
    return torch.cat([-x[..., 4:], x[..., :4]], -1)


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-1, -2) * 8**-0.5


def norm_of_sum(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    h = x + y
    return h * cut(norm, h, w)


def weighted_by_loss(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    z = F.linear(x, w)
    return cut(F.cross_entropy, z, t) * z.sum()


A, B, W = _numbers(4, 8), _numbers(8, 8)[4:].detach().requires_grad_(), _numbers(8)
Q, K, V = _numbers(2, 2, 6, 8), _numbers(2, 2, 7, 8), _numbers(2, 2, 7, 8)
HEAD, IDS = _numbers(24, 8), torch.arange(4)
CUT = {
    "a gate's sigmoid": (lambda x, u: x * cut(torch.sigmoid, x) * u, [A, B]),
    "a gate": (lambda x, u: cut(F.silu, x) * u, [A, B]),
    "gelu's tanh": (lambda x: 0.5 * x * (1 + cut(tanh_of, x)), [A]),
    "a norm's scale": (lambda x, w: w * (x * cut(mean_square, x)), [A, W]),
    "a norm's rows": (lambda x, w: w * cut(lambda t: t * mean_square(t), x), [A, W]),
    "a sum before a norm": (lambda x, y, w: norm(cut(torch.add, x, y), w) + x, [A, B, W]),
    "a sum of what learns nothing": (lambda x, y, w: norm(cut(torch.add, x, y), w), [A.detach(), B.detach(), W]),
    "a norm behind a sum": (lambda x, y, w: (x + y) * cut(norm, x + y, w) + (x + y), [A, B, W]),
    "logits": (lambda x, w, t: F.cross_entropy(cut(F.linear, x, w), t) + x.sum(), [A, HEAD, IDS]),
    "a norm of the sum": (norm_of_sum, [A, B, W]),
    "a loss": (weighted_by_loss, [A, HEAD, IDS]),
    "attention's weights": (lambda q, k, v: cut(lambda: scores(q, k).softmax(-1)) @ v, [Q, K, V]),
    "attention's scores": (lambda q, k, v: cut(scores, q, k).softmax(-1) @ v, [Q, K, V]),
    "a turned half": (lambda x, c: x * c.cos() + cut(turned, x) * c.sin(), [Q, _numbers(6, 8).detach()]),
}  # fmt: skip


@pytest.mark.parametrize("part", CUT)
def test_what_no_grad_cuts_off_is_not_fused_with_what_learns(part: str) -> None:
    check(*CUT[part])


def test_a_graph_that_is_all_under_no_grad_is_fused() -> None:
    def forward(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        return norm(x + y, w) * F.silu(x) * y

    counts = check(torch.no_grad()(forward), [A, B, W])
    assert counts["rms_norm"] == counts["swiglu"] == counts["residual_norm"] == 1
    # Cosine and sine, as Hugging Face makes them, need no gradient.
    assert check(lambda x, c: x * cut(c.cos) + turned(x) * cut(c.sin), [Q, _numbers(6, 8).detach()])["rope"] == 1


@pytest.mark.parametrize("shape", [(1,), (1, 24), (4, 24)], ids=str)
def test_a_heads_bias_that_is_no_row_is_broadcast(shape) -> None:
    check(lambda x, w, b, t: F.cross_entropy(F.linear(x, w, b), t), [A, HEAD, _numbers(*shape), IDS])


# ---- one program a pass, in both dtypes ----


def llama_norm(x: Tensor, w: Tensor, eps: float = 1e-6) -> Tensor:
    x32 = x.float()
    return w * (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def sigmoid_linear(x: Tensor, gate: Tensor) -> Tensor:
    return x * torch.sigmoid(gate)


def on_a_grid(x: Tensor, step: float) -> Tensor:
    return torch.div(x, step, rounding_mode="floor") * step


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + turned(x) * sin


def in_bf16(function: Callable[..., Any], *given: Any) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return function(*given)


def norm_rounded_inside(x: Tensor, w: Tensor) -> Tensor:
    return w * (x * mean_square(x)).to(torch.bfloat16)


def parts_of(rows: Tensor, heads: int, swapped: bool = True) -> list[Tensor]:
    parts = [part.view(2, heads, heads, 8) for part in rows.split(8 * heads, -1)]
    return [part.transpose(1, 2) for part in parts] if swapped else parts


def by_head(rows: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """As many tokens as heads, and a row of the tables for each head."""
    q, k, v = parts_of(rows, 4, swapped=False)
    return rotated(q, cos, sin), rotated(k, cos, sin), v * 1


def by_token(rows: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    q, k, v = parts_of(rows, 4)
    return rotated(q, cos, sin), rotated(k, cos, sin), v * 1


def weight_of_another_precision(x: Tensor, y: Tensor, m: Tensor) -> Tensor:
    h = x + y
    return in_bf16(lambda: norm(h, F.linear(m[0], m).float()))


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Any = 0.0) -> Tensor:
    return (scores(q, k) + mask).softmax(-1) @ v


def weighted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).softmax(-1) @ v


def masked_by(mask: Tensor, *given: Tensor) -> Tensor:
    return attend(*given, mask)


def shut(size: int, dtype: torch.dtype) -> Tensor:
    """Numbers below which nothing is, for the third query's keys."""
    return torch.where(torch.arange(size)[:, None] == 2, torch.finfo(dtype).min, 0.0).to(dtype).expand(size, size)


def band(size: int, dtype: torch.dtype, shift: int = 0) -> Tensor:
    at = torch.arange(size)
    return torch.where(at[:, None] + shift >= at[None], 0.0, torch.finfo(dtype).min).to(dtype)


def in_parts(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = in_bf16(scores, q, k).to(v.dtype).softmax(-1)
    return weights @ v


def rounded(x: Tensor) -> Tensor:
    return x.bfloat16().to(x.dtype)


SIX, MASK, MASKS = qkv(size=6), _numbers(6, 6).detach(), _numbers(2, 2, 6, 6).detach()
NUMBERS, COS, SIN = (_numbers(64) * 3).detach().requires_grad_(), _numbers(4, 8).detach(), _numbers(4, 8).detach().cos()
ALIKE: dict[str, dict[str, Case]] = {
    "rms_norm": {
        "rounded to another dtype before the weight": (norm_rounded_inside, [A, W]),
        "the same dtype": (llama_norm, [A, W]),
        "another dtype in the end": (lambda x, w: llama_norm(x, w).to(torch.float16), [A, W]),
        "x is its weight": (lambda x: llama_norm(x, x), [W]),
        "eps of an array": (lambda x, w: llama_norm(x, w, np.float64(1e-3)), [A, W]),
    },
    "gelu": {
        "a gate on a grid of sixteenths": (lambda x: sigmoid_linear(x, on_a_grid(x, 0.0625)), [NUMBERS]),
        "a gate on a grid of no width": (lambda x: sigmoid_linear(x, on_a_grid(x, 1e-7)), [NUMBERS]),
        "a gate rounded to bf16": (lambda x: x * torch.sigmoid(x.bfloat16()).to(x.dtype), [NUMBERS]),
        "a gate": (lambda x: sigmoid_linear(x, x), [NUMBERS]),
    },
    "rope_qkv": {
        "tables of heads": (by_head, [_numbers(2, 4, 96), COS, SIN]),
        "tables of tokens": (by_token, [_numbers(2, 4, 96), COS, SIN]),
    },
    "attention": {
        "plain": (weighted, SIX),
        "one head of queries": (lambda q, k, v: weighted(q[:, :1], k, v), SIX),
        "one sequence of keys": (lambda q, k, v: weighted(q, k[:1], v[:1]), SIX),
        "a triangle": (lambda q, k, v: attend(q, k, v, band(6, q.dtype)), SIX),
        "a triangle that leaves the first query nothing": (lambda q, k, v: attend(q, k, v, band(6, q.dtype, -1)), SIX),
        "a mask that leaves a query nothing": (lambda q, k, v: attend(q, k, v, shut(6, q.dtype)), SIX),
        "any mask": (masked_by, [MASK, *SIX]),
        "any mask for what learns nothing": (masked_by, [MASK, *(x.detach() for x in SIX)]),
        "a mask for more sequences": (lambda m, *of: masked_by(m, *(x[:1] for x in of)), [MASKS[:, :1], *SIX]),
        "a mask for more heads": (lambda m, q, k, v: attend(q[:, :1], k[:, :1], v, m), [MASKS.flatten(0, 1), *SIX]),
        "a mask of five dimensions": (masked_by, [MASKS[:, :, None], *SIX]),
        "a mask for more queries": (lambda m, q, k, v: attend(q[:, :, :1], k, v, m), [MASK, *SIX]),
        "a mask for more keys": (lambda m, q, k, v: attend(q, k[:, :, :1], v, m), [MASK, *SIX]),
        "scores rounded to bf16": (lambda q, k, v: rounded(scores(q, k)).softmax(-1) @ v, SIX),
        "weights rounded to bf16": (lambda q, k, v: rounded(scores(q, k).softmax(-1)) @ v, SIX),
        "scores on a grid": (lambda q, k, v: on_a_grid(scores(q, k), 0.25).softmax(-1) @ v, SIX),
    },
    "residual_norm": {
        "a weight computed under autocast": (weight_of_another_precision, [A, B, _numbers(8, 8)]),
        "a sum of one tensor": (lambda x, w: norm(x + x, w), [A, W]),
    },
}  # fmt: skip
TAKEN = {
    torch.float32: {"rms_norm": 3, "gelu": 1, "rope_qkv": 1, "attention": 5, "residual_norm": 1},
    torch.bfloat16: {"rms_norm": 4, "gelu": 2, "rope_qkv": 1, "attention": 7, "residual_norm": 1},
}


@pytest.mark.parametrize("dtype", TAKEN, ids=str)
@pytest.mark.parametrize("rewrite", ALIKE)
def test_what_only_looks_alike_is_computed_as_it_is_written(rewrite, dtype) -> None:
    assert check_all(ALIKE[rewrite], dtype)[rewrite] == TAKEN[dtype][rewrite]


# ---- what an op keeps for its gradient, and the model writes into afterwards ----


def then_written(function: Callable[..., Tensor], which: int = 0) -> Callable[..., tuple[Tensor, Tensor]]:
    """One of the operands, or of a function's view of them, is another when the function is done."""

    def run(*given: Tensor) -> tuple[Tensor, Tensor]:
        own = [x * 1 if x.is_floating_point() else x for x in given]
        out = function(*own)
        own[which].mul_(2)
        return out, own[which]

    return run


def erf_gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, grown(k, 2), grown(v, 2))


WRITTEN_LATER: dict[str, Case] = {
    "a norm's rows that learn nothing": (then_written(norm), [A.detach(), W]),
    "a norm's rows, which are cast": (lambda x, w: then_written(llama_norm)(x.bfloat16(), w.bfloat16()), [A, W]),
    "a norm's weight": (then_written(llama_norm, 1), [A.detach(), W]),
    "a sum before a norm": (lambda x, y, w: then_written(llama_norm)((x + y).bfloat16(), w.bfloat16()), [A, B, W]),
    "a gate that learns nothing": (then_written(lambda x, y: F.silu(x) * y), [A.detach(), B]),
    "relu's gate": (then_written(lambda x, y: F.relu(x) * y), [A, B]),
    "what is gated and learns nothing": (then_written(lambda x, y: F.silu(x) * y, 1), [A.detach(), B]),
    "gelu by erf": (then_written(erf_gelu), [A]),
    "keys that were repeated": (then_written(grouped, 1), [_numbers(2, 4, 6, 8), *qkv(kv_heads=2, size=6)[1:]]),
    "attention's mask": (then_written(masked_by), [MASK, *SIX]),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_an_op_would_keep_may_be_written_later(dtype) -> None:
    assert not check_all(WRITTEN_LATER, dtype)


def test_parts_of_attention_under_autocast_keep_their_precision() -> None:
    """One product in bf16, the other in fp32: a fused op would compute both in one of them."""
    cases: dict[str, Case] = {
        "scores": (in_parts, SIX),
        "values": (lambda q, k, v: in_bf16(torch.matmul, scores(q, k).softmax(-1), v), SIX),
        "all of fp32": (lambda *given: in_bf16(weighted, *given), SIX),
    }
    assert not check_all(cases)
    assert check_all({"all of bf16": cases["all of fp32"]}, torch.bfloat16) == {"attention": 1}
