"""Head and loss in chunks: loss and gradients no worse than torch's own, whatever the chunk and the targets."""

import dataclasses
import weakref

import pytest
import torch
import torch.nn.functional as F

from deepwell.errors import ConfigError
from deepwell.formats.metrics import assert_bitwise_equal, assert_no_worse_than, sqnr_db
from deepwell.kernels.gemm import fp8 as gemm
from deepwell.kernels.gemm.fp8 import fp8_gemm
from deepwell.kernels.head import linear_cross_entropy as module
from deepwell.kernels.head.linear_cross_entropy import (
    HeadOptions,
    linear_cross_entropy,
    linear_cross_entropy_codes,
    linear_cross_entropy_loss,
    linear_cross_entropy_ref,
    weight_gradient,
)


@pytest.fixture
def device(everywhere):
    """Interpreted, by the reference, and on a GPU where there is one."""
    return everywhere


def _inputs(device, t=24, d=32, v=80, dtype=torch.bfloat16):
    x, w = torch.randn(t, d, device=device), torch.randn(v, d, device=device) / d**0.5
    y = torch.randint(0, v, (t,), device=device)
    y[t // 3] = -100
    return x.to(dtype), w.to(dtype), y


def _torch(x, w, y, reduction):
    x, w = x.detach().clone().requires_grad_(), w.detach().clone().requires_grad_()
    loss = F.cross_entropy((x @ w.T).float(), y, reduction=reduction)
    return loss.detach(), *torch.autograd.grad(loss, (x, w))


@pytest.mark.parametrize(("reduction", "chunk"), [("mean", None), ("mean", 1), ("mean", 10), ("sum", 10)])
def test_loss_and_gradients_are_no_worse_than_torch(device, reduction, chunk):
    # One chunk, a ragged last one, one token each.
    x, w, y = _inputs(device)
    *got, db = linear_cross_entropy(x, w, y, head=HeadOptions(reduction=reduction), chunk=chunk)
    assert db is None
    exact = _torch(x.double(), w.double(), y, reduction)
    own = _torch(x, w, y, reduction)
    # dW is rounded once a chunk: that many independent roundings stand beside torch's one.
    factors = (2, 2, 2 * (-(-24 // (chunk or 24))) ** 0.5)
    for mine, theirs, ref, factor in zip(got, own, exact, factors, strict=True):
        assert_no_worse_than(mine, theirs, ref.float(), factor=factor)


def test_fp32_equals_the_reference(device):
    x, w, y = _inputs(device, dtype=torch.float32)
    got, wanted = linear_cross_entropy(x, w, y, chunk=7), linear_cross_entropy_ref(x, w, y)
    for mine, ref in zip(got[:3], wanted[:3], strict=True):
        torch.testing.assert_close(mine, ref, rtol=2e-5, atol=2e-6)


def test_all_targets_ignored_and_no_tokens_are_torchs_nan(device):
    # The mean of nothing is NaN in torch too; the sum is zero.
    x, w, y = _inputs(device)
    ignored = torch.full_like(y, -100)
    assert linear_cross_entropy(x, w, ignored)[0].isnan()
    loss, dx, dw, _ = linear_cross_entropy(x, w, ignored, head=HeadOptions(reduction="sum"))
    assert loss == 0 and not dx.any() and not dw.any()
    loss, dx, dw, _ = linear_cross_entropy(x[:0], w, y[:0], head=HeadOptions(reduction="sum"))
    assert loss == 0 and dx.shape == (0, 32) and not dw.any()


@pytest.mark.parametrize("fp8", [False, True])
def test_a_batch_without_targets_leaves_the_gradients_zero_as_torchs_does(device, fp8):
    # Its mean is NaN; a loop that skips such a loss, or only logs it, must not find NaN in its weights afterwards.
    x, w, y = _inputs(device, t=32, d=32, v=48)
    b = torch.randn(48, device=device).bfloat16()
    loss, dx, dw, db = linear_cross_entropy(x, w, torch.full_like(y, -100), bias_V=b, head=HeadOptions(fp8=fp8))
    assert loss.isnan() and not dx.any() and not dw.any() and not db.any()


def test_another_ignore_index_counts(device):
    x, w, y = _inputs(device, dtype=torch.float32)
    y[y == -100] = 5
    got = linear_cross_entropy(x, w, y, head=HeadOptions(ignore_index=5)).loss
    torch.testing.assert_close(got, F.cross_entropy(x @ w.T, y, ignore_index=5), rtol=1e-5, atol=0)


@pytest.mark.parametrize("chunk", [None, 16])
def test_fp8_keeps_the_loss_and_the_gradients_direction(device, chunk):
    x, w, y = _inputs(device, t=32, d=64, v=96)
    loss, dx, dw, _ = linear_cross_entropy(x, w, y, head=HeadOptions(fp8=True), chunk=chunk)
    ref, ref_dx, ref_dw, _ = linear_cross_entropy_ref(x, w, y)
    assert abs(loss - ref) < 5e-3 * ref
    for mine, theirs in ((dx, ref_dx), (dw, ref_dw)):
        assert sqnr_db(theirs, mine) > 20  # a layer's gradients (docs/numerics.md)


@pytest.mark.parametrize("how", ["bf16", "fp8", "fp8, bf16 forward", "fp8, capped"])
def test_an_odd_vocabulary_is_that_of_a_weight_padded_by_hand(device, how):
    # Padded words under a bias of -inf have no probability: loss and gradients of the others are those without them.
    x, w, y = _inputs(device, t=32, d=32, v=77)
    b = torch.randn(77, device=device).bfloat16()
    cap = 4.0 if how == "fp8, capped" else None
    head = HeadOptions(fp8=how != "bf16", bf16_forward=how == "fp8, bf16 forward", soft_cap=cap)
    got = linear_cross_entropy(x, w, y, bias_V=b, head=head, chunk=16)
    if cap is not None:  # a cap would lift -inf
        ref = linear_cross_entropy_ref(x, w, y, bias_V=b, head=head)
        assert abs(got.loss - ref.loss) < 5e-3 * ref.loss and sqnr_db(ref.dw, got.dw) > 20 < sqnr_db(ref.dx, got.dx)
        return
    more = 128 - 77
    padded_b = torch.nn.functional.pad(b, (0, more), value=float("-inf"))
    wanted = linear_cross_entropy(x, F.pad(w, (0, 0, 0, more)), y, bias_V=padded_b, head=head, chunk=16)
    assert [tuple(t.shape) for t in got] == [(), (32, 32), (77, 32), (77,)] and all(t.is_contiguous() for t in got)
    torch.testing.assert_close(got.loss, wanted.loss, rtol=1e-6, atol=0)
    for mine, theirs in zip(got[1:], (wanted.dx, wanted.dw[:77], wanted.db[:77]), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2**-7, atol=1e-6)
    alone = linear_cross_entropy_loss(x, w, y, bias_V=b, head=head)
    torch.testing.assert_close(alone, got.loss, rtol=1e-6, atol=0)


def test_a_head_in_parts_has_the_bf16_loss_and_fp8_gradients(device):
    x, w, y = _inputs(device, t=32, d=64, v=96)
    bf16, parts = (
        linear_cross_entropy(x, w, y, head=head) for head in (HeadOptions(), HeadOptions(fp8=True, bf16_forward=True))
    )
    assert_bitwise_equal(parts.loss, bf16.loss)
    for mine, theirs in ((parts.dx, bf16.dx), (parts.dw, bf16.dw)):
        assert 20 < sqnr_db(theirs, mine) < 45  # E5M2: they did run in FP8
    assert_bitwise_equal(linear_cross_entropy_loss(x, w, y, head=HeadOptions(fp8=True, bf16_forward=True)), parts.loss)


# A bias (Phi), a factor (Cohere, Granite), a soft cap (Gemma 2), all of them with a factor that turns the logits over.
HEADS = {
    "bias": (True, HeadOptions()),
    "scale": (False, HeadOptions(logit_scale=0.25)),
    "cap": (False, HeadOptions(soft_cap=4.0)),
    "all": (True, HeadOptions(logit_scale=-1.5, soft_cap=5.0, reduction="sum")),
}


@pytest.mark.parametrize(("name", "chunk"), [*((name, 10) for name in HEADS), ("all", None)])
def test_bias_scale_and_cap_are_no_worse_than_torch(device, name, chunk):
    has_bias, head = HEADS[name]
    x, w, y = _inputs(device)
    x = x * 3  # logits that a cap bends
    b = torch.randn(80, device=device).bfloat16() if has_bias else None

    def plain(*tensors):
        leaves = [t.detach().clone().requires_grad_() for t in tensors if t is not None]
        z = F.linear(*leaves) * head.logit_scale
        z = torch.tanh(z / head.soft_cap) * head.soft_cap if head.soft_cap else z
        z = z.float() if z.dtype is torch.bfloat16 else z
        loss = F.cross_entropy(z, y, reduction=head.reduction)
        return loss.detach(), *torch.autograd.grad(loss, leaves)

    got = [t for t in linear_cross_entropy(x, w, y, bias_V=b, head=head, chunk=chunk) if t is not None]
    own = plain(x, w, b)
    exact = plain(*(t if t is None else t.double() for t in (x, w, b)))
    # The loss is one number, which torch may hit by luck: it is held to what rounding x W^T to bf16 can do to it.
    largest = (x.double() @ w.double().T).abs().max() * abs(head.logit_scale)
    count = 1 if head.reduction == "mean" else len(y)
    assert abs(got[0] - exact[0]) <= 2**-9 * largest * count
    for mine, theirs, ref in zip(got[1:], own[1:], exact[1:], strict=True):
        assert_no_worse_than(mine, theirs, ref.float(), factor=2 if chunk is None else 2 * 3**0.5)
    alone = linear_cross_entropy_loss(x, w, y, bias_V=b, head=head)
    torch.testing.assert_close(alone, got[0], rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", HEADS)
def test_fp8_takes_bias_scale_and_cap(device, name):
    has_bias, head = HEADS[name]
    x, w, y = _inputs(device, t=32, d=64, v=96)
    b = torch.randn(96, device=device).bfloat16() if has_bias else None
    head = dataclasses.replace(head, fp8=True)
    got = linear_cross_entropy(x, w, y, bias_V=b, head=head, chunk=16)
    ref = linear_cross_entropy_ref(x, w, y, bias_V=b, head=head)
    assert abs(got.loss - ref.loss) < 1e-2 * ref.loss
    for mine, theirs in zip(got[1:], ref[1:], strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            assert sqnr_db(theirs, mine) > 20


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("wanted", ["dx", "dw", "db"])
def test_only_the_gradients_that_are_wanted_are_made(device, wanted, fp8):
    x, w, y = _inputs(device, t=32, d=32, v=48)
    b = torch.randn(48, device=device).bfloat16()
    whole = linear_cross_entropy(x, w, y, bias_V=b, head=HeadOptions(fp8=fp8))
    only = {"dx": False, "dw": False, "db": False, wanted: True}
    got = linear_cross_entropy(x, w, y, bias_V=b, head=HeadOptions(fp8=fp8, **only))
    for name, mine, theirs in zip(("loss", "dx", "dw", "db"), got, whole, strict=True):
        assert (mine is None) == (name not in ("loss", wanted))
        if mine is not None:
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("chunk", [None, 16])
def test_the_codes_of_an_fp8_head_make_its_weights_gradient(device, chunk):
    x, w, y = _inputs(device, t=32, d=64, v=96)
    whole = linear_cross_entropy(x, w, y, head=HeadOptions(fp8=True), chunk=chunk)
    loss, dx, codes, db = linear_cross_entropy_codes(x, w, y, head=HeadOptions(fp8=True), chunk=chunk)
    assert db is None and torch.equal(loss, whole.loss) and torch.equal(dx, whole.dx)
    assert torch.equal(weight_gradient(codes, dtype=w.dtype), whole.dw)
    for grad in (1.0, -0.125, 1024.0):  # in a scale, not in dW: exact for powers of two
        got = weight_gradient(codes, torch.tensor(grad, device=device), dtype=w.dtype)
        assert torch.equal(got, whole.dw * grad)
    # A small number, far from losing digits: nothing is flushed to zero.
    got = weight_gradient(codes, torch.tensor(2.0**-80, device=device), dtype=torch.float32)
    assert got.count_nonzero() == whole.dw.count_nonzero()


def test_a_frozen_fp8_head_has_no_codes(device):
    x, w, y = _inputs(device, t=32, d=32, v=48)
    b = torch.randn(48, device=device).bfloat16()
    made = linear_cross_entropy_codes(x, w, y, bias_V=b, head=HeadOptions(fp8=True, dw=False))
    assert made.codes is None and made.dx is not None and made.db is not None


def test_a_bf16_head_has_no_codes():
    with pytest.raises(ConfigError, match=r"head\.fp8 is False"):
        linear_cross_entropy_codes(*_inputs("cpu"), head=HeadOptions())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"reduction": "none"}, "reduction is 'none'"),
        ({"logit_scale": 0.0}, "logit_scale is 0.0"),
        ({"logit_scale": float("nan")}, "logit_scale is nan"),
        ({"soft_cap": 0.0}, "soft_cap is 0.0"),
        ({"soft_cap": -30.0}, "soft_cap is -30.0"),
    ],
)
def test_a_head_that_cannot_be_is_named(arguments, message):
    with pytest.raises(ConfigError, match=message):
        HeadOptions(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda x, w, y: ((x, w[:, :8], y), {}), "equal width"),
        (lambda x, w, y: ((x, w, y[:3]), {}), r"target_T has shape \(3,\)"),
        (lambda x, w, y: ((x, w, y), {"bias_V": x[0]}), r"bias_V has shape \(32,\)"),
        (lambda x, w, y: ((x[:5], w, y[:5]), {"head": HeadOptions(fp8=True)}), "fp8 takes multiples of 16"),
    ],
)
def test_wrong_arguments_are_named(device, arguments, message):
    args, kwargs = arguments(*_inputs(device))
    with pytest.raises(ConfigError, match=message):
        linear_cross_entropy(*args, **kwargs)


