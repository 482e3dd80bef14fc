"""RoPE of merged rows: no worse than torch at the same dtype both ways, FP8 rows bit-equal to quantizing dqkv."""

import re

import pytest
import torch

import aot
from deepwell.errors import ConfigError, UnsupportedError
from deepwell.formats.metrics import assert_bitwise_equal, assert_no_worse_than
from deepwell.formats.quantize import quantize
from deepwell.kernels.quantize.fp8 import RowOptions as GradOptions
from deepwell.kernels.rope import rope as R
from deepwell.kernels.rope.rope import Heads

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BOTH = GradOptions(fp8=E4M3)
# (q heads, k heads, v heads, head width, rotated columns): grouped queries; Phi-2's 80 with 32 rotated; heads that are
# no power of two; GPT-NeoX's quarter.
SHAPES = [(4, 2, 2, 32, 32), (3, 3, 3, 80, 32), (5, 1, 1, 16, 16), (4, 4, 4, 64, 16)]


@pytest.fixture
def device(everywhere):
    """Interpreted, by the reference, and on a GPU where there is one."""
    return everywhere


def tables(s, r, convention, dtype, device, batch=None):
    """cos and sin as models make them: the angle of a pair twice, side by side or in two halves."""
    angle = torch.outer(torch.arange(s).float(), 100.0 ** -(torch.arange(0, r, 2).float() / r))
    angle = angle.repeat(1, 2) if convention == "half" else angle.repeat_interleave(2, dim=1)
    if batch is not None:
        angle = angle + torch.arange(batch).float()[:, None, None]
    return angle.cos().to(dtype).to(device), angle.sin().to(dtype).to(device)


def rotated(x, convention):
    if convention == "half":
        a, b = x.chunk(2, dim=-1)
        return torch.cat((-b, a), dim=-1)
    return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)


def torch_rope(x_BSHD, cos, sin, convention):
    """As models write it, in the dtype of x."""
    r = cos.shape[-1]
    cos, sin = cos.to(x_BSHD.dtype).unsqueeze(-2), sin.to(x_BSHD.dtype).unsqueeze(-2)
    x = x_BSHD[..., :r]
    return torch.cat((x * cos + rotated(x, convention) * sin, x_BSHD[..., r:]), dim=-1)


def torch_qkv(qkv, cos, sin, heads, width, dtype):
    """(q, k, v) and a function from their gradients to that of the merged rows, by torch in that dtype."""
    qkv = qkv.detach().to(dtype, copy=True).requires_grad_()
    q, k, v = heads.parts(qkv, width)
    out = (torch_rope(q, cos, sin, heads.convention), torch_rope(k, cos, sin, heads.convention), v)

    def backward(grads):
        return torch.autograd.grad(out, qkv, [g.to(dtype) for g in grads])[0].flatten(0, 1)

    return tuple(x.detach() for x in out), backward


def make(shape, device, *, b=2, s=5, packing="blocks", convention="half", tables_of=torch.bfloat16):
    hq, hk, hv, d, r = shape
    heads = Heads(q=hq, k=hk, v=hv, packing=packing, convention=convention)
    qkv = (torch.randn(b, s, heads.total * d) * torch.exp2(2 * torch.randn(b, s, 1))).bfloat16().to(device)
    grads = tuple(torch.randn(b, s, h, d).bfloat16().to(device) for h in (hq, hk, hv))
    return heads, qkv, grads, *tables(s, r, convention, tables_of, device)


def backward(grads, cos, sin, heads, options=BOTH, config=None):
    return R.rope_qkv_backward(
        grads, cos, sin, packing=heads.packing, convention=heads.convention, options=options, config=config
    )


# ---- numbers ----


