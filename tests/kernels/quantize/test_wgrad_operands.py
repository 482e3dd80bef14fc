"""Operands of a wgrad: what tokens of very different loudness leave of a product, and codes bit for bit."""

import pytest
import torch

import aot
from deepwell.errors import ConfigError
from deepwell.formats.metrics import assert_bitwise_equal, sqnr_db
from deepwell.kernels.experts.group_rows import gather_rows_ref
from deepwell.kernels.gemm.fp8 import fp8_gemm_ref
from deepwell.kernels.quantize import wgrad_operands as W
from deepwell.kernels.quantize.fp8 import quantize_rows_ref
from deepwell.kernels.quantize.transpose import Gathered, transpose_by_ratio_ref, transpose_codes_ref


@pytest.fixture
def device(everywhere):
    """Interpreted, by the reference, and on a GPU where there is one."""
    return everywhere


def powers(low, high, count):
    return torch.exp2(torch.randint(low, high, (count,)).float())


@pytest.mark.parametrize("tokens", [1, 7, 4096, 10_000])
def test_the_kernel_gives_the_reference_bit_for_bit(device, tokens):
    a, b = powers(-40, 5, tokens), powers(-60, 3, tokens)
    made = W.balance_scales(a.to(device), b.to(device))
    for name, got, ref in zip(W.Balanced._fields, made, W.balance_scales_ref(a, b), strict=True):
        assert got.shape == ref.shape
        assert_bitwise_equal(got.cpu(), ref, name)


def test_groups_are_balanced_each_by_itself(device):
    ends = torch.tensor([16, 64, 2128], dtype=torch.int32)  # one longer than a block
    a, b = powers(-20, 5, 2128), powers(-20, 5, 2128)
    made = W.balance_scales(a.to(device), b.to(device), ends.to(device))
    for e, (i, j) in enumerate(zip([0, 16, 64], [16, 64, 2128], strict=True)):
        alone = W.balance_scales_ref(a[i:j], b[i:j])
        assert_bitwise_equal(made.ratio_a_T[i:j].cpu(), alone.ratio_a_T, f"ratio a of group {e}")
        assert_bitwise_equal(made.ratio_b_T[i:j].cpu(), alone.ratio_b_T, f"ratio b of group {e}")
        assert (made.scale_a[e].item(), made.scale_b[e].item()) == (alone.scale_a.item(), alone.scale_b.item())


def test_ratios_and_scales_give_back_the_products_of_the_scales(device):
    a, b = powers(-30, 5, 500).to(device), powers(-30, 5, 500).to(device)
    made = W.balance_scales(a, b)
    back = made.ratio_a_T.double() * made.ratio_b_T * made.scale_a.double() * made.scale_b
    assert torch.equal(back, a.double() * b)
    assert made.ratio_a_T.max() == made.ratio_b_T.max() == 1
    # Neither operand bears more than one octave more than the other.
    assert ((made.ratio_a_T / made.ratio_b_T).log2().abs() <= 1).all()