def test_fp8_keeps_the_gradient_of_improbable_words(device):
    # Words of probability 2^-20 beside a target that gets none: E4M3 under one scale a row would drop them, and words
    # that nothing pushes down rise until they spoil the loss (a held-out loss 2% higher after 13M tokens).
    x = torch.zeros(16, 16, dtype=torch.bfloat16, device=device)
    x[:, 0] = 1
    w = torch.zeros(64, 16, dtype=torch.bfloat16, device=device)
    w[1:, 0] = -14
    y = torch.ones(16, dtype=torch.int64, device=device)
    _, _, dw, _ = linear_cross_entropy(x, w, y, head=HeadOptions(fp8=True))
    ref = linear_cross_entropy_ref(x, w, y).dw
    assert ref[2:, 0].max() < 2**-20
    torch.testing.assert_close(dw[2:, 0], ref[2:, 0], rtol=0.13, atol=0)


class OfAda:
    """fp8_gemm as torch has it off Hopper: with row scales no result but bf16. It notes what was written."""

    def __init__(self):
        self.row_results, self.results = [], []

    def __call__(self, a, scale_a, b, scale_b, *, out_dtype=torch.bfloat16, **how):
        if any(scale is not None and scale.numel() > 1 for scale in (scale_a, scale_b)):
            self.row_results.append(out_dtype)
            if out_dtype is not torch.bfloat16:
                raise ValueError("Only bf16 high precision output types are supported for row-wise scaling.")
        else:
            self.results.append(out_dtype)
        return gemm.fp8_gemm(a, scale_a, b, scale_b, out_dtype=out_dtype, **how)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("capability", [(8, 9), (10, 0), (12, 0)], ids=str)
