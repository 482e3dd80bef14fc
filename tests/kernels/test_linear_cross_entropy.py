"""Head and loss in chunks: loss and gradients no worse than torch's own, whatever the chunk and the targets."""

import pytest
import torch
import torch.nn.functional as F

from deepwell.errors import ConfigError
from deepwell.formats.metrics import assert_no_worse_than, sqnr_db
from deepwell.kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_ref


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


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("chunk", [None, 24, 10, 1])
def test_loss_and_gradients_are_no_worse_than_torch(device, reduction, chunk):
    # One chunk, a ragged last one, one token each.
    x, w, y = _inputs(device)
    got = linear_cross_entropy(x, w, y, reduction=reduction, chunk=chunk)
    exact = _torch(x.double(), w.double(), y, reduction)
    own = _torch(x, w, y, reduction)
    # dW is rounded once a chunk: that many independent roundings stand beside torch's one.
    factors = (2, 2, 2 * (-(-24 // (chunk or 24))) ** 0.5)
    for mine, theirs, ref, factor in zip(got, own, exact, factors, strict=True):
        assert_no_worse_than(mine, theirs, ref.float(), factor=factor)


def test_fp32_equals_the_reference(device):
    x, w, y = _inputs(device, dtype=torch.float32)
    for mine, ref in zip(linear_cross_entropy(x, w, y, chunk=7), linear_cross_entropy_ref(x, w, y), strict=True):
        torch.testing.assert_close(mine, ref, rtol=2e-5, atol=2e-6)


def test_all_targets_ignored_and_no_tokens_are_torchs_nan(device):
    # The mean of nothing is NaN in torch too; the sum is zero.
    x, w, y = _inputs(device)
    ignored = torch.full_like(y, -100)
    assert linear_cross_entropy(x, w, ignored)[0].isnan()
    loss, dx, dw = linear_cross_entropy(x, w, ignored, reduction="sum")
    assert loss == 0 and not dx.any() and not dw.any()
    loss, dx, dw = linear_cross_entropy(x[:0], w, y[:0], reduction="sum")
    assert loss == 0 and dx.shape == (0, 32) and not dw.any()


def test_another_ignore_index_counts(device):
    x, w, y = _inputs(device, dtype=torch.float32)
    y[y == -100] = 5
    got = linear_cross_entropy(x, w, y, ignore_index=5)[0]
    torch.testing.assert_close(got, F.cross_entropy(x @ w.T, y, ignore_index=5), rtol=1e-5, atol=0)


@pytest.mark.parametrize("chunk", [None, 16])
def test_fp8_keeps_the_loss_and_the_gradients_direction(device, chunk):
    x, w, y = _inputs(device, t=48, d=64, v=96)
    loss, dx, dw = linear_cross_entropy(x, w, y, fp8=True, chunk=chunk)
    ref, ref_dx, ref_dw = linear_cross_entropy_ref(x, w, y)
    assert abs(loss - ref) < 5e-3 * ref
    for mine, theirs in ((dx, ref_dx), (dw, ref_dw)):
        assert sqnr_db(theirs, mine) > 20  # a layer's gradients (docs/numerics.md)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda x, w, y: ((x, w, y), {"reduction": "none"}), "reduction is 'none'"),
        (lambda x, w, y: ((x, w[:, :8], y), {}), "equal width"),
        (lambda x, w, y: ((x, w, y[:3]), {}), r"target_T has shape \(3,\)"),
        (lambda x, w, y: ((x[:5], w, y[:5]), {"fp8": True}), "fp8 takes multiples of 16"),
    ],
)
def test_wrong_arguments_are_named(device, arguments, message):
    args, kwargs = arguments(*_inputs(device))
    with pytest.raises(ConfigError, match=message):
        linear_cross_entropy(*args, **kwargs)