def test_a_loud_first_token_does_not_silence_the_others(device):
    # As attention's gradients of v: token t has about 1 / t of the first one's, and all of them count together.
    tokens = 2048
    dy = torch.randn(tokens, 32) * torch.exp2(-torch.linspace(0, 20, tokens))[:, None]
    x = torch.randn(tokens, 48)
    faint = slice(tokens // 2, None)  # 2^-10 and less
    dy[:4] *= 64
    rows = [t.to(device) for t in (*quantize_rows_ref(dy), *quantize_rows_ref(x))]
    a, scale_a, b, scale_b = (t.cpu() for t in W.wgrad_operands(*rows))
    kept = fp8_gemm_ref(a[:, faint], scale_a, b[:, faint], scale_b, out_dtype=torch.float32)
    exact = dy[faint].T @ x[faint]
    assert sqnr_db(exact, kept) > 20
    # Each operand under its own largest scale, as this was done before, loses them: the test could fail.
    q_dy, s_dy, q_x, s_x = (t.cpu() for t in rows)
    own = fp8_gemm_ref(
        *(transpose_codes_ref(q_dy, s_dy, s_dy.amax())[:, faint], s_dy.amax()),
        *(transpose_codes_ref(q_x, s_x, s_x.amax())[:, faint], s_x.amax()),
        out_dtype=torch.float32,
    )
    assert sqnr_db(exact, own) < 15


def test_a_token_loud_in_one_operand_and_faint_in_the_other_is_not_shifted(device):
    a, b = torch.tensor([1.0, 2.0**-12, 4.0]), torch.tensor([1.0, 2.0**12, 0.25])
    made = W.balance_scales(a.to(device), b.to(device))
    assert made.ratio_a_T.tolist() == made.ratio_b_T.tolist() == [1.0, 1.0, 1.0]


def test_operands_are_the_codes_times_their_ratios_transposed(device):
    rows = [t.to(device) for t in (*quantize_rows_ref(torch.randn(64, 48)), *quantize_rows_ref(torch.randn(64, 80)))]
    ends = torch.tensor([16, 64], dtype=torch.int32, device=device)
    for groups in (None, ends):
        a, scale_a, b, scale_b = W.wgrad_operands(*rows, groups)
        balanced = W.balance_scales(rows[1], rows[3], groups)
        assert_bitwise_equal(a, transpose_by_ratio_ref(rows[0], balanced.ratio_a_T), "a")
        assert_bitwise_equal(b, transpose_by_ratio_ref(rows[2], balanced.ratio_b_T), "b")
        assert scale_a.shape == scale_b.shape == (() if groups is None else (2,))


@pytest.mark.parametrize("is_other", [False, True])
def test_of_gathered_rows_they_are_those_of_a_gathered_copy(device, is_other):
    torch.manual_seed(0)
    slot = torch.tensor([3, 1, 0, -1, 7, 6, 2, -1, 4, 5, 8, 9, -1, -1, 10, 11], dtype=torch.int32, device=device)
    ends = torch.tensor([4, 4, 16], dtype=torch.int32, device=device)
    by_token, by_row = ((torch.randn(rows, n) * 4).to(device) for rows, n in ((6, 32), (16, 20)))
    token, row = (quantize_rows_ref(x.bfloat16()) for x in (by_token, by_row))
    copy = gather_rows_ref(*token, slot, 2)
    given, wanted = ((*row, *token), (*row, *copy)) if is_other else ((*token, *row), (*copy, *row))
    made = W.wgrad_operands(*given, ends, Gathered(slot, 2, is_other))
    for got, ref in zip(made, W.wgrad_operands(*wanted, ends), strict=True):
        assert_bitwise_equal(got.view(torch.uint8), ref.view(torch.uint8))


def test_a_nan_scale_of_either_side_makes_its_own_group_nan_and_no_other(device):
    ends = torch.tensor([16, 32], dtype=torch.int32, device=device)
    for side in (0, 1):
        scales = [torch.ones(32, device=device), torch.ones(32, device=device)]
        scales[side][3] = float("nan")
        made = W.balance_scales(*scales, ends)
        for scale, ratio in ((made.scale_a, made.ratio_a_T), (made.scale_b, made.ratio_b_T)):
            assert scale.isnan().tolist() == [True, False]
            assert ratio.isnan().tolist() == [True] * 16 + [False] * 16


def test_rows_of_zeros_shift_nobody_and_nothing_but_zeros_is_zero(device):
    x, dy = torch.randn(32, 16) * 1e-6, torch.randn(32, 16)
    x[::3] = 0
    rows = [t.to(device) for t in (*quantize_rows_ref(dy), *quantize_rows_ref(x))]
    got = fp8_gemm_ref(*(t.cpu() for t in W.wgrad_operands(*rows)), out_dtype=torch.float32)
    assert sqnr_db(dy.T @ x, got) > 25
    zeros = [t.to(device) for t in quantize_rows_ref(torch.zeros(32, 16))]
    got = fp8_gemm_ref(*(t.cpu() for t in W.wgrad_operands(*rows[:2], *zeros)), out_dtype=torch.float32)
    assert not got.any()


def test_no_tokens_give_empty_operands(device):
    rows = [t.to(device) for t in (*quantize_rows_ref(torch.empty(0, 16)), *quantize_rows_ref(torch.empty(0, 32)))]
    a, scale_a, b, scale_b = W.wgrad_operands(*rows)
    assert (a.shape, b.shape) == ((16, 0), (32, 0))
    assert scale_a.isfinite() and scale_b.isfinite()


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (lambda s: W.balance_scales(s.double(), s), "scale_a_T has dtype"),
        (lambda s: W.balance_scales(s, s[:2]), "scale_b_T must have shape"),
        (lambda s: W.balance_scales(s, s, torch.tensor([4])), "ends_E must be a vector of int32"),
    ],
)
def test_wrong_arguments_are_named(call, names):
    with pytest.raises(ConfigError, match=names):
        call(torch.ones(4))


@pytest.mark.parametrize("arch", aot.ARCHS)
@pytest.mark.parametrize("grouped", [False, True])
def test_the_kernel_compiles_without_spills_and_reads_vectors(arch, grouped):
    arguments = {
        **dict.fromkeys(("a_ptr", "b_ptr", "ratio_a_ptr", "ratio_b_ptr", "scale_a_ptr", "scale_b_ptr"), torch.float32),
        "ends_ptr": torch.int32 if grouped else None,
        "slot_a_ptr": torch.int32 if grouped else None,
        "slot_b_ptr": None,
        "T": "i32",
        "TOP_K": 8,
        "ZERO_SCALE": W._ZERO_SCALE,
        "BLOCK": W._GROUP_BLOCK if grouped else W._BLOCK,
        "SLICE": W._SLICE,
    }
    num_warps = W._GROUP_WARPS if grouped else W._WARPS
    made = aot.compile_kernel(W._balance_kernel, arguments, arch=arch, num_warps=num_warps)
    assert made.spill_bytes == made.stack_bytes == 0
    if not grouped:  # groups begin anywhere
        assert made.count(r"ld\.global\S*\.v4\.b32") >= 4