def test_an_fp8_head_of_an_fp32_model_runs_where_row_products_are_bf16_alone(capability, dtype, monkeypatch):
    x, w, y = _inputs("cpu", t=48, dtype=dtype)
    b = torch.randn(80, dtype=dtype)
    head = HeadOptions(fp8=True)
    exact = linear_cross_entropy_ref(x, w, y, bias_V=b)
    ada = OfAda()
    monkeypatch.setattr(gemm, "_capability", lambda device: capability)
    for name in ("fp8_gemm", "fastest_fp8_gemm"):
        monkeypatch.setattr(module, name, ada)
    got = linear_cross_entropy(x, w, y, bias_V=b, head=head, chunk=16)
    alone = linear_cross_entropy_loss(x, w, y, bias_V=b, head=head)
    # Logits and dx of three chunks, and db, which is always made in bf16; dW; the logits of the loss alone.
    assert ada.results == [torch.bfloat16] * 7 + [dtype, torch.bfloat16] and not ada.row_results
    # What the caller gets has the dtypes of its own tensors, and is as good as FP8 is.
    assert [grad.dtype for grad in got[1:]] == [dtype] * 3
    torch.testing.assert_close(got.loss, exact.loss, rtol=0.02, atol=0)
    torch.testing.assert_close(alone, got.loss, rtol=1e-3, atol=0)
    for mine, ref in zip(got[1:], exact[1:], strict=True):
        assert sqnr_db(ref, mine) > 20  # a layer's gradients (docs/numerics.md)