@pytest.mark.parametrize(("convention", "tables_of"), zip(R.CONVENTIONS, (torch.bfloat16, torch.float32), strict=True))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_both_ways_are_no_worse_than_torch(device, shape, convention, tables_of):
    packing = "heads" if shape[0] == shape[1] == 4 else "blocks"
    heads, qkv, grads, cos, sin = make(shape, device, packing=packing, convention=convention, tables_of=tables_of)
    got = R.rope_qkv(qkv, cos, sin, heads=heads)
    exact, exact_backward = torch_qkv(qkv, cos, sin, heads, shape[3], torch.float64)
    own, own_backward = torch_qkv(qkv, cos, sin, heads, shape[3], torch.bfloat16)
    for mine, torchs, ref in zip(got[:2], own[:2], exact[:2], strict=True):
        assert_no_worse_than(mine, torchs, ref)
    assert_bitwise_equal(got[2], own[2], "v is copied")
    assert_no_worse_than(backward(grads, cos, sin, heads).grad, own_backward(grads), exact_backward(grads))


@pytest.mark.parametrize("convention", R.CONVENTIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_has_the_bits_of_the_reference(device, shape, convention):
    # With bf16 tables every product is exact in fp32: the order of the two has no say.
    heads, qkv, grads, cos, sin = make(shape, device, convention=convention)
    wanted = R.rope_qkv_ref(qkv, cos, sin, heads)
    for name, mine, ref in zip("qkv", R.rope_qkv(qkv, cos, sin, heads=heads), wanted, strict=True):
        assert mine.is_contiguous()
        assert_bitwise_equal(mine, ref, name)
    got, ref = backward(grads, cos, sin, heads), R.rope_qkv_backward_ref(grads, cos, sin, heads, BOTH)
    for name in ("grad", "q", "scale"):
        assert_bitwise_equal(getattr(got, name), getattr(ref, name), name)


@pytest.mark.parametrize("convention", R.CONVENTIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_factors_of_rows_give_the_bits_of_rows_multiplied_before(device, shape, convention):
    # What a FP8 GEMM leaves to its reader: powers of two, another for every token.
    heads, qkv, _, cos, sin = make(shape, device, convention=convention)
    factor = torch.exp2(torch.arange(10.0, device=device) - 7)
    scaled = (qkv.float() * factor.view(2, 5, 1)).bfloat16()
    got = R.rope_qkv(qkv, cos, sin, heads=heads, factor_T=factor)
    for name, mine, wanted in zip("qkv", got, R.rope_qkv(scaled, cos, sin, heads=heads), strict=True):
        assert_bitwise_equal(mine, wanted, name)


@pytest.mark.parametrize(
    ("shape", "dtype"), [*((shape, E4M3) for shape in SHAPES), (SHAPES[0], E5M2), (SHAPES[3], E5M2)]
)
def test_fp8_rows_are_the_quantized_gradient_bit_for_bit(device, shape, dtype):
    heads, _, grads, cos, sin = make(shape, device, tables_of=torch.float32)
    for grad in grads:
        grad[1, 2] = 0  # a whole row of zeros has a scale of its own
    name = f"fp8_{'e4m3' if dtype == E4M3 else 'e5m2'}_row_pow2"
    beside = backward(grads, cos, sin, heads, GradOptions(fp8=dtype))
    wanted = quantize(beside.grad, name)
    alone = backward(grads, cos, sin, heads, GradOptions(write=False, fp8=dtype))
    assert alone.grad is None
    for got in (beside, alone):
        assert_bitwise_equal(got.q, wanted.data, "codes")
        assert_bitwise_equal(got.scale, wanted.scales[:, 0], "scales")


def test_the_largest_gradient_of_a_row_may_lie_in_any_part(device):
    # One scale serves q, k, v and the columns that are not rotated: an outlier in each must raise it.
    heads, _, grads, cos, sin = make((4, 2, 2, 32, 16), device)
    for part, column in ((0, 3), (0, 30), (1, 3), (1, 30), (2, 9)):
        raised = tuple(grad.clone() for grad in grads)
        raised[part][0, 1, 1, column] = 1000.0
        got = backward(raised, cos, sin, heads)
        assert_bitwise_equal(got.scale, quantize(got.grad, "fp8_e4m3_row_pow2").scales[:, 0], f"{part}, {column}")
        assert got.scale[1] > 100 * got.scale[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_other_dtypes_are_no_worse_than_torch(device, dtype):
    heads, qkv, _, cos, sin = make(SHAPES[0], device, tables_of=torch.float32)
    qkv = qkv.to(dtype)
    got = R.rope_qkv(qkv, cos, sin, heads=heads)
    exact, _ = torch_qkv(qkv, cos, sin, heads, 32, torch.float64)
    own, _ = torch_qkv(qkv, cos, sin, heads, 32, dtype)
    assert_no_worse_than(got[0], own[0], exact[0])
    assert got[0].dtype is dtype


# Interpreted, each takes two seconds.
_CONFIGS = [pytest.param(c, marks=[pytest.mark.slow] if i % 3 else []) for i, c in enumerate(R.CONFIGS)]


@pytest.mark.parametrize("config", _CONFIGS, ids=str)
def test_every_config_gives_the_same_bits(device, config):
    # 11 tokens: the last program of several rows is ragged.
    heads, qkv, grads, cos, sin = make((4, 2, 2, 32, 32), device, b=1, s=11)
    for mine, ref in zip(
        R.rope_qkv(qkv, cos, sin, heads=heads, config=config), R.rope_qkv_ref(qkv, cos, sin, heads), strict=True
    ):
        assert_bitwise_equal(mine, ref)
    got, ref = backward(grads, cos, sin, heads, config=config), backward(grads, cos, sin, heads)
    for name in ("grad", "q", "scale"):
        assert_bitwise_equal(getattr(got, name), getattr(ref, name), name)


def test_a_nan_shows_in_its_row_alone(device):
    heads, _, grads, cos, sin = make(SHAPES[0], device)
    grads[1][1, 2, 0, 3] = float("nan")
    got = backward(grads, cos, sin, heads)
    assert got.scale.isnan().nonzero().flatten().tolist() == [7]
    assert got.q[7].float().isnan().all()


# ---- layouts ----


def test_gradients_may_lie_as_attention_leaves_them(device):
    # [B, H, S, D] memory seen as [B, S, H, D]; and a slice of something wider.
    heads, _, grads, cos, sin = make(SHAPES[0], device)
    wanted = backward(grads, cos, sin, heads)
    moved = tuple(g.transpose(1, 2).contiguous().transpose(1, 2) for g in grads)
    wide = tuple(torch.cat((g, g), dim=-1)[..., : g.shape[-1]] for g in grads)
    for other in (moved, wide):
        got = backward(other, cos, sin, heads)
        assert_bitwise_equal(got.grad, wanted.grad, "grad")
        assert_bitwise_equal(got.q, wanted.q, "q")


def test_heads_may_lie_more_than_two_to_the_31_elements_apart(device):
    # [B, H, S, D] at 32 heads of 128 and half a million tokens. Of the memory between them nothing is touched.
    apart = (1 << 30) + 8
    x = torch.empty(2 * apart + 8, dtype=torch.bfloat16, device=device).as_strided((1, 1, 3, 8), (0, 0, apart, 1))
    x.copy_(torch.arange(24).view(1, 1, 3, 8))
    cos, sin = tables(1, 8, "half", torch.float32, device)
    near = x.contiguous()
    for backward in (False, True):
        far = R.rope(x, cos, sin, backward=backward)
        assert_bitwise_equal(far, R.rope(near, cos, sin, backward=backward))


def test_merged_rows_may_be_a_slice_of_wider_ones(device):
    heads, qkv, _, cos, sin = make(SHAPES[0], device)
    wide = torch.cat((qkv, qkv), dim=-1)[..., : qkv.shape[-1]]
    wanted = R.rope_qkv(qkv, cos, sin, heads=heads)
    for mine, ref in zip(R.rope_qkv(wide, cos, sin, heads=heads), wanted, strict=True):
        assert_bitwise_equal(mine, ref)


def test_tables_may_be_shared_or_each_sequences_own(device):
    heads, qkv, grads, cos, sin = make(SHAPES[0], device, b=3)
    wanted = R.rope_qkv(qkv, cos, sin, heads=heads)
    for view in (lambda t: t[None], lambda t: t[None].expand(3, -1, -1), lambda t: t[None].repeat(3, 1, 1)):
        assert_bitwise_equal(R.rope_qkv(qkv, view(cos), view(sin), heads=heads)[0], wanted[0])
    cos, sin = tables(5, 32, "half", torch.bfloat16, device, batch=3)
    got = R.rope_qkv(qkv, cos, sin, heads=heads)
    one = R.rope_qkv(qkv[1:2], cos[1], sin[1], heads=heads)
    assert_bitwise_equal(got[1][1:2], one[1])
    got, one = backward(grads, cos, sin, heads), backward(tuple(g[1:2] for g in grads), cos[1], sin[1], heads)
    assert_bitwise_equal(got.grad[5:10], one.grad)


@pytest.mark.parametrize("convention", R.CONVENTIONS)
def test_one_tensor_is_rotated_as_among_three(device, convention):
    heads, qkv, grads, cos, sin = make(SHAPES[1], device, convention=convention)
    q = heads.parts(qkv, 80)[0]
    wanted = R.rope_qkv(qkv, cos, sin, heads=heads)[0]
    moved = q.transpose(1, 2).contiguous().transpose(1, 2)
    for x in (q, moved):
        assert_bitwise_equal(R.rope(x, cos, sin, convention=convention), wanted)
    back = R.rope(grads[0], cos, sin, convention=convention, backward=True)
    assert_bitwise_equal(back, heads.parts(backward(grads, cos, sin, heads).grad, 80)[0].unflatten(0, (2, 5)))


def test_the_transposed_rotation_undoes_the_rotation(device):
    _, _, grads, cos, sin = make((4, 1, 1, 64, 64), device, tables_of=torch.float32)
    x = grads[0].float()
    back = R.rope(R.rope(x, cos, sin), cos, sin, backward=True)
    torch.testing.assert_close(back, x, rtol=1e-5, atol=1e-6)


def test_no_tokens_give_empty_results(device):
    heads = Heads(q=2, k=1, v=1)
    cos, sin = (torch.empty(0, 8, device=device) for _ in range(2))
    q, k, v = R.rope_qkv(torch.empty(2, 0, 32, device=device), cos, sin, heads=heads)
    assert (q.shape, k.shape, v.shape) == ((2, 0, 2, 8), (2, 0, 1, 8), (2, 0, 1, 8))
    got = backward((q, k, v), cos, sin, heads)
    assert got.grad.shape == got.q.shape == (0, 32)


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (lambda x, c: R.rope_qkv(x[0], c, c, heads=Heads(q=2, k=1, v=1)), "qkv_BSW must be a tensor of 3"),
        (lambda x, c: R.rope_qkv(x, c, c, heads=Heads(q=2, k=2, v=1)), "no multiple of its 5 heads"),
        (lambda x, c: R.rope_qkv(x.long(), c, c, heads=Heads(q=2, k=1, v=1)), "qkv_BSW has dtype"),
        (lambda x, c: R.rope_qkv(x, c[:2], c, heads=Heads(q=2, k=1, v=1)), "cos must have shape"),
        (lambda x, c: R.rope_qkv(x, c, c[:, :4], heads=Heads(q=2, k=1, v=1)), "sin has 4 columns"),
        (lambda x, c: R.rope_qkv(x, c[:, :3], c[:, :3], heads=Heads(q=2, k=1, v=1)), "same even number"),
        (lambda x, c: R.rope_qkv(x, c[None].repeat(3, 1, 1), c, heads=Heads(q=2, k=1, v=1)), "cos must have shape"),
        (lambda x, c: R.rope(x.view(2, 3, 4, 8).transpose(2, 3), c, c), "call .contiguous"),
        (lambda x, c: R.rope(x.view(2, 3, 4, 8), c, c, convention="neox"), "convention must be one of"),
        (lambda x, c: R.rope_qkv_backward((x.view(2, 3, 4, 8),) * 2 + (x.view(2, 3, 2, 16),), c, c), "dv must be like"),
        (lambda x, c: Heads(q=2, k=1, v=1, packing="heads"), "as many k and v as q"),
        (lambda x, c: Heads(q=2, k=1, v=1, packing="rows"), "packing must be one of"),
        (lambda x, c: Heads(q=2, k=0, v=1), "needs a head"),
        (lambda x, c: GradOptions(write=False), "nothing would be written"),
        (lambda x, c: GradOptions(fp8=torch.int8), "fp8 must be"),
    ],
)
def test_wrong_arguments_are_named(call, names):
    with pytest.raises(ConfigError, match=names):
        call(torch.randn(2, 3, 32), torch.randn(3, 8))


def test_rows_wider_than_registers_are_refused(device):
    x, cos = torch.empty(1, 1, 3 * 128 * 128, device=device), torch.ones(1, 128, device=device)
    if device == "cpu" and not R.runs_kernel(x, R._rope_kernel):
        pytest.skip("the reference takes any width")
    with pytest.raises(UnsupportedError, match="do not fit registers"):
        R.rope_qkv(x, cos, cos, heads=Heads(q=128, k=128, v=128))


# ---- what the compiler makes of it, without a GPU ----

# Llama 8B, a 1B, width 768, Llama 70B (10240 columns), Phi-2 and GPT-NeoX 20B.
MODELS = [
    (32, 8, 8, 128, 128),
    (32, 8, 8, 64, 64),
    (12, 12, 12, 64, 64),
    (64, 8, 8, 128, 128),
    (32, 32, 32, 80, 32),
    (64, 64, 64, 96, 24),
]


def compiled(shape, arch, *, fp8, interleaved=False, alone=False, asm=True, config=None, factor=None):
    hq, hk, hv, d, r = shape
    config = config or R.default_config((hq + hk + hv) * d)
    arguments = {
        **dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "cos_ptr", "sin_ptr"), torch.bfloat16),
        "factor_ptr": factor,
        **dict.fromkeys(("yq_ptr", "yk_ptr", "yv_ptr"), None if fp8 else torch.bfloat16),
        **dict.fromkeys(("cq_ptr", "ck_ptr", "cv_ptr"), E4M3 if fp8 else None),
        "scale_ptr": torch.float32 if fp8 else None,
        **dict.fromkeys((name for name in R._rope_kernel.arg_names if name.startswith("stride_")), "i32"),
        **{"T": "i32", "S": "i32", "HQ": hq, "HK": hk, "HV": hv, "D": d, "R": r, "ROWS": config.rows},
        **R.blocks((hq,) if alone else (hq, hk, hv), d, r, config, interleaved=interleaved),
        **{"INTERLEAVED": interleaved, "BACKWARD": fp8, "FP8_MAX": 448.0, "ASM": asm},
    }
    if alone:
        arguments |= dict.fromkeys(("k_ptr", "v_ptr", "yk_ptr", "yv_ptr"))
    return aot.compile_kernel(R._rope_kernel, arguments, arch=arch, num_warps=config.num_warps)


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize(("arch", "shape"), [*((90, shape) for shape in MODELS), (100, MODELS[0])], ids=str)
def test_models_compile_without_spills_or_narrow_accesses(arch, fp8, shape):
    made = compiled(shape, arch, fp8=fp8)
    assert made.spill_bytes == made.stack_bytes == 0
    assert made.shared_bytes <= aot.MAX_SHARED_BYTES
    assert made.count(r"[ls][dt]\.global\S*\.b(8|16)\b") == 0


