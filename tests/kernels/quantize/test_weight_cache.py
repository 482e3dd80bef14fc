"""Kept FP8 weights: the codes of the quantizer bit for bit, recomputed exactly where a weight changed."""

import pytest
import torch

import aot
from deepwell.errors import ConfigError
from deepwell.formats.metrics import assert_bitwise_equal
from deepwell.kernels.quantize import fp8 as Q
from deepwell.kernels.quantize import weight_cache as W
from deepwell.kernels.quantize.weight_cache_launches import Codes, CodesRefresh, _is_aligned

SMALL = W.CodesConfig(rows=32, columns=32, tiles=2, block=128)
# (K, widths, stored as [K, N]): one weight, a merged group, one stored the other way; ragged and one-row ones.
GROUPS = [
    (64, (48,), (False,)),
    (32, (32, 16, 16), (False, False, False)),
    (48, (80,), (True,)),
    (64, (16, 32), (True, False)),
    (20, (36, 7), (False, False)),
    (33, (1,), (True,)),
]


@pytest.fixture
def device(everywhere):
    """Interpreted, by the reference, and on a GPU where there is one."""
    return everywhere


def make_weights(groups, dtype, device):
    def shape(k, n, is_kn):
        return (k, n) if is_kn else (n, k)

    return [
        [(torch.randn(shape(k, n, kn)) * 0.02 * 3**i).to(dtype).to(device) for n, kn in zip(widths, is_kn, strict=True)]
        for i, (k, widths, is_kn) in enumerate(groups)
    ]


def make_codes(groups, device):
    return [Codes.empty(k, widths, is_kn, torch.device(device)) for k, widths, is_kn in groups]


def expected(weights, is_kn):
    """(rows, columns, scale) of a group by the quantizer of single weights, given the group's amax."""
    as_nk = [w.T if kn else w for w, kn in zip(weights, is_kn, strict=True)]
    whole = torch.cat(as_nk).contiguous().cpu()
    return Q.quantize_both_ref(whole, Q.amax_ref([whole]), dtype=torch.float8_e4m3fn)


