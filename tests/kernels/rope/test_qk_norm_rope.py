"""Norm and rotation of q and k in one pass: no worse than torch at the same dtype, FP8 rows bit-equal to quantizing."""

import re

import pytest
import torch

import aot
from deepwell.errors import ConfigError, UnsupportedError
from deepwell.formats.metrics import assert_bitwise_equal, assert_no_worse_than
from deepwell.formats.quantize import quantize
from deepwell.kernels.quantize.fp8 import RowOptions as GradOptions
from deepwell.kernels.rope import qk_norm_rope as Q
from deepwell.kernels.rope.rope import CONVENTIONS, Heads

E4M3 = torch.float8_e4m3fn
# (q heads, k heads, v heads, head width): grouped queries, heads and widths that are no power of two.
SHAPES = [(4, 2, 2, 32), (3, 1, 1, 48), (5, 5, 5, 16)]


@pytest.fixture
def device(everywhere):
    """Interpreted, by the reference, and on a GPU where there is one."""
    return everywhere


def make(
    shape, device, *, b=2, s=5, convention="half", weights_of=torch.bfloat16, tables_of=torch.float32, is_whole=False
):
    hq, hk, hv, d = shape
    heads = Heads(q=hq, k=hk, v=hv, convention=convention)
    qkv = (torch.randn(b, s, heads.total * d) * torch.exp2(torch.randn(b, s, 1))).bfloat16().to(device)
    grads = tuple(torch.randn(b, s, h, d).bfloat16().to(device) for h in (hq, hk, hv))
    widths = (hq * d, hk * d) if is_whole else (d, d)
    weights = tuple((1 + 0.3 * torch.randn(width)).to(weights_of).to(device) for width in widths)
    angle = torch.outer(torch.arange(s).float(), 100.0 ** -(torch.arange(0, d, 2).float() / d))
    angle = angle.repeat(1, 2) if convention == "half" else angle.repeat_interleave(2, dim=1)
    return heads, qkv, grads, weights, (angle.cos().to(tables_of).to(device), angle.sin().to(tables_of).to(device))


def as_models_write_it(qkv, weights, tables, heads, width, rounding, dtype):
    """(q, k, v) and a function from their gradients to those of the rows and both weights, by torch in that dtype."""
    leaves = [t.detach().to(dtype, copy=True).requires_grad_() for t in (qkv, *weights)]
    q, k, v = heads.parts(leaves[0], width)
    cos, sin = (table.to(dtype).unsqueeze(-2) for table in tables)
    high = torch.promote_types(dtype, torch.float32)

    def one(x, w):
        heads_alone, x = x.shape, x if len(w) == width else x.flatten(2)
        n = x.to(high) * torch.rsqrt(x.to(high).square().mean(-1, keepdim=True) + 1e-6)
        u = (w * n.to(dtype) if rounding == "llama" else (w.to(high) * n).to(dtype)).view(heads_alone)
        if heads.convention == "half":
            a, b = u.chunk(2, dim=-1)
            rotated = torch.cat((-b, a), dim=-1)
        else:
            rotated = torch.stack((-u[..., 1::2], u[..., 0::2]), dim=-1).flatten(-2)
        return u * cos + rotated * sin

    out = (one(q, leaves[1]), one(k, leaves[2]), v)

    def backward(grads):
        rows, *dws = torch.autograd.grad(out, leaves, [g.to(dtype) for g in grads])
        return rows.flatten(0, 1), *dws

    return tuple(x.detach() for x in out), backward


def run_backward(made, grads, qkv, weights, tables, heads, options=None, config=None):
    return Q.qk_norm_rope_backward(
        grads,
        qkv,
        weights,
        (made.rstd_q, made.rstd_k),
        tables,
        convention=heads.convention,
        options=options,
        config=config,
    )


