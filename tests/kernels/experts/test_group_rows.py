"""Rows by expert: the padded layout, gathered codes, sums of choices, scales of groups; bit for bit the references."""

import pytest
import torch

import aot
from deepwell.errors import ConfigError, UnsupportedError
from deepwell.formats.metrics import assert_bitwise_equal, assert_no_worse_than
from deepwell.kernels.experts import group_rows as G
from deepwell.kernels.quantize.fp8 import quantize_rows_ref


@pytest.fixture
def device(everywhere):
    """Interpreted, by the reference, and on a GPU where there is one."""
    return everywhere


def routed(tokens, top_k, experts, device, empty=()):
    """(order, offs) of random choices; nobody chooses the experts of `empty`."""
    allowed = [e for e in range(experts) if e not in empty]
    ids = torch.tensor(allowed)[torch.randint(len(allowed), (tokens * top_k,))]
    offs = torch.cumsum(torch.bincount(ids, minlength=experts), 0).int()
    return torch.sort(ids, stable=True).indices.to(device), offs.to(device)


def codes(rows, columns):
    return quantize_rows_ref(torch.randn(rows, columns))


# One expert, an expert without rows, more experts than rows, no tokens, more rows than one program lays out.
CASES = [(5, 2, 1, ()), (37, 2, 4, (2,)), (3, 1, 9, (0, 8)), (0, 2, 4, ()), (150, 3, 6, ())]


@pytest.mark.parametrize(("tokens", "top_k", "experts", "empty"), CASES)
def test_the_layout_is_the_references(device, tokens, top_k, experts, empty):
    order, offs = routed(tokens, top_k, experts, device, empty)
    made = G.group_layout(offs, order, tokens * top_k)
    for name, got, ref in zip(G.RowGroups._fields, made, G.group_layout_ref(offs, order, tokens * top_k), strict=True):
        assert_bitwise_equal(got, ref.to(device), name)