def assert_codes_of(codes, weights):
    rows, columns, scale = expected(weights, codes.is_kn)
    assert_bitwise_equal(codes.rows.cpu(), rows)
    assert_bitwise_equal(codes.columns.cpu(), columns)
    # A GPU's NaN has other bits than a CPU's.
    assert_bitwise_equal(codes.scale.cpu().nan_to_num(nan=-1.0), scale.nan_to_num(nan=-1.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("packing", ["asm", "bytes"])
def test_codes_are_the_quantizers_bit_for_bit(device, dtype, packing):
    weights, codes = make_weights(GROUPS, dtype, device), make_codes(GROUPS, device)
    config = W.CodesConfig(rows=32, columns=32, tiles=2, block=128, packing=packing)
    CodesRefresh(codes, config=config).refresh(weights)
    for group, made in zip(weights, codes, strict=True):
        assert_codes_of(made, group)
        assert made.times_quantized == 1


def test_a_group_is_quantized_again_only_when_it_changed(device):
    weights, codes = make_weights(GROUPS, torch.bfloat16, device), make_codes(GROUPS, device)
    refresh = CodesRefresh(codes, config=SMALL)
    for _ in range(3):
        refresh.refresh(weights)
    assert [c.times_quantized for c in codes] == [1] * len(codes)
    weights[1][2][5, 3] += 1  # one number of the third weight of a group
    refresh.refresh(weights)
    assert [c.times_quantized for c in codes] == [1, 2, 1, 1, 1, 1]
    assert_codes_of(codes[1], weights[1])


@pytest.mark.parametrize("shape", [(32, 64), (7, 9)], ids=["words", "elements"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_single_bit_of_every_number_counts(device, shape, dtype):
    # A bijection of words: no single edit is ever missed. Positions at the corners, all bits of a number.
    (n, k), integer = shape, W.INTEGERS[dtype]
    weights = [[torch.randn(n, k).to(dtype).to(device)]]
    codes = [Codes.empty(k, (n,), (False,), torch.device(device))]
    refresh = CodesRefresh(codes, config=SMALL)
    refresh.refresh(weights)
    flat, times = weights[0][0].view(integer).view(-1), 1
    for place in (0, 1, n * k // 2, n * k - 1):
        for bit in (0, 7, 8 * weights[0][0].element_size() - 1):
            flat[place] ^= 1 << bit if bit < 8 * flat.element_size() - 1 else torch.iinfo(integer).min
            refresh.refresh(weights)
            times += 1
            assert codes[0].times_quantized == times


def test_swapped_numbers_rows_and_weights_are_seen(device):
    # Sums of the same words in other places: the position must count.
    codes = [Codes.empty(32, (16, 16), (False, False), torch.device(device))]
    group = make_weights([(32, (16, 16), (False, False))], torch.bfloat16, device)[0]
    refresh = CodesRefresh(codes, config=SMALL)
    refresh.refresh([group])
    swaps = [
        lambda: group[0].copy_(group[0].flip(0)),
        lambda: group[0].copy_(torch.cat([group[0][:, 4:], group[0][:, :4]], dim=1)),
        group.reverse,
    ]
    for times, swap in enumerate(swaps, start=2):
        swap()
        refresh.refresh([group])
        assert codes[0].times_quantized == times
        assert_codes_of(codes[0], group)


def test_the_same_content_elsewhere_needs_no_new_codes(device):
    weights, codes = make_weights(GROUPS[:2], torch.bfloat16, device), make_codes(GROUPS[:2], device)
    refresh = CodesRefresh(codes, config=SMALL)
    refresh.refresh(weights)
    copied = [[w.clone() for w in group] for group in weights]
    refresh.refresh(copied)
    assert [c.times_quantized for c in codes] == [1, 1]
    copied[0][0].mul_(-3)  # the memory that is looked at is the new one
    refresh.refresh(copied)
    assert [c.times_quantized for c in codes] == [2, 1]
    assert_codes_of(codes[0], copied[0])


def test_memory_that_is_not_aligned_or_not_dense_is_read_as_well(device):
    # A weight that moves from aligned memory to odd memory changes its launch, not its codes.
    codes = [Codes.empty(32, (16,), (False,), torch.device(device))]
    w = torch.randn(16, 32).bfloat16().to(device)
    refresh = CodesRefresh(codes, config=SMALL)
    refresh.refresh([[w]])
    odd = torch.zeros(16 * 32 + 1, dtype=torch.bfloat16, device=device)[1:].view(16, 32).copy_(w)
    wide = torch.zeros(16, 48, dtype=torch.bfloat16, device=device)[:, 8:40].copy_(w)
    for moved in (odd, wide):
        assert not _is_aligned(codes[0], [moved])
        refresh.refresh([[moved.mul_(-2)]])
        assert_codes_of(codes[0], [moved])


def test_two_graphs_share_the_codes_of_a_group(device):
    weights, codes = make_weights(GROUPS[:3], torch.bfloat16, device), make_codes(GROUPS[:3], device)
    training, evaluation = CodesRefresh(codes, config=SMALL), CodesRefresh(codes[1:], config=SMALL)
    training.refresh(weights)
    evaluation.refresh(weights[1:])
    assert [c.times_quantized for c in codes] == [1, 1, 1]
    weights[1][0].zero_()
    evaluation.refresh(weights[1:])
    training.refresh(weights)
    assert [c.times_quantized for c in codes] == [1, 2, 1]
    assert_codes_of(codes[1], weights[1])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_nan_inf_and_zero_weights_follow_the_quantizer(device, value):
    w = torch.randn(16, 32).bfloat16().to(device)
    w[3, 5] = value
    if value == 0.0:
        w.zero_()
    codes = [Codes.empty(32, (16,), (False,), torch.device(device))]
    refresh = CodesRefresh(codes, config=SMALL)
    refresh.refresh([[w]])
    assert_codes_of(codes[0], [w])
    assert bool(codes[0].scale.isnan()) == (value != 0.0)
    refresh.refresh([[w]])
    assert codes[0].times_quantized == 1  # a NaN equals itself here: its bits are the same


@pytest.mark.parametrize("is_aligned", [True, False], ids=["words", "elements"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_kernels_fingerprint_is_the_references(device, dtype, is_aligned):
    n = 96 if is_aligned else 95
    weights = [torch.randn(n, 64).to(dtype).to(device), torch.randn(16, 64).to(dtype).to(device)]
    codes = Codes.empty(64, (n, 16), (False, False), torch.device(device))
    assert _is_aligned(codes, weights) == is_aligned
    CodesRefresh([codes], config=SMALL).refresh([weights])
    wanted = W.fingerprint_ref([w.cpu() for w in weights], is_aligned=is_aligned)
    assert int(codes.state[0]) == int(wanted)


def test_many_slots_and_tiles_add_up(device, monkeypatch):
    # Several programs for each weight, some of them with nothing to do.
    from deepwell.kernels.quantize import weight_cache_launches as weight_code_tables

    monkeypatch.setattr(weight_code_tables, "_SLOT_ELEMENTS", 256)
    groups = [(96, (80, 16), (False, False)), (64, (128,), (True,))]
    weights, codes = make_weights(groups, torch.bfloat16, device), make_codes(groups, device)
    refresh = CodesRefresh(codes, config=SMALL)
    for scale in (1.0, -3.0):
        weights[1][0].mul_(scale)
        refresh.refresh(weights)
        for made, group in zip(codes, weights, strict=True):
            assert_codes_of(made, group)
    assert [c.times_quantized for c in codes] == [1, 2]
    assert all(int(c.state[2]) == 0 for c in codes)  # ready for the next call


def test_codes_made_in_inference_mode_can_be_saved_for_a_backward():
    with torch.inference_mode():
        codes = Codes.empty(16, (16,), (False,), torch.device("cpu"))
        CodesRefresh([codes]).refresh([[torch.randn(16, 16)]])
    assert not any(t.is_inference() for t in (codes.rows, codes.columns, codes.scale))


def test_wrong_arguments_are_named():
    codes = Codes.empty(16, (16,), (False,), torch.device("cpu"))
    with pytest.raises(ConfigError, match="codes is empty"):
        CodesRefresh([])
    with pytest.raises(ConfigError, match=r"weights\[0\] is \(16, 8\) on cpu; its FP8 values are \(16, 16\)"):
        CodesRefresh([codes]).refresh([[torch.zeros(16, 8)]])
    with pytest.raises(ConfigError, match=r"weights\[0\] has dtype torch.float64"):
        CodesRefresh([codes]).refresh([[torch.zeros(16, 16).double()]])


# ---- compiled for GPUs that are not here ----

TABLES = {"weights_ptr": torch.int64, "groups_ptr": torch.int64, "hash_ptr": torch.int64, "amax_ptr": torch.int32}


@pytest.mark.parametrize("arch", aot.ARCHS)
@pytest.mark.parametrize("dtype", [W.tl.bfloat16, W.tl.float32], ids=str)
def test_the_fingerprint_reads_lines_of_sixteen_bytes_and_spills_nothing(arch, dtype):
    config = W.CODES_CONFIGS[0]
    arguments = {**TABLES, "slot_group_ptr": torch.int32, "DTYPE": dtype, "ALIGNED": True, "BLOCK": config.block}
    made = aot.compile_kernel(W._fingerprint_kernel, arguments, arch=arch, num_warps=config.hash_warps)
    assert made.count(r"ld\.global\.v2\.b64") >= config.block // (config.hash_warps * 32) // 2
    assert made.spill_bytes == 0 and made.stack_bytes == 0
    assert made.registers <= 64


@pytest.mark.parametrize("arch", aot.ARCHS)
@pytest.mark.parametrize("config", W.CODES_CONFIGS[:6], ids=str)
def test_the_refresh_moves_wide_words_divides_exactly_and_spills_nothing(arch, config):
    arguments = {
        **TABLES,
        "tile_weight_ptr": torch.int32,
        "tile_place_ptr": torch.int32,
        "DTYPE": W.tl.bfloat16,
        "ALIGNED": True,
        "PACKING": "asm",
        "ROWS": config.rows,
        "COLUMNS": config.columns,
        "TILES": config.tiles,
        "SLOTS": W.MAX_SLOTS,
    }
    made = aot.compile_kernel(W._refresh_kernel, arguments, arch=arch, num_warps=config.num_warps)
    assert made.spill_bytes == 0 and made.stack_bytes == 0
    assert made.count(r"ld\.global\.v4\.b32") >= 4  # four rows of bf16
    assert (
        made.count(r"st\.global\.v2\.b32|st\.global\.v4\.b32|st\.global\.b64") >= 4
    )  # codes as they lie, and transposed
    assert made.count(r"div\.rn\.f32") >= 2 and made.count(r"div\.(full|approx)") == 0
    assert made.count(r"cvt\.rn\.satfinite\.e4m3x2\.f32") > 0
    assert made.shared_bytes <= aot.MAX_SHARED_BYTES // 2
