"""Cross entropy's compiled kernel, executed instruction by instruction: its own PTX, which no interpreter sees."""

from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch

import ptx_machine
from deepwell.formats.metrics import assert_bitwise_equal
from deepwell.kernels.head import cross_entropy as C
from ptx_machine import Executed, U

E5M2 = torch.float8_e5m2
V = 1104  # two blocks of 1024, the second with an end, in whole vectors


# ---- what the machine does not know ----


def _flushed(x):
    return np.where(np.abs(x) < 2.0**-126, 0.0, x)


def _fused(a, b, c):
    """The machine's, and infinities, which it takes for NaN."""
    plain = ptx_machine._exactly(a) * ptx_machine._exactly(b) + ptx_machine._exactly(c)
    return np.where(np.isfinite(plain), ptx_machine._fused(a, b, c), plain.astype(np.float32))


def _e5m2(x):
    numbers = torch.from_numpy(ptx_machine._float(x).copy()).clamp(-57344, 57344)
    return numbers.to(E5M2).view(torch.uint8).numpy().astype(U)


@pytest.fixture
def executed(monkeypatch):
    of_floats = ptx_machine._of_floats
    for name, run in {
        "ex2.approx.f32": of_floats(lambda a: np.exp2(a.astype(np.float64))),
        "ex2.approx.ftz.f32": of_floats(lambda a: _flushed(np.exp2(_flushed(a.astype(np.float64))))),
        "fma.rn.f32": of_floats(_fused),
        "fma.rn.ftz.f32": of_floats(_fused),
        "cvt.rn.f32.s32": lambda a: ptx_machine._word(ptx_machine._signed(a, 32).astype(np.float32)),
        "cvt.rn.satfinite.e5m2x2.f32": lambda a, b: (_e5m2(a) << U(8)) | _e5m2(b),
    }.items():
        monkeypatch.setitem(ptx_machine._NAMED, name, run)
    monkeypatch.setattr(C, "_cross_entropy_kernel", Executed(C._cross_entropy_kernel))
    monkeypatch.setattr(C, "on_device", lambda x: nullcontext())
    monkeypatch.setattr(C, "runs_ptx", lambda x, kernel: True)
    return partial(C._launch, grad_scale=torch.tensor(0.125), config=C.LossConfig(block=1024, num_warps=2), vocab=V)


# ---- tests ----


def _logits_and_factors():
    """Factors from that of a row of zeros to the largest; one row with nothing beside its target, two with NaN."""
    factor = torch.tensor([*(2.0**n for n in (-127, -126, -100, -9, 0, 6, 60, 119)), float("nan"), float("nan")])
    x = (torch.randn(len(factor), V) * 3).bfloat16()
    targets = torch.randint(0, V, (len(factor),))
    given = (x.float() / factor.nan_to_num(nan=1.0).clamp(min=2.0**-110)[:, None]).bfloat16()
    given[:2] = 0
    given[3, :8] = given[6] = -float("inf")
    given[6, targets[6]] = 2.0**-60
    targets[4] = targets[9] = -100
    return given, factor, targets


@pytest.mark.parametrize("bent", ["plain", "bias", "scale"])
def test_codes_and_loss_are_those_of_logits_multiplied_beforehand(executed, bent):
    given, factor, targets = _logits_and_factors()
    bias = torch.randn(V).bfloat16() if bent == "bias" else None
    options = C.LossOptions(gradient="fp8", fp8=E5M2, logit_scale=0.7 if bent == "scale" else 1.0)
    multiplied = (given.float() * factor[:, None]).bfloat16()
    got = executed(given, targets, bias, factor, options=options)
    wanted = executed(multiplied, targets, bias, None, options=options)
    ref = C.cross_entropy_ref(given, targets, bias, torch.tensor(0.125), options, factor)
    # Of a row's NaN the machine's bits are not the reference's.
    broken = [row == 8 for row in range(len(factor))]
    for mine in (got.loss, got.scale, got.q[:, 0].float()):
        assert mine.isnan().tolist() == broken
    for name in ("loss", "q", "scale"):
        kept = [getattr(losses, name)[~torch.tensor(broken)] for losses in (got, wanted, ref)]
        assert_bitwise_equal(kept[0], kept[1], name)
        if name == "loss":
            torch.testing.assert_close(kept[0], kept[2], rtol=1e-6, atol=0)
        else:
            assert (kept[0].float() != kept[2].float()).float().mean() <= 1e-3  # a number at the edge of two codes


def test_the_gradient_is_that_of_logits_multiplied_beforehand(executed):
    given, factor, targets = _logits_and_factors()
    got = executed(given, targets, None, factor, options=C.LossOptions(gradient="new"))
    wanted = executed(
        (given.float() * factor[:, None]).bfloat16(), targets, None, None, options=C.LossOptions(gradient="new")
    )
    for name in ("loss", "grad"):
        mine, theirs = getattr(got, name), getattr(wanted, name)
        assert torch.equal(mine.isnan(), theirs.isnan())
        assert_bitwise_equal(mine.nan_to_num(nan=0.0), theirs.nan_to_num(nan=0.0), name)
    assert not got.grad[[4, 9]].any()