@pytest.mark.parametrize(
    ("shape", "rounding", "convention", "is_whole"),
    [
        *((SHAPES[0], rounding, convention, False) for rounding in ("llama", "torch") for convention in CONVENTIONS),
        *((SHAPES[1], "llama", "interleaved", False), (SHAPES[1], "torch", "half", False)),
        *((SHAPES[2], "llama", "half", False), (SHAPES[2], "torch", "half", True)),
        *((SHAPES[0], "llama", "half", True), (SHAPES[1], "torch", "interleaved", True)),
    ],
    ids=str,
)
def test_both_ways_are_no_worse_than_torch(device, shape, rounding, convention, is_whole):
    heads, qkv, grads, weights, tables = make(shape, device, convention=convention, is_whole=is_whole)
    norm = Q.QkNorm(rounding=rounding)
    made = Q.qk_norm_rope(qkv, weights, *tables, heads=heads, norm=norm)
    exact, exact_backward = as_models_write_it(qkv, weights, tables, heads, shape[3], rounding, torch.float64)
    own, own_backward = as_models_write_it(qkv, weights, tables, heads, shape[3], rounding, torch.bfloat16)
    for mine, torchs, ref in zip(made[:2], own, exact, strict=False):
        assert mine.is_contiguous()
        assert_no_worse_than(mine, torchs, ref)
    assert_bitwise_equal(made.v, own[2], "v is copied")
    got = run_backward(made, grads, qkv, weights, tables, heads)
    for mine, torchs, ref in zip(
        (got.grad, got.dw_q, got.dw_k), own_backward(grads), exact_backward(grads), strict=True
    ):
        assert mine.dtype == torch.bfloat16
        assert_no_worse_than(mine, torchs, ref)


@pytest.mark.parametrize(("shape", "is_whole"), [*((shape, False) for shape in SHAPES), (SHAPES[0], True)], ids=str)
def test_fp8_rows_are_the_quantized_gradient_bit_for_bit(device, shape, is_whole):
    heads, qkv, grads, weights, tables = make(shape, device, s=3, is_whole=is_whole)
    for grad in grads:
        grad[1, 2] = 0  # a whole row of zeros has a scale of its own
    made = Q.qk_norm_rope(qkv, weights, *tables, heads=heads)
    both = run_backward(made, grads, qkv, weights, tables, heads, GradOptions(fp8=E4M3))
    alone = run_backward(made, grads, qkv, weights, tables, heads, GradOptions(write=False, fp8=E4M3))
    wanted = quantize(both.grad, "fp8_e4m3_row_pow2")
    assert alone.grad is None
    for got in (both, alone):
        assert_bitwise_equal(got.q, wanted.data)
        assert_bitwise_equal(got.scale, wanted.scales[:, 0])


# Interpreted, each takes some seconds.
_CONFIGS = [pytest.param(c, marks=[pytest.mark.slow] if i else []) for i, c in enumerate(Q.BACKWARD_CONFIGS)]


@pytest.mark.parametrize("config", _CONFIGS, ids=str)
@pytest.mark.parametrize("is_whole", [False, True], ids=["each", "whole"])
def test_every_config_sums_all_tokens_into_the_weights_gradients(device, config, is_whole):
    heads, qkv, grads, weights, tables = make((2, 1, 1, 16), device, b=3, s=7, is_whole=is_whole)
    made = Q.qk_norm_rope(qkv, weights, *tables, heads=heads)
    got = run_backward(made, grads, qkv, weights, tables, heads, config=config)
    again = run_backward(made, grads, qkv, weights, tables, heads, config=config)
    ref = Q.qk_norm_rope_backward_ref(grads, qkv, weights, (made.rstd_q, made.rstd_k), tables, heads, GradOptions())
    for name in ("dw_q", "dw_k"):
        torch.testing.assert_close(getattr(got, name), getattr(ref, name), rtol=2**-7, atol=2**-7)
        assert_bitwise_equal(getattr(got, name), getattr(again, name), "deterministic")