# ---- scales of rows are left out of the products ----


def _scaled_by_rows(q, scale, qw, w_scale, *, dtype, fast=True):
    """The product as it was made before: the rows' scales in it."""
    return fp8_gemm(q, scale, qw, w_scale, out_dtype=dtype, fast=fast), None


def _scaled_after(q, scale, qw, w_scale, *, dtype, fast=True):
    """As it is made now, multiplied before anybody reads it."""
    return (fp8_gemm(q, None, qw, w_scale, out_dtype=dtype, fast=fast).float() * scale[:, None]).to(dtype), None


def _assert_same(got, wanted):
    """Of equal bits, but for the sign of a NaN."""
    for mine, theirs in zip(got, wanted, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            assert torch.equal(mine.isnan(), theirs.isnan())
            assert_bitwise_equal(mine.nan_to_num(nan=0.0), theirs.nan_to_num(nan=0.0))


def _before(device):
    """How products were made before; on a GPU, which adds another product's terms in another order, how they are."""
    return _scaled_after if device == "cuda" else _scaled_by_rows


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, torch.bfloat16) for name in ("plain", *HEADS)), ("plain", torch.float32)]
)
def test_scales_left_to_the_reader_change_no_bit(device, name, dtype, monkeypatch):
    has_bias, head = HEADS.get(name, (False, HeadOptions()))
    head = dataclasses.replace(head, fp8=True)
    x, w, y = _inputs(device, t=32, d=32, v=48, dtype=dtype)
    x[0] = 0
    x[1] *= 2.0**-90  # its logits are as nothing, its gradient is not
    x[2] *= 2.0**-124  # below the smallest normal number
    x[3] *= 2.0**12
    x[4] = 16 * w[y[4]]  # nearly sure of its target
    b = torch.randn(48, device=device).to(dtype) if has_bias else None
    got = linear_cross_entropy(x, w, y, bias_V=b, head=head, chunk=16)
    alone = linear_cross_entropy_loss(x, w, y, bias_V=b, head=head)
    assert got.dx[:3].count_nonzero(1).min() > 0
    monkeypatch.setattr(module, "_product", _before(device))
    _assert_same(got, linear_cross_entropy(x, w, y, bias_V=b, head=head, chunk=16))
    _assert_same([alone], [linear_cross_entropy_loss(x, w, y, bias_V=b, head=head)])


