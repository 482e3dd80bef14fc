"""The embedding's gradient: bit for bit the reference where sums are exact, within the sum's own bound where not."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import aot
from deepwell.errors import ConfigError
from deepwell.formats.metrics import assert_bitwise_equal
from deepwell.kernels.head import embedding as E

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def device(everywhere):
    """Interpreted, by the reference, and on a GPU where there is one."""
    return everywhere


def whole_numbers(tokens: int, width: int, dtype: torch.dtype, device: str) -> Tensor:
    """Gradients of -2 .. 2: fp32 adds them exactly in any order, so that every bit is known."""
    return torch.randint(-2, 3, (tokens, width)).to(device, dtype)


def _indices(name: str, tokens: int, rows: int) -> Tensor:
    """Indices of one kind, in no order."""
    made = {
        # Every token once: each run is a piece of one row.
        "runs of one": torch.arange(tokens) % rows,
        # One run over all blocks: its pieces are all kept and added.
        "one token": torch.full((tokens,), 3),
        "random": torch.randint(0, rows, (tokens,)),
        # Runs that end at blocks' ends, and one that begins with a block and fills two.
        "whole blocks": torch.arange(tokens) // E.CHUNK // 2 * 2 % rows,
        # A run that begins inside a block and reaches over three, between short ones.
        "one long": torch.where(torch.arange(tokens) % 4 == 1, torch.randint(0, rows, (tokens,)), 1),
    }[name]
    return made[torch.randperm(tokens)]


KINDS = ["runs of one", "one token", "random", "whole blocks", "one long"]


@pytest.mark.parametrize(
    ("kind", "tokens", "rows", "width"),
    [
        *((kind, 260, 70, 24) for kind in KINDS),
        ("runs of one", 150, 160, 16),
        ("random", 64, 64, 40),
        ("one long", 5, 4, 8),
    ],
)
def test_exact_sums_are_the_references_bit_for_bit(device, kind, tokens, rows, width):
    torch.manual_seed(0)
    index = _indices(kind, tokens, rows).to(device)
    grad = whole_numbers(tokens, width, torch.bfloat16, device)
    made = E.embedding_backward(grad, index, rows)
    assert_bitwise_equal(made, E.embedding_backward_ref(grad, index, rows, -1))
    unseen = sorted(set(range(rows)) - set(index.tolist()))
    assert not made[unseen].any()  # what does not occur is zero, not what memory held


@pytest.mark.parametrize(
    ("dtype", "index_dtype"), [*((dtype, torch.int64) for dtype in DTYPES), (torch.bfloat16, torch.int32)], ids=str
)
def test_dtypes_of_gradients_and_indices(device, dtype, index_dtype):
    torch.manual_seed(1)
    index = torch.randint(0, 5, (150,), device=device, dtype=index_dtype)
    grad = whole_numbers(150, 20, dtype, device)
    made = E.embedding_backward(grad, index, 6)
    assert made.dtype is dtype
    assert_bitwise_equal(made, E.embedding_backward_ref(grad, index, 6, -1))


@pytest.mark.parametrize(
    ("kind", "dtype"), [*((kind, torch.bfloat16) for kind in KINDS), *(("one long", dtype) for dtype in DTYPES[::2])]
)
def test_sums_are_within_their_bound_of_the_exact_ones(device, kind, dtype):
    # n - 1 additions in fp32 are each off by half a unit of a partial sum, at most of the sum of magnitudes: (n - 1) u
    # sum |x| with u = 2^-24 (first order; the factor 1.01 covers the rest here), then one rounding.
    torch.manual_seed(2)
    tokens, rows = 260, 9
    index = _indices(kind, tokens, rows).to(device)
    grad = torch.randn(tokens, 24).to(device, dtype)
    made = E.embedding_backward(grad, index, rows).double()
    zeros = torch.zeros(rows, 24, dtype=torch.float64, device=device)
    exact = zeros.index_add(0, index, grad.double())
    magnitudes = zeros.index_add(0, index, grad.double().abs())
    count = torch.bincount(index, minlength=rows)[:, None].clamp(min=1)
    sums = 1.01 * (count - 1) * 2.0**-24 * magnitudes
    rounding = 0.0 if dtype is torch.float32 else torch.finfo(dtype).eps / 2
    smallest = 0.0 if dtype is torch.float32 else torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    assert ((made - exact).abs() <= sums + rounding * (exact.abs() + sums) + smallest).all()


@pytest.mark.parametrize("padding_idx", [0, 3, 6])
def test_the_row_of_padding_stays_zero(device, padding_idx):
    # Also where padding fills whole blocks, and where its gradient is not a number.
    torch.manual_seed(3)
    index = torch.cat([torch.full((200,), padding_idx), torch.randint(0, 7, (90,))]).to(device)
    grad = whole_numbers(290, 16, torch.bfloat16, device)
    grad[index == padding_idx] = torch.nan
    made = E.embedding_backward(grad, index, 7, padding_idx)
    assert not made[padding_idx].any()
    assert_bitwise_equal(made, E.embedding_backward_ref(grad, index, 7, padding_idx))


@pytest.mark.parametrize("config", E.CONFIGS, ids=str)
def test_configs_agree_and_columns_may_end_inside_a_tile(device, config):
    torch.manual_seed(4)
    index = _indices("one long", 200, 6).to(device)
    grad = whole_numbers(200, config.columns + 12, torch.bfloat16, device)
    made = E.embedding_backward(grad, index, 6, config=config)
    assert_bitwise_equal(made, E.embedding_backward_ref(grad, index, 6, -1))


def test_rows_and_indices_may_lie_apart_and_one_column_is_a_row(device):
    torch.manual_seed(5)
    index = torch.randint(0, 4, (70, 2), device=device, dtype=torch.int32)[:, 1]
    wide = whole_numbers(70, 48, torch.bfloat16, device)
    for grad in (wide[:, 8:30], wide[:, :1]):
        made = E.embedding_backward(grad, index, 4)
        assert made.is_contiguous()
        assert_bitwise_equal(made, E.embedding_backward_ref(grad, index, 4, -1))


def test_two_runs_agree_bit_for_bit(device):
    torch.manual_seed(6)
    index = _indices("one long", 200, 20).to(device)
    grad = torch.randn(200, 64).to(device, torch.bfloat16)
    first = E.embedding_backward(grad, index, 20)
    assert_bitwise_equal(E.embedding_backward(grad, index, 20), first)


@pytest.mark.parametrize(("tokens", "rows", "width"), [(0, 5, 8), (4, 5, 0), (0, 0, 8)])
def test_nothing_to_add_is_zeros(device, tokens, rows, width):
    index = torch.zeros(tokens, dtype=torch.int64, device=device)
    made = E.embedding_backward(torch.ones(tokens, width, device=device), index, rows)
    assert made.shape == (rows, width)
    assert not made.any()


def test_fp32_is_torchs_own_gradient_where_sums_are_exact(device):
    index = torch.randint(0, 11, (130,), device=device)
    weight = torch.zeros(11, 12, device=device, requires_grad=True)
    grad = whole_numbers(130, 12, torch.float32, device)
    F.embedding(index, weight, padding_idx=2).backward(grad)
    assert_bitwise_equal(E.embedding_backward(grad, index, 11, 2), weight.grad)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grad_TD": torch.ones(4)}, "two dimensions"),
        ({"grad_TD": torch.ones(4, 8, dtype=torch.float64)}, "dtype torch.float64"),
        ({"grad_TD": torch.ones(8, 4).T}, "contiguous"),
        ({"index_T": torch.zeros(2, 2, dtype=torch.int64)}, "flatten it"),
        ({"index_T": torch.zeros(4)}, "int32 or int64"),
        ({"index_T": torch.zeros(3, dtype=torch.int64)}, r"shape \(4,\)"),
        ({"num_weights": -1}, "num_weights is -1"),
        ({"padding_idx": 9}, "padding_idx is 9"),
        ({"padding_idx": -2}, "padding_idx is -2"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    given = {"grad_TD": torch.ones(4, 8), "index_T": torch.zeros(4, dtype=torch.int64), "num_weights": 9}
    with pytest.raises(ConfigError, match=message):
        E.embedding_backward(**(given | change))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_a_weight_of_more_than_two_to_the_31_numbers():
    # The last row lies past what 32 bits count.
    rows, width = 2**20 + 8, 2048
    index = torch.tensor([rows - 1, 5, rows - 1], device="cuda")
    made = E.embedding_backward(torch.ones(3, width, device="cuda", dtype=torch.bfloat16), index, rows)
    assert made[rows - 1].eq(2).all() and made[5].eq(1).all() and not made[6 : rows - 1].any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_a_recorded_graph_follows_new_indices():
    # Nothing waits for the host and no size depends on data: what was recorded serves other tokens.
    index = torch.arange(300, device="cuda") % 7
    grad = whole_numbers(300, 256, torch.bfloat16, "cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        E.embedding_backward(grad, index, 50)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = E.embedding_backward(grad, index, 50)
    for seed in range(3):
        torch.manual_seed(seed)
        index.copy_(torch.randint(0, 1 + 20 * seed, (300,)))
        graph.replay()
        assert_bitwise_equal(made, E.embedding_backward_ref(grad, index, 50, -1))


COMPILED = [*((90, config) for config in E.CONFIGS), (100, E.CONFIGS[0])]


def _arguments(config: E.TileConfig, dtype: torch.dtype) -> dict[str, object]:
    return {
        **dict.fromkeys(("grad_ptr", "dw_ptr"), dtype),
        "sorted_ptr": torch.int32,
        "order_ptr": torch.int64,
        "piece_ptr": torch.float32,
        **dict.fromkeys(("D", "stride_gt"), "i32"),
        **dict.fromkeys(("T", "V", "padding_idx"), "i32:any"),
        "CHUNK": E.CHUNK,
        "ROWS": config.rows,
        "BLOCK": config.columns,
    }


@pytest.mark.parametrize(("arch", "config"), COMPILED, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_pieces_are_read_and_written_in_lines_of_sixteen_bytes(arch, config, dtype):
    made = aot.compile_kernel(
        E._embedding_pieces_kernel, _arguments(config, dtype), arch=arch, num_warps=config.num_warps
    )
    assert made.spill_bytes == made.stack_bytes == 0
    assert made.count(r"ld\.global[\w.]*\.v[48]\.b32") >= 1  # 16 bytes, or Blackwell's 32
    # After the sum over rows a narrow tile has fewer bytes for each thread.
    bytes_each = config.columns * dtype.itemsize // (32 * config.num_warps)
    assert bytes_each < 16 or made.count(r"st\.global[\w.]*\.v[48]\.b32") >= 1
    assert made.count(r"\b(atom|red)\.") == 0


@pytest.mark.parametrize(("arch", "config"), COMPILED, ids=str)
def test_long_runs_spill_nothing_and_add_nothing_atomically(arch, config):
    arguments = _arguments(config, torch.bfloat16)
    for name in ("grad_ptr", "order_ptr", "stride_gt"):
        del arguments[name]
    made = aot.compile_kernel(E._embedding_long_kernel, arguments, arch=arch, num_warps=config.num_warps)
    assert made.spill_bytes == made.stack_bytes == 0
    assert made.count(r"ld\.global[\w.]*\.v4\.b32") >= 1
    assert made.count(r"\b(atom|red)\.") == 0