@pytest.mark.parametrize("is_whole", [False, True], ids=["each", "whole"])
def test_rows_that_are_columns_of_others_gradients_of_any_strides_and_tables_of_each_sequence(device, is_whole):
    heads, qkv, grads, weights, tables = make((4, 2, 2, 32), device, weights_of=torch.float32, is_whole=is_whole)
    wide = torch.cat([qkv, qkv], dim=-1)[..., : qkv.shape[-1]]  # rows further apart
    swapped = tuple(g.transpose(1, 2).contiguous().transpose(1, 2) for g in grads)  # heads before positions
    spread = tuple(table.expand(2, -1, -1).contiguous() for table in tables)
    plain = Q.qk_norm_rope(qkv, weights, *tables, heads=heads)
    made = Q.qk_norm_rope(wide, weights, *spread, heads=heads)
    for mine, ref in zip(made, plain, strict=True):
        assert_bitwise_equal(mine, ref)
    wanted = run_backward(plain, grads, qkv, weights, tables, heads)
    got = run_backward(made, swapped, wide, weights, spread, heads)
    assert got.dw_q.dtype == torch.float32
    for mine, ref in zip(got, wanted, strict=True):
        if ref is not None:
            assert_bitwise_equal(mine, ref)


def test_nothing_to_do_and_nan(device):
    heads, qkv, grads, weights, tables = make((2, 1, 1, 16), device)
    empty = Q.qk_norm_rope(qkv[:0], weights, *tables, heads=heads)
    none = run_backward(empty, tuple(g[:0] for g in grads), qkv[:0], weights, tables, heads, GradOptions(fp8=E4M3))
    assert none.grad.shape == (0, 64) and not none.dw_q.any()
    qkv[1, 3, 5] = float("nan")  # of q's first head
    made = Q.qk_norm_rope(qkv, weights, *tables, heads=heads)
    assert made.q[1, 3, 0].isnan().all() and not made.q[1, 3, 1].isnan().any() and not made.k.isnan().any()
    got = run_backward(made, grads, qkv, weights, tables, heads, GradOptions(fp8=E4M3))
    assert got.dw_q.isnan().all() and not got.dw_k.isnan().any()
    assert got.scale.isnan().nonzero().flatten().tolist() == [8]


def test_one_norm_of_all_heads_spreads_nan_over_one_token(device):
    heads, qkv, grads, weights, tables = make((3, 1, 1, 16), device, is_whole=True)
    qkv[1, 3, 5] = float("nan")  # of q
    made = Q.qk_norm_rope(qkv, weights, *tables, heads=heads)
    assert made.q[1, 3].isnan().all() and not made.q[1, :3].isnan().any() and not made.k.isnan().any()
    got = run_backward(made, grads, qkv, weights, tables, heads, GradOptions(fp8=E4M3))
    assert got.dw_q.isnan().all() and not got.dw_k.isnan().any()
    assert got.scale.isnan().nonzero().flatten().tolist() == [8]


def test_wrong_arguments_are_named():
    heads, qkv, grads, weights, tables = make((2, 1, 1, 16), "cpu")
    with pytest.raises(ConfigError, match="rounding must be one of llama, torch"):
        Q.QkNorm(rounding="up")
    with pytest.raises(ConfigError, match="w_k must have shape"):
        Q.qk_norm_rope(qkv, (weights[0], weights[1][:8]), *tables, heads=heads)
    with pytest.raises(ConfigError, match=r"w_k must have shape \(16,\)"):
        Q.qk_norm_rope(qkv, (weights[0], weights[1].repeat(2)), *tables, heads=heads)
    with pytest.raises(UnsupportedError, match="at most 4096 columns"):
        many = Heads(q=258, k=1, v=1)
        Q.qk_norm_rope(qkv.repeat(1, 1, 65), (weights[0].repeat(258), weights[1]), *tables, heads=many)
    with pytest.raises(UnsupportedError, match="cos has 8 columns"):
        Q.qk_norm_rope(qkv, weights, *(table[:, :8] for table in tables), heads=heads)
    with pytest.raises(UnsupportedError, match="packing"):
        Q.qk_norm_rope(qkv[..., :48], weights, *tables, heads=Heads(q=1, k=1, v=1, packing="heads"))
    made = Q.qk_norm_rope(qkv, weights, *tables, heads=heads)
    with pytest.raises(ConfigError, match="rstd_q must have shape"):
        run_backward(made._replace(rstd_q=made.rstd_k), grads, qkv, weights, tables, heads)


# ---- compiled for GPUs that are not here ----