# Choices past one block, past one block of blocks, of one expert, of no expert, of more experts than one sum takes.
@pytest.mark.parametrize(("choices", "experts"), [(0, 3), (7, 1), (1100, 5), (70, 40), (2600, 128), (90, 1000)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_choices_are_laid_out_as_if_they_were_sorted(device, choices, experts, dtype):
    torch.manual_seed(choices)
    index = torch.randint(-1, experts + 2, (choices,), dtype=dtype)  # some of them name no expert
    index[: choices // 4] = min(2, experts - 1)
    made = G.choice_layout(index.to(device), experts)
    for name, got, ref in zip(made._fields, made, G.choice_layout_ref(index, experts), strict=True):
        assert_bitwise_equal(got, ref.to(device), name)


def test_a_choice_layout_names_what_it_cannot_take():
    with pytest.raises(ConfigError, match="index_S must be a vector of integers"):
        G.choice_layout(torch.zeros(3), 2)
    with pytest.raises(ConfigError, match="experts is 0"):
        G.choice_layout(torch.zeros(3, dtype=torch.int32), 0)


@pytest.mark.parametrize(("tokens", "top_k", "experts", "empty"), CASES)
def test_columns_hold_each_group_in_whole_blocks(device, tokens, top_k, experts, empty):
    order, offs = routed(tokens, top_k, experts, device, empty)
    ends, slot, _ = G.group_layout(offs, order, tokens * top_k)
    made = G.group_columns(ends, slot.shape[0])
    for name, got, ref in zip(made._fields, made, G.group_columns_ref(ends, slot.shape[0]), strict=True):
        assert_bitwise_equal(got, ref.to(device), name)
    # Said without the reference: every row in one column, those of a group in order and within its own ends.
    rows = (made.blocks.cpu()[:, None] * 16 + torch.arange(16)).flatten()
    begin = row = 0
    for end, row_end in zip(made.ends.tolist(), ends.tolist(), strict=True):
        assert begin < end <= rows.shape[0] and end % G.COLUMN_ALIGNMENT == 0
        live = rows[begin:end][rows[begin:end] >= 0]
        assert live.tolist() == list(range(row, row_end))
        begin, row = end, row_end
    assert (rows[begin:] < 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("tokens", "top_k", "width"), [(5, 2, 24), (40, 3, 2100), (7, 1, 8), (0, 2, 24)])
def test_rows_are_copied_as_they_are(device, dtype, tokens, top_k, width):
    wide = torch.randn(tokens, width + 8).to(dtype).to(device)
    x = wide[:, :width]  # rows that do not touch
    index = torch.randint(-1, 6, (tokens * top_k,), device=device)  # some choices name no expert
    _, slot, place = G.choice_layout(index, 5)
    got = G.copy_rows(x, slot, place, top_k)
    assert_bitwise_equal(got, G.copy_rows_ref(x.cpu(), slot.cpu(), top_k).to(device))
    assert not got[slot < 0].any()


def test_places_of_other_tokens_are_an_error():
    _, slot, place = G.choice_layout(torch.zeros(8, dtype=torch.int64), 2)
    with pytest.raises(ConfigError, match="place_S has 8 choices of 3 tokens"):
        G.copy_rows(torch.randn(3, 16), slot, place, 2)


@pytest.mark.parametrize(("tokens", "top_k", "experts", "empty"), CASES)
def test_every_choice_has_one_row_in_a_group_of_whole_lines(device, tokens, top_k, experts, empty):
    # What the products rely on, said without the reference: no group without rows, all rows in a group.
    order, offs = routed(tokens, top_k, experts, device, empty)
    ends, slot, place = (part.cpu() for part in G.group_layout(offs, order, tokens * top_k))
    sizes = torch.diff(ends, prepend=ends.new_zeros(1))
    assert (sizes >= 16).all()
    assert (sizes % 16 == 0).all()
    assert ends[-1] == slot.shape[0] == G.padded_rows(tokens * top_k, experts)
    assert sorted(slot[slot >= 0].tolist()) == list(range(tokens * top_k))
    assert torch.equal(slot[place.long()], torch.arange(tokens * top_k, dtype=torch.int32))
    group = torch.searchsorted(ends, place, right=True)
    expert = torch.searchsorted(offs.cpu(), torch.arange(tokens * top_k, dtype=torch.int32), right=True)
    assert torch.equal(group[order.cpu()], expert)


def test_choices_past_the_last_group_go_nowhere(device):
    # Tokens of other ranks' experts are sorted behind the last group.
    offs = torch.tensor([3, 5], dtype=torch.int32, device=device)
    order = torch.tensor([6, 0, 2, 4, 1, 3, 5], device=device)
    made = G.group_layout(offs, order, 7)
    assert made.place.tolist() == [1, 17, 2, -1, 16, -1, 0]
    x = torch.randn(48, 8, device=device)
    assert not G.combine_rows(x, made.place, 1)[[3, 5]].any()


def test_without_an_order_rows_are_taken_as_they_lie(device):
    offs = torch.tensor([2, 2, 5], dtype=torch.int32, device=device)
    made = G.group_layout(offs, None, 5)
    assert made.place.tolist() == [0, 1, 32, 33, 34]


@pytest.mark.parametrize("config", G.GATHER_CONFIGS, ids=str)
@pytest.mark.parametrize("columns", [16, 72, 2064])
def test_gathered_codes_are_the_references_for_every_config(device, config, columns):
    # Narrower than a block, ragged, and wider than a block.
    order, offs = routed(21, 2, 3, device, (1,))
    slot = G.group_layout(offs, order, 42).slot
    q, scale = quantize_rows_ref(torch.randn(21, columns, device=device))
    made = G.gather_rows(q, scale, slot, 2, config=config)
    for name, got, ref in zip(("codes", "scales"), made, G.gather_rows_ref(q, scale, slot, 2), strict=True):
        assert_bitwise_equal(got, ref, name)


def test_rows_without_a_choice_are_zeros_that_never_lead_a_group(device):
    order, offs = routed(5, 1, 2, device)
    slot = G.group_layout(offs, order, 5).slot
    q, scale = G.gather_rows(*quantize_rows_ref(torch.full((5, 16), 1e-30, device=device)), slot, 1)
    assert not q.view(torch.uint8)[slot < 0].any()
    assert scale[slot < 0].max() < scale[slot >= 0].min()


@pytest.mark.parametrize("config", G.COMBINE_CONFIGS, ids=str)
@pytest.mark.parametrize("top_k", [1, 3, 8])
def test_sums_of_choices_are_the_references_for_every_config(device, config, top_k):
    order, offs = routed(13, top_k, 5, device)
    place = G.group_layout(offs, order, 13 * top_k).place
    x = torch.randn(G.padded_rows(13 * top_k, 5), 200, device=device).bfloat16()
    # Weights that are powers of two: products are exact, whether or not they are fused with the sum.
    weight = torch.exp2(torch.randint(-3, 1, (13 * top_k,), device=device).float())
    for w in (None, weight):
        got = G.combine_rows(x, place, top_k, w, config=config)
        assert_bitwise_equal(got, G.combine_rows_ref(x, place, top_k, w), "sums")


def test_sums_are_no_worse_than_torchs_and_keep_nan_where_it_is(device):
    order, offs = routed(32, 4, 4, device)
    place = G.group_layout(offs, order, 128).place
    x = torch.randn(G.padded_rows(128, 4), 64, device=device).bfloat16()
    got, rows = G.combine_rows(x, place, 4), x[place.long()].view(32, 4, 64)
    assert_no_worse_than(got, rows.sum(1), rows.float().sum(1))
    x[place[5]] = float("nan")  # choice 1 of token 1
    assert G.combine_rows(x, place, 4).isnan().any(1).nonzero().flatten().tolist() == [1]


@pytest.mark.parametrize(
    ("call", "error", "names"),
    [
        (lambda: G.group_layout(torch.zeros(2), None, 4), ConfigError, "offs_E must be a vector of int32"),
        (lambda: G.group_layout(torch.zeros(1025, dtype=torch.int32), None, 4), UnsupportedError, "1025 experts"),
        (
            lambda: G.group_layout(torch.zeros(2, dtype=torch.int32), torch.arange(3), 4),
            ConfigError,
            "order_S must have shape",
        ),
        (lambda: G.gather_rows(*codes(4, 8), torch.zeros(4), 1), ConfigError, "slot_P must be"),
        (lambda: G.gather_rows(*codes(4, 8), torch.zeros(4, dtype=torch.int32), 0), ConfigError, "top_k is 0"),
        (lambda: G.combine_rows(torch.randn(4, 8), torch.zeros(5, dtype=torch.int32), 2), ConfigError, "must divide"),
    ],
)
def test_wrong_arguments_are_named(call, error, names):
    with pytest.raises(error, match=names):
        call()


# ---- compiled for GPUs that are not here ----


@pytest.mark.parametrize("arch", aot.ARCHS)
def test_gathered_codes_move_as_lines_of_sixteen_bytes(arch):
    config = G.default_gather_config(2048)
    arguments = {
        **dict.fromkeys(("x_ptr", "q_ptr"), torch.uint8),
        **dict.fromkeys(("scale_t_ptr", "scale_ptr"), torch.float32),
        "slot_ptr": torch.int32,
        **dict.fromkeys(("P", "K", "stride_xt"), "i32"),
        "top_k": "i32:any",
        "ZERO_SCALE": G._ZERO_SCALE,
        "ROWS": config.rows,
        "BLOCK": 2048,
    }
    made = aot.compile_kernel(G._gather_kernel, arguments, arch=arch, num_warps=config.num_warps)
    assert made.spill_bytes == made.stack_bytes == 0
    assert made.count(r"ld\.global[\w.]*\.v4\.b32") >= 1
    assert made.count(r"st\.global[\w.]*\.v4\.b32") >= 1


@pytest.mark.parametrize("arch", aot.ARCHS)
@pytest.mark.parametrize("top_k", [2, 8])
def test_sums_read_and_write_lines_of_sixteen_bytes(arch, top_k):
    config = G.COMBINE_CONFIGS[0]
    arguments = {
        **dict.fromkeys(("x_ptr", "y_ptr"), torch.bfloat16),
        "place_ptr": torch.int32,
        **dict.fromkeys(("T", "D", "stride_xp"), "i32"),
        "TOP_K": top_k,
        "weight_ptr": torch.bfloat16 if arch == 90 else None,
        "ROWS": config.rows,
        "BLOCK": config.columns,
    }
    made = aot.compile_kernel(G._combine_kernel, arguments, arch=arch, num_warps=config.num_warps)
    assert made.spill_bytes == made.stack_bytes == 0
    assert made.count(r"ld\.global[\w.]*\.v4\.b32") >= top_k
    assert made.count(r"st\.global[\w.]*\.v4\.b32") >= 1


@pytest.mark.parametrize("arch", aot.ARCHS)
def test_layout_and_scales_compile_and_spill_nothing(arch):
    layout = {
        **dict.fromkeys(("offs_ptr", "ends_ptr", "slot_ptr", "place_ptr"), torch.int32),
        "order_ptr": torch.int64,
        **dict.fromkeys(("P", "E"), "i32"),
        "ALIGNMENT": 16,
        "BLOCK_E": 128,
        "BLOCK_P": G._LAYOUT_BLOCK,
    }
    assert aot.compile_kernel(G._layout_kernel, layout, arch=arch).spill_bytes == 0