def test_rows_that_hold_inf_or_nan_are_nan_as_before(device, monkeypatch):
    # Whole rows of dx; a row that nobody counts has no loss and no gradient even then.
    x, w, y = _inputs(device, t=32, d=32, v=48)
    x[1, 3], x[2, 5], x[10, 7] = float("inf"), float("nan"), float("nan")
    assert y[10] == -100
    head = HeadOptions(fp8=True, reduction="sum")
    made = linear_cross_entropy_codes(x, w, y, head=head)
    broken = [row in (1, 2) for row in range(32)]
    assert made.dx.isnan().all(1).tolist() == made.dx.isnan().any(1).tolist() == broken
    assert made.loss.isnan() and not made.dx[10].any()
    monkeypatch.setattr(module, "_product", _before(device))
    before = linear_cross_entropy_codes(x, w, y, head=head)
    _assert_same([made.loss, made.dx, made.codes.g_scale], [before.loss, before.dx, before.codes.g_scale])
    _assert_same([made.codes.qg_VT.float()], [before.codes.qg_VT.float()])


def test_gradients_below_bf16s_normal_numbers_are_off_by_a_step_at_most(monkeypatch):
    # Rows that are sure of their target by 80: du is at most 2^-115, its scale the smallest there is, and dx among the
    # numbers that bf16 has in steps of 2^-133. These are rounded twice: to eight digits, then to that step.
    x = torch.zeros(16, 64, dtype=torch.bfloat16)
    x[:, 0], x[:, 1] = 80, torch.linspace(1, 3, 16)
    w = (torch.randn(64, 64) / 2**14).bfloat16()
    w[:, 0], w[:, 1] = 0, -torch.randn(64).abs()
    w[5, :2] = torch.tensor([1.0, 0.0])
    y = torch.full((16,), 5)
    head = HeadOptions(fp8=True, reduction="sum")
    got = linear_cross_entropy(x, w, y, head=head).dx[:, 2:]
    monkeypatch.setattr(module, "_product", _scaled_by_rows)
    before = linear_cross_entropy(x, w, y, head=head).dx[:, 2:]
    assert 0 < before.abs().max() < 2.0**-126
    assert (got.double() - before.double()).abs().max() == 2.0**-133