# Qwen3 0.6B, 8B, 14B (40 heads: five groups of eight) and 235B (four heads of k: half a group of eight).
MODELS = [(16, 8, 8, 128), (32, 8, 8, 128), (40, 8, 8, 128), (64, 4, 4, 128)]
FP8 = {"grad_ptr": None, "code_ptr": E4M3}
PLAIN = {"code_ptr": None, "scale_ptr": None}
BOTH = {"code_ptr": E4M3}


def compiled(kernel, shape, arch, config, *, convention="half", is_whole=False, **constexprs):
    """The kernel for tensors as models have them: bf16, but for statistics, partial sums and scales in fp32; dense."""
    hq, hk, hv, d = shape
    fp32 = {"rq_ptr", "rk_ptr", "dw_ptr", "scale_ptr"}
    arguments = {"T": "i32", "S": "i32", "ASM": True}
    for name in kernel.arg_names:
        if name.endswith("_ptr"):
            arguments[name] = torch.float32 if name in fp32 else torch.bfloat16
        elif name.startswith("stride"):
            arguments[name] = "i32" if name.endswith("s") else None
    heads = Heads(q=hq, k=hk, v=hv, convention=convention)
    arguments |= Q.sizes(heads, d, num_warps=config.num_warps, is_whole=is_whole)
    limit = getattr(config, "max_registers", None)
    return aot.compile_kernel(
        kernel, arguments | constexprs, arch=arch, num_warps=config.num_warps, max_registers=limit
    )


def forward_of(shape, arch, config=None, **others):
    config = config or Q.default_forward_config(sum(shape[:3]) * shape[3])
    return compiled(Q._forward_kernel, shape, arch, config, **{"eps": "fp32", "ROUND_FIRST": True, **others})


def backward_of(shape, arch, config=None, **others):
    heads = Heads(q=shape[0], k=shape[1], v=shape[2], convention=others.get("convention", "half"))
    config = config or Q.default_backward_config(heads, shape[3])
    given = {"FP8_MAX": 448.0, "NUM_STAGES": config.num_stages, **others}
    return compiled(Q._backward_kernel, shape, arch, config, **given), config


@pytest.mark.parametrize(("arch", "shape"), [*((90, shape) for shape in MODELS), (100, MODELS[1])], ids=str)
def test_the_forward_exchanges_nothing_but_the_sums_of_its_heads(arch, shape):
    made = forward_of(shape, arch)
    assert made.spill_bytes == made.stack_bytes == 0
    assert made.count(r"bar\.sync") == made.shared_bytes == 0
    assert made.count(r"[ls][dt]\.global\S*\.b(8|16)\b") == 0
    assert made.registers <= 128  # 16 warps on a multiprocessor


@pytest.mark.parametrize("arch", aot.ARCHS)
def test_the_forward_reads_and_writes_sixteen_bytes_and_works_two_numbers_at_a_time(arch):
    made = forward_of(MODELS[1], arch)
    loads, elements = 96 // 8, 80  # of a thread; 80 of them are of q and k
    assert made.count(r"ld\.global\S*\.v4\.b32") == loads + 8  # tables and weights, each in two halves
    assert made.count(r"st\.global\S*\.v4\.b32") == loads
    assert made.count(r"mul\.rn\.bf16x2") == elements // 2
    assert made.count(r"cvt\.rn\.bf16x2\.f32") == 2 * elements // 2
    assert made.count(r"cvt\.rn\.bf16\.f32|div\.") == 0
    # The sum of a head stays within its eight lanes: of five groups of heads in three steps each.
    assert sorted(re.findall(r"shfl\.sync\.bfly\.b32[^;]*, (\d+), 31", made.ptx)) == ["1"] * 5 + ["2"] * 5 + ["4"] * 5