@pytest.mark.parametrize("arch", aot.ARCHS)
@pytest.mark.parametrize("shape", [MODELS[0], MODELS[2]], ids=str)
@pytest.mark.parametrize("factor", [None, torch.float32], ids=["scaled", "with factors"])
def test_q_is_read_and_written_sixteen_bytes_at_a_time(arch, shape, factor):
    made = compiled(shape, arch, fp8=False, factor=factor)
    assert made.spill_bytes == made.stack_bytes == 0
    assert made.count(r"ld\.global\S*\.v4\.b32") >= 5
    assert made.count(r"st\.global\S*\.v4\.b32") >= 5
    # Nothing is exchanged between threads: no barrier, no shared memory.
    assert made.count(r"bar\.sync") == made.shared_bytes == 0


@pytest.mark.parametrize("arch", aot.ARCHS)
def test_one_tensor_alone_compiles_to_the_same_accesses(arch):
    made = compiled((32, 1, 1, 128, 128), arch, fp8=False, alone=True)
    assert made.spill_bytes == made.shared_bytes == 0
    assert made.count(r"[ls][dt]\.global\S*\.b(8|16)\b") == 0
    assert made.count(r"st\.global\S*\.v4\.b32") >= 4


@pytest.mark.parametrize("arch", aot.ARCHS)
def test_interleaved_pairs_stay_within_a_thread(arch):
    made = compiled(MODELS[0], arch, fp8=False, interleaved=True)
    assert made.spill_bytes == 0
    assert made.shared_bytes <= 512  # the tables' rows; a tile of q has 8192 bytes
    assert made.count(r"ld\.global\S*\.v4\.b32") >= 5


