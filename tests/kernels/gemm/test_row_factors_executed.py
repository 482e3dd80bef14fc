"""Kernels with factors of rows, executed instruction by instruction: they multiply by PTX that no interpreter sees."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch

import ptx_machine
from deepwell.formats.metrics import assert_bitwise_equal
from deepwell.kernels.activation import swiglu as S
from deepwell.kernels.norm import rms_norm as N
from deepwell.kernels.rope import rope as R
from ptx_machine import Executed

E4M3 = torch.float8_e4m3fn
# From that of a tiny row to a large one; results stay above the subnormal ones.
FACTORS = torch.tensor([2.0**n for n in (-100, -20, 0, 7, 40)])


@pytest.fixture
def executed(monkeypatch):
    of_floats = ptx_machine._of_floats
    for name, run in {
        "add.ftz.f32": of_floats(lambda a, b: a + b),
        "mul.ftz.f32": of_floats(lambda a, b: a * b),
        "ex2.approx.ftz.f32": of_floats(lambda a: np.exp2(a.astype(np.float64))),
        "rcp.approx.ftz.f32": of_floats(lambda a: 1.0 / a.astype(np.float64)),
        "rsqrt.approx.f32": of_floats(lambda a: 1.0 / np.sqrt(a.astype(np.float64))),
        "rsqrt.approx.ftz.f32": of_floats(lambda a: 1.0 / np.sqrt(a.astype(np.float64))),
    }.items():
        monkeypatch.setitem(ptx_machine._NAMED, name, run)
    for module, kernels in {
        N: ("_norm_kernel", "_norm_backward_kernel", "sum_programs_kernel"),
        R: ("_rope_kernel",),
        S: ("_swiglu_kernel", "_swiglu_backward_kernel"),
    }.items():
        for kernel in kernels:
            monkeypatch.setattr(module, kernel, Executed(getattr(module, kernel)))
        monkeypatch.setattr(module, "on_device", lambda x: nullcontext())
        monkeypatch.setattr(module, "runs_ptx", lambda x, kernel: True)
        monkeypatch.setattr(module, "runs_kernel", lambda x, kernel: True)
    monkeypatch.setattr(N, "num_sms", lambda x: 2)


def make(*shape):
    return torch.randn(shape).bfloat16()


def times(x, factor):
    return (x.float() * factor[:, None]).bfloat16()


def check(got, wanted):
    assert any(one is not None for one in got)
    for one, other in zip(got, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert_bitwise_equal(one, other)


@pytest.mark.usefixtures("executed")
def test_a_norm_of_a_sum():
    x, r, w = make(5, 256), make(5, 256), make(256)
    r[0] = 0
    options = N.NormOptions(fp8=E4M3)
    got = N.norm(x, w, residual_TD=r, factor_T=FACTORS, options=options)
    assert_bitwise_equal(got.total, (times(x, FACTORS).float() + r.float()).bfloat16())
    check(got, N.norm(times(x, FACTORS), w, residual_TD=r, options=options))


@pytest.mark.usefixtures("executed")
def test_the_gradient_of_a_norm():
    dy, x, w, dr = make(5, 256), make(5, 256), make(256), make(5, 256)
    rstd = torch.rand(5) + 0.5
    options = N.NormOptions(fp8=E4M3)
    got = N.norm_backward(dy, x, w, rstd, d_residual_TD=dr, factor_T=FACTORS, options=options)
    check(got, N.norm_backward(times(dy, FACTORS), x, w, rstd, d_residual_TD=dr, options=options))


@pytest.mark.usefixtures("executed")
def test_swiglu_both_ways():
    gate_up, dh = make(5, 2 * 256), make(5, 256)
    options = S.GluOptions(fp8=E4M3, recompute_h=True)
    given, factors = times(gate_up, 1 / FACTORS), S.RowFactors(gate_up=FACTORS, dh=FACTORS.flip(0))
    scaled, scaled_dh = times(given, FACTORS), times(dh, FACTORS.flip(0))
    check(S.swiglu(given, factors=factors._replace(dh=None), options=options), S.swiglu(scaled, options=options))
    got = S.swiglu_backward(dh, given, factors=factors, options=options)
    check(got, S.swiglu_backward(scaled_dh, scaled, options=options))


@pytest.mark.usefixtures("executed")
@pytest.mark.parametrize("rotated", [32, 16])
def test_a_rotation_of_merged_rows(rotated):
    heads = R.Heads(q=4, k=2, v=2)
    qkv, cos, sin = make(1, 5, 8 * 32), make(5, rotated), make(5, rotated)
    got = R.rope_qkv(qkv, cos, sin, heads=heads, factor_T=FACTORS)
    check(got, R.rope_qkv(times(qkv[0], FACTORS)[None], cos, sin, heads=heads))
