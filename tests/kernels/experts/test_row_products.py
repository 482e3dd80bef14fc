"""Products over the experts' rows: every kernel against fp64, at unit scale, for any distribution of tokens."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deepwell.errors import ConfigError, UnsupportedError
from deepwell.formats.metrics import sqnr_db
from deepwell.kernels.experts import hidden_rows as H
from deepwell.kernels.experts import row_products as R
from deepwell.kernels.experts import token_products as W
from deepwell.kernels.experts.activation import ExpertActivation, hidden_and_slopes_ref
from deepwell.kernels.experts.group_rows import group_columns, group_layout
from deepwell.kernels.experts.quantize_weights import quantize_experts
from deepwell.kernels.experts.row_tiles import groups
from deepwell.kernels.experts.swiglu import weights_of_rows
from deepwell.kernels.quantize.fp8 import quantize_rows_ref
from deepwell.kernels.quantize.wgrad_operands import wgrad_operands

sys.path.append(str(Path(__file__).parent))
import compiled

from launches import on_absent_gpu

GPT_OSS = ExpertActivation(interleaved=True, limit=0.9, alpha=1.702, up_shift=1.0)
PLAIN = ExpertActivation(function="relu2", gated=False)
HOW = {"swiglu": ExpertActivation(), "gpt_oss": GPT_OSS, "plain": PLAIN, "clamped": ExpertActivation(limit=0.7)}
# Tiles that a CPU can interpret; on a GPU those that are launched there.
SMALL = R.RowTile(block_m=16, block_n=64, block_k=32, num_stages=2, num_warps=4, group_m=2)
AHEAD = R.RowTile(block_m=16, block_n=128, block_k=32, num_stages=2, num_warps=4, persistent=False)
BY_TMA = replace(AHEAD, stores="tma", persistent=True)
STORES = (SMALL, AHEAD, BY_TMA, replace(BY_TMA, stores="halves"), replace(BY_TMA, stores="late"))
SMALL_WEIGHT = W.WeightTile(block_n=32, block_k=64, num_stages=2, num_warps=4)
HALVES = W.WeightTile(block_n=256, block_k=64, num_stages=2, num_warps=4)
SMALL_ROWS = W.WeightTile(block_n=32, block_k=64, block_c=32, num_stages=2, num_warps=4)
HALVES_OF_ROWS = W.WeightTile(block_n=256, block_k=32, block_c=16, num_stages=2, num_warps=4, persistent=False)
# bf16 results of sums in fp32.
FLOOR_DB = 45.0


def tiles(device, of):
    return of if device == "cuda" else (SMALL, AHEAD, BY_TMA) if of is R.UP_TILES else STORES


def routed(counts, *, top_k=2, dropped=0, device="cpu"):
    """Rows of tokens that chose experts so often, in random order; the last choices are dropped ones."""
    ids = torch.cat([torch.full((n,), e) for e, n in enumerate(counts)] + [torch.full((dropped,), len(counts))])
    ids = ids[torch.randperm(len(ids))]
    assert len(ids) % top_k == 0
    order = torch.sort(ids, stable=True).indices
    offs = torch.tensor(counts).cumsum(0).int()
    ends, slot, place = (part.to(device) for part in group_layout(offs, order, len(ids)))
    return R.Rows(ends, slot, top_k), place, len(ids) // top_k


def unit(*shape, device="cpu"):
    return torch.randn(shape).bfloat16().to(device)


def weights(e, n, k, *, kn=False, device="cpu"):
    """[E, N, K] whose products have unit scale, stored so or [E, K, N]."""
    stored = (torch.randn((e, k, n) if kn else (e, n, k)) * k**-0.5).bfloat16().to(device)
    return stored.transpose(1, 2) if kn else stored


def close(got, wanted, floor=FLOOR_DB):
    assert got.isfinite().all()
    assert sqnr_db(wanted.cpu(), got.cpu()) > floor


def on_cpu(rows):
    return R.Rows(rows.ends.cpu(), rows.slot.cpu(), rows.top_k)


def wide(*tensors):
    return [tensor.cpu().double() for tensor in tensors]


COUNTS = {"ragged": (19, 0, 34, 1), "all to one": (0, 40, 0), "one token": (1, 1), "no tokens": (0, 0)}


@pytest.mark.parametrize("kn", [False, True], ids=["nk", "kn"])
@pytest.mark.parametrize("spread", COUNTS)
def test_product_of_gathered_rows(device, spread, kn):
    torch.manual_seed(0)
    rows, _, tokens = routed(COUNTS[spread], dropped=2 if spread == "ragged" else 0, device=device)
    e, n, k = len(COUNTS[spread]), 72, 48
    x, w, bias = unit(tokens, k, device=device), weights(e, n, k, kn=kn, device=device), unit(e, n, device=device)
    for tile in tiles(device, R.PRODUCT_TILES):
        for b in (None, bias):
            got = R.row_product(x, w, rows, bias_EN=b, tile=tile)
            wanted = R.row_product_ref(*wide(x, w), on_cpu(rows), bias_EN=None if b is None else b.cpu())
            assert got.shape == (rows.slot.shape[0], n)
            if wanted.any():
                close(got, wanted)
            else:
                assert not got.any()


def test_product_of_rows_as_they_lie_and_of_codes(device):
    torch.manual_seed(0)
    rows, _, tokens = routed((19, 0, 34, 1), device=device)
    x, w = unit(tokens, 64), weights(4, 80, 64)
    (q_x, s_x), (q_w, s_w) = quantize_rows_ref(x * 8), quantize_experts(w)
    wanted = R.row_product_ref(q_x.double() * s_x[:, None], q_w.double() * s_w[..., None], on_cpu(rows))
    codes = [part.to(device) for part in (q_x, q_w, s_x, s_w)]
    for tile in tiles(device, R.FP8_TILES):
        close(R.row_product(*codes[:2], rows, scales=tuple(codes[2:]), tile=tile), wanted, 40)
    a, lying = unit(rows.slot.shape[0], 64, device=device), R.Rows(rows.ends)
    for tile in tiles(device, R.PRODUCT_TILES):
        close(
            R.row_product(a, w.to(device), lying, tile=tile),
            R.row_product_ref(*wide(a, w), R.Rows(rows.ends.cpu())),
        )


@pytest.mark.parametrize(("name", "kn"), [("swiglu", False), ("gpt_oss", True), ("plain", True), ("clamped", False)])
def test_first_product_and_its_activation(device, name, kn):
    torch.manual_seed(0)
    how = HOW[name]
    rows, _, tokens = routed((19, 0, 34, 1), dropped=2, device=device)
    f, d = 72, 48
    g = f * (1 + how.gated)
    x, w, bias = unit(tokens, d, device=device), weights(4, g, d, kn=kn, device=device), unit(4, g, device=device)
    for tile in tiles(device, R.UP_TILES):
        gate_up, hidden = R.up_product(x, w, rows, how, bias_EG=bias if kn else None, tile=tile)
        wanted = R.row_product_ref(*wide(x, w), on_cpu(rows), bias_EN=bias.cpu() if kn else None)
        close(gate_up, wanted)
        # h is that of the rounded rows.
        close(hidden, hidden_and_slopes_ref(gate_up.cpu(), how)[0], 48)


@pytest.mark.parametrize("name", ["swiglu", "gpt_oss"])
@pytest.mark.parametrize("k", [32, 48])
def test_nothing_is_stored_but_the_rows_of_groups(device, name, k, monkeypatch):
    torch.manual_seed(0)
    how, f, ends = HOW[name], 72, torch.tensor([19, 19, 53, 54, 54], dtype=torch.int32)
    rows, n = R.Rows(ends.to(device), torch.arange(64, dtype=torch.int32, device=device)), f * (1 + how.gated)
    x, w = unit(64, k, device=device), weights(5, n, k, device=device)
    made, empty = [], torch.empty

    def marked(*sizes, **how):
        """Rows with more behind them, all of them 7."""
        if not isinstance(sizes[0], tuple):
            return empty(*sizes, **how)
        made.append(torch.full((sizes[0][0] + 300, sizes[0][1]), 7.0, **how))
        return made[-1][: sizes[0][0]]

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", marked)
        for tile in tiles(device, R.PRODUCT_TILES):
            R.row_product(x, w, rows, tile=tile)
            R.row_product(x, w, R.Rows(rows.ends), tile=tile)
        for tile in tiles(device, R.UP_TILES):
            R.up_product(x, w, rows, how, tile=tile)
    wanted = R.row_product_ref(*wide(x[:54], w), R.Rows(ends))
    for got in made:
        assert (got[54:] == 7).all()
        close(got[:54], wanted if got.shape[1] == n else hidden_and_slopes_ref(wanted, how)[0], 40)


def test_tma_refuses_rows_of_broken_lines(device):
    rows, _, tokens = routed((3, 1), device=device)
    tile = R.PRODUCT_TILES[-1] if device == "cuda" else BY_TMA
    with pytest.raises(UnsupportedError, match="16-byte lines"):
        R.row_product(unit(tokens, 32, device=device), weights(2, 20, 32, device=device), rows, tile=tile)


# 136 and 200: numbers change threads between what is read and what is written (F % 16 == 8 above 128).
@pytest.mark.parametrize("f", [72, 136, 200])
@pytest.mark.parametrize("name", HOW)
def test_gradients_between_the_products(device, name, f):
    torch.manual_seed(0)
    how = HOW[name]
    rows, _, tokens = routed((19, 0, 34, 1), dropped=2, device=device)
    dh, gate_up = (unit(rows.slot.shape[0], columns, device=device) for columns in (f, f * (1 + how.gated)))
    weight = torch.rand(tokens * 2).to(device)
    weight_P = weights_of_rows(weight, rows.slot).cpu().double()
    inner = gate_up.cpu().double().requires_grad_()
    hidden = how.of_rows(inner) * weight_P[:, None]
    (d_inner,) = torch.autograd.grad(hidden, inner, dh.cpu().double())
    live = rows.slot.cpu() >= 0
    got = H.weighted_grads(dh.clone(), gate_up, weight, rows.slot, how)
    close(got.d_gate_up_PG, d_inner)
    close(got.hidden_PF, hidden)
    close(got.dw_P[live.to(device)], (dh.cpu().double() * how.of_rows(inner)).sum(1)[live], 90)


@pytest.mark.parametrize("name", HOW)
@pytest.mark.parametrize("f", [72, 136, 2880])
def test_hidden_rows_overwrite_dh_once_all_of_a_block_is_read(name, f):
    how = HOW[name]
    dh, gate_up = unit(16, f), unit(16, f * (1 + how.gated))
    with on_absent_gpu() as launched:
        got = H.weighted_grads(dh, gate_up, torch.rand(16), torch.arange(16).int(), how)
    assert got.hidden_PF.data_ptr() == dh.data_ptr()
    block = re.findall(r"tt\.(load|store) .*tensor<", launched[-1].made.asm["ttgir"])
    # dh, gate and up once each; their gradients (of both in one word where they alternate) and h.
    inputs = 3 if how.gated and not how.interleaved else 2
    assert block == ["load"] * inputs + ["store"] * inputs


def columns_of(rows, *sides):
    """Operands of `token_product` and what they stand for: FP8 rows, and in fp64 what their numbers are."""
    codes = [quantize_rows_ref(side.cpu()) for side in sides]
    numbers = [(q.double() * scale[:, None]) for q, scale in codes]
    given = [part.to(rows.ends.device) for side in codes for part in side]
    columns = group_columns(rows.ends, sides[0].shape[0])
    return (*wgrad_operands(*given, rows.ends, blocks=columns.blocks), columns.ends), numbers


@pytest.mark.parametrize("spread", COUNTS)
def test_gradients_of_weights(device, spread):
    torch.manual_seed(0)
    rows, _, _ = routed(COUNTS[spread], dropped=2 if spread == "ragged" else 0, device=device)
    live = (rows.slot >= 0)[:, None]
    left, right = (unit(len(live), n, device=device) * live for n in (48, 80))
    operands, numbers = columns_of(rows, left, right)
    for tile in W.WEIGHT_TILES if device == "cuda" else (SMALL_WEIGHT, HALVES):
        got = W.token_product(*operands, tile=tile)
        for e, part in groups(on_cpu(rows).ends):
            if COUNTS[spread][e]:
                close(got[e], numbers[0][part].T @ numbers[1][part], 50)
            else:
                assert not got[e].any()


@pytest.mark.parametrize("ends", [(19, 19, 53, 54), (0, 0, 40), (1, 2), (0, 0), (37, 80, 80)], ids=str)
def test_gradients_of_weights_in_bf16(device, ends):
    torch.manual_seed(0)
    left, right = (unit(ends[-1], n, device=device) for n in (272, 80))
    offs = torch.tensor(ends, dtype=torch.int32, device=device)
    for tile in W.ROW_TILES if device == "cuda" else (SMALL_ROWS, HALVES_OF_ROWS):
        got = W.wgrad_of_rows(left, right, offs, tile=tile)
        for e, part in groups(offs.cpu()):
            a, b = wide(left[part], right[part])
            close(got[e], a.T @ b, 50) if len(a) else None
            assert len(a) or not got[e].any()


def test_a_wide_weight_is_walked_in_blocks(device):
    torch.manual_seed(0)
    rows, _, _ = routed((19, 4, 7), device=device)
    width = W._GROUP_N * 32 + 48  # some tiles more than a block is high
    sides = (unit(rows.slot.shape[0], n, device=device) for n in (width, 96))
    operands, numbers = columns_of(rows, *sides)
    for tile in (SMALL_WEIGHT, HALVES):
        got = W.token_product(*operands, tile=tile)
        for e, part in groups(on_cpu(rows).ends):
            close(got[e], numbers[0][part].T @ numbers[1][part], 50)


def test_sums_over_many_rows_with_a_mean_are_those_of_fp32(device):
    # The tensor cores' own accumulator would lose what is small beside the sum.
    torch.manual_seed(0)
    count = 16384 if device == "cuda" else 512
    rows, _, _ = routed((2, count), device=device)
    sides = (unit(rows.slot.shape[0], n, device=device).abs() for n in (16, 32))
    operands, numbers = columns_of(rows, *sides)
    for tile in W.WEIGHT_TILES if device == "cuda" else (SMALL_WEIGHT,):
        part = slice(int(rows.ends[0]), None)
        close(W.token_product(*operands, tile=tile)[1], numbers[0][part].T @ numbers[1][part], 50)


def test_a_nan_stays_in_its_expert(device):
    torch.manual_seed(0)
    rows, _, tokens = routed((19, 4, 7), device=device)
    x, by_row = unit(tokens, 32, device=device), unit(rows.slot.shape[0], 32, device=device)
    by_row[: int(rows.ends[0])] = float("nan")
    tile = W.WEIGHT_TILES[0] if device == "cuda" else SMALL_WEIGHT
    operands, _ = columns_of(rows, by_row, rows.gathered(x))
    dw = W.token_product(*operands, tile=tile)
    assert dw[0].isnan().any() and dw[1:].isfinite().all()
    dw = W.wgrad_of_rows(by_row, rows.gathered(x), rows.ends, tile=W.ROW_TILES[0] if device == "cuda" else SMALL_ROWS)
    assert dw[0].isnan().any() and dw[1:].isfinite().all()
    assert (
        R.row_product(by_row, weights(3, 32, 32, device=device), R.Rows(rows.ends))[int(rows.ends[0]) :]
        .isfinite()
        .all()
    )


def test_wrong_arguments_are_named():
    rows, _, _ = routed((3, 1))
    with pytest.raises(ConfigError, match="K and E must agree"):
        R.row_product(unit(2, 8), weights(2, 8, 16), rows)
    with pytest.raises(ConfigError, match="dtypes and P must agree"):
        W.wgrad_of_rows(unit(2, 8), unit(3, 8), rows.ends)
    with pytest.raises(ConfigError, match="bias_EN"):
        R.row_product(unit(2, 16), weights(2, 8, 16), rows, bias_EN=unit(2, 9))


# ---- compiled for GPUs that are not here ----

# Bytes, at the most of all models: what is combined with a tile needs a few registers more than there are.
SPILLS = {"FP8 up 128x256x128-s4-w8-each": 16}
FORMS = {form.name: form for form in compiled.forms()}
# One of each kernel, weights stored both ways; the others take minutes.
KINDS = ("up qwen3", "up ragged", "dX ragged", "dW1 qwen3", "FP8 dW1 qwen3", "FP8 up qwen3")
FIRST = [next(name for name in FORMS if name.startswith(kind)) for kind in KINDS]


def names():
    rest = [name for name in FORMS if name not in FIRST]
    return [*FIRST, *(pytest.param(name, marks=pytest.mark.slow) for name in rest)]


@pytest.mark.parametrize("name", names())
def test_every_launch_fits_hopper(name):
    made = FORMS[name].compiled(90)  # raises where shared memory is short
    *kind, _, tile = name.split()
    assert made.spill_bytes <= SPILLS.get(f"{' '.join(kind)} {tile}", 0)
    if not name.startswith(("hidden", "table")):
        assert made.count(r"wgmma\.mma_async") >= 4 and not made.serializes_products
        # Gathered rows come by their addresses, some stages ahead; rows that lie and weights by TMA.
        assert not name.startswith(("up", "FP8 up")) or made.count(r"cp\.async\.c[ag]") >= 12
        assert made.count(r"cp\.async\.bulk\.tensor") >= 3


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
def test_every_launch_compiles_for_blackwell(name):
    made = FORMS[name].compiled(100)
    assert made.tmem_columns <= 512
    if not name.startswith(("hidden", "table")):
        assert made.count(r"tcgen05\.mma") >= 1