@pytest.mark.parametrize("arch", aot.ARCHS)
def test_scales_that_are_powers_of_two_need_no_division(arch):
    assert compiled(MODELS[0], arch, fp8=True).count(r"div\.\S*f32|rcp\.approx") == 0


@pytest.mark.parametrize("arch", aot.ARCHS)
@pytest.mark.parametrize("shape", MODELS[:2], ids=str)
@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
def test_numbers_stay_two_in_a_register_and_with_their_thread(arch, shape, interleaved):
    made = compiled(shape, arch, fp8=True, interleaved=interleaved)
    elements = sum(shape[:3]) * shape[3] // (32 * R.default_config(sum(shape[:3]) * shape[3]).num_warps)
    rotated = elements * (shape[0] + shape[1]) // sum(shape[:3])
    # Rounded, scaled and encoded two at a time; the compiler's own conversions are for the one multiplier of the row.
    assert made.count(r"cvt\.rn\.bf16x2\.f32") == rotated // 2
    assert made.count(r"mul\.rn\.bf16x2") == made.count(r"cvt\.rn\.satfinite\.e4m3x2\.f32") == elements // 2
    assert made.count(r"cvt\.rn\.bf16\.f32") <= 1
    assert made.count(r"max\.NaN\.xorsign\.abs\.bf16x2") >= elements // 4
    # One maximum goes from warp to warp, a number each; tiles do not.
    assert made.shared_bytes <= 64
    # 20 warps on a multiprocessor.
    assert made.registers <= 96


@pytest.mark.parametrize("arch", aot.ARCHS)
def test_other_gpus_get_the_plain_form(arch):
    made = compiled(MODELS[1], arch, fp8=True, asm=False)
    assert made.spill_bytes == 0
    assert made.count(r"max\.NaN\.xorsign|mul\.rn\.bf16x2") == 0


def test_a_maximum_does_not_mix_the_tokens_of_a_warp():
    # Lanes of two tokens: columns in bits 0 and 1, the token in bit 2, heads in bits 3 and 4. Triton 3.6 makes 8 4 2 1
    # of one maximum over columns and heads, which takes in the other token and leaves out half the heads.
    made = compiled(MODELS[1], 90, fp8=True, config=R.RopeConfig(rows=2, num_warps=1))
    assert sorted(map(int, re.findall(r"shfl\.sync\.bfly\.b32[^;]*, (\d+), 31", made.ptx))) == [1, 2, 8, 16]