@pytest.mark.parametrize(
    ("arch", "shape", "results"),
    [(90, MODELS[1], PLAIN), (90, MODELS[1], BOTH), *((90, shape, FP8) for shape in MODELS[:3]), (100, MODELS[1], FP8)],
    ids=str,
)
def test_the_backward_holds_its_rows_in_registers_without_spills(arch, shape, results):
    made, config = backward_of(shape, arch, **results)
    assert made.spill_bytes == made.stack_bytes == 0
    assert made.count(r"[ls][dt]\.global\S*\.b(8|16)\b") == 0
    # All programs of a multiprocessor are there at once: 16 warps.
    assert config.num_warps * config.programs_per_sm == 16
    assert made.registers * 32 * config.num_warps * config.programs_per_sm <= 65536
    assert (made.shared_bytes + 1024) * config.programs_per_sm <= aot.MAX_SHARED_BYTES
    # A power of two needs no division, and the next token is fetched ahead, 1 / rms of its heads included.
    assert made.count(r"div\.\S*f32|rcp\.approx|ld\.global\.nc") == 0
    assert made.count(r"cp\.async\.\S*shared") > 0


# OLMoE and OLMo 2 7B: a thread holds the weights of all its heads, and their gradients.
@pytest.mark.parametrize(("arch", "shape"), [(90, (16,) * 3), (90, (32,) * 3), (100, (32,) * 3)], ids=str)
def test_norms_of_all_heads_are_held_in_registers_without_spills(arch, shape):
    forward = forward_of((*shape, 128), arch, is_whole=True, ROUND_FIRST=False)
    assert forward.spill_bytes == forward.stack_bytes == 0
    assert forward.registers <= 128
    heads = Heads(q=shape[0], k=shape[1], v=shape[2])
    config = Q.default_backward_config(heads, 128, is_whole=True)
    for results in (FP8, PLAIN):
        made, _ = backward_of((*shape, 128), arch, config, is_whole=True, **results)
        assert made.spill_bytes == made.stack_bytes == 0
        assert made.registers * 32 * config.num_warps * config.programs_per_sm <= 65536
        assert (made.shared_bytes + 1024) * config.programs_per_sm <= aot.MAX_SHARED_BYTES
        assert made.count(r"cp\.async\.\S*shared") > 0
        assert made.count(r"[ls][dt]\.global\S*\.b(8|16)\b") == 0


# `aot` refuses a kernel whose reductions Triton would compute of the wrong lanes.
@pytest.mark.parametrize(("shape", "convention"), [(MODELS[0], "interleaved"), (MODELS[1], "half")], ids=str)
def test_every_config_compiles_without_spills(shape, convention):
    for config in Q.FORWARD_CONFIGS:
        assert forward_of(shape, 90, config, convention=convention).spill_bytes == 0
    for config in Q.BACKWARD_CONFIGS:
        made, _ = backward_of(shape, 90, config, convention=convention, **FP8)
        assert made.spill_bytes == 0
        assert (made.shared_bytes + 1024) * config.programs_per_sm <= aot.MAX_SHARED_BYTES


@pytest.mark.parametrize("arch", aot.ARCHS)
def test_other_gpus_heads_of_any_number_and_far_rows_compile(arch):
    forward = forward_of((5, 3, 3, 48), arch, ASM=False, ROUND_FIRST=False, stride_b="i32", stride_cos_b="i32")
    backward, _ = backward_of((5, 3, 3, 48), arch, ASM=False, stride_qb="i32", stride_qh="i32", **FP8)
    # Half the threads have no head of k: a pointer that is the same for all tokens may go to the stack, no more.
    assert backward_of(MODELS[3], arch, **FP8)[0].spill_bytes <= 16
    for made in (forward, backward):
        assert made.count(r"max\.NaN\.xorsign|mul\.rn\.bf16x2") == 0


@pytest.mark.parametrize("arch", aot.ARCHS)
def test_the_programs_sums_are_read_many_at_once(arch):
    arguments = {"partial_ptr": torch.float32, "dwq_ptr": torch.bfloat16, "dwk_ptr": torch.float32, "P": "i32:any"}
    arguments |= {"NQ": "i32", "NK": "i32", "BLOCK_P": 256, "BLOCK_D": 8}
    made = aot.compile_kernel(Q._sum_kernel, arguments, arch=arch, num_warps=8)
    assert made.spill_bytes == 0
    assert made.count(r"ld\.global") >= 2