@pytest.mark.parametrize("scale", [float("nan"), *(2.0**n for n in (-127, -126, -30, 0, 119))])
def test_every_scale_of_a_row_is_one_of_bf16(scale):
    # As a row of zeros has it, as the smallest and the largest rows have it, as a broken row has it.
    product, out = torch.randn(2, 8).bfloat16(), torch.empty(2, 8).bfloat16()
    module._to_place(product, torch.tensor([scale, 1.0]), out)
    _assert_same([out], [torch.stack([(product[0].float() * scale).bfloat16(), product[1]])])


def test_products_of_an_fp8_head_have_one_scale_and_one_chunk_of_logits_is_held(monkeypatch):
    # One scale: cuBLASLt's faster kernels. What multiplies the rows makes no second [C, V] beside the first.
    x, w, y = _inputs("cpu", t=48, d=64, v=96)
    rows_scaled, logits = [], []

    def noting(a, scale_a, b, scale_b, **how):
        rows_scaled.append(any(scale is not None and scale.numel() > 1 for scale in (scale_a, scale_b)))
        held = [z for z in logits if z() is not None]
        made = fp8_gemm(a, scale_a, b, scale_b, **how)
        if made.shape == (16, 96):
            assert not held
            logits.append(weakref.ref(made))
        return made

    for name in ("fp8_gemm", "fastest_fp8_gemm"):
        monkeypatch.setattr(module, name, noting)
    monkeypatch.setattr(module, "_rows_of_a_chunk", lambda *_: 16)
    linear_cross_entropy(x, w, y, head=HeadOptions(fp8=True))
    linear_cross_entropy_loss(x, w, y, head=HeadOptions(fp8=True))
    assert rows_scaled == [False] * 10 and len(logits) == 6  # logits of six chunks, dx of three, dW


def test_an_fp16_head_has_the_scales_in_its_products(device):
    # Without them they would be beyond 65504: those of du in E5M2 nearly always.
    x, w, y = _inputs(device, t=32, d=64, v=96, dtype=torch.float16)
    got = linear_cross_entropy(x, w * 4, y, head=HeadOptions(fp8=True), chunk=16)
    ref = linear_cross_entropy_ref(x, w * 4, y)
    assert abs(got.loss - ref.loss) < 2e-2 * ref.loss
    for mine, theirs in zip(got[1:3], ref[1:3], strict=True):
        assert mine.dtype == torch.float16 and sqnr_db(theirs, mine) > 20


def test_on_hopper_an_fp8_head_keeps_the_models_dtype(monkeypatch):
    x, w, y = _inputs("cpu", t=48, dtype=torch.float32)
    before = linear_cross_entropy(x, w, y, head=HeadOptions(fp8=True))
    monkeypatch.setattr(gemm, "_capability", lambda device: (9, 0))
    after = linear_cross_entropy(x, w, y, head=HeadOptions(fp8=True))
    assert all(torch.equal(mine, ref) for mine, ref in zip(after[:3], before[:3], strict=True))


def test_without_tokens_the_weights_gradient_is_zero(monkeypatch):
    # The first chunk writes dW, and there is none.
    monkeypatch.setattr(torch, "empty_like", lambda x: torch.full_like(x, float("nan")))
    w = torch.randn(32, 16).bfloat16()
    made = module.linear_cross_entropy(w.new_empty(0, 16), w, torch.empty(0, dtype=torch.long))
    assert made.dw is not None and torch.equal(made.dw, torch.zeros_like(w))
