"""Grouped FP8 products: what each expert's own product gives, and how far FP8 is from it."""

import pytest
import torch

from deepwell.errors import ConfigError, UnsupportedError
from deepwell.formats.metrics import sqnr_db
from deepwell.kernels.experts import grouped_gemm as GG
from deepwell.kernels.experts.quantize_weights import quantize_experts
from deepwell.kernels.gemm.fp8 import fp8_gemm_ref
from deepwell.kernels.quantize.fp8 import quantize_rows_ref
from deepwell.kernels.quantize.wgrad_operands import wgrad_operands
from deepwell.kernels.tune.choose import why_rejected
from deepwell.kernels.tune.problem import Problem
from deepwell.kernels.tune.verify import verify

E4M3 = torch.float8_e4m3fn
# Of sums in Hopper's own accumulator at these lengths; the reference reaches more than 100 dB.
FAST_DB = 40


@pytest.fixture
def device(everywhere):
    """Interpreted, by the reference, and on a GPU where there is one."""
    return everywhere


def problem(device, ends=(48, 64, 208, 256), k=160, n=96):
    """Codes of x [P, K], w [E, N, K] and dy [P, N]; rows and experts of different magnitudes."""
    rows = ends[-1]
    x = torch.randn(rows, k) * torch.exp2(torch.randint(-3, 4, (rows, 1)).float())
    w = torch.randn(len(ends), n, k) * torch.exp2(torch.arange(len(ends)).float())[:, None, None]
    dy = torch.randn(rows, n) * 1e-3
    made = (*quantize_rows_ref(x), *quantize_experts(w), *quantize_rows_ref(dy))
    return [part.to(device) for part in (*made, torch.tensor(ends, dtype=torch.int32))]


def groups(ends):
    return zip([0, *ends.tolist()], ends.tolist(), strict=False)


def test_each_group_is_the_product_with_its_own_expert(device):
    q_x, s_x, q_w, s_w, _, _, ends = problem(device)
    got = GG.grouped_gemm(q_x, s_x, q_w, s_w, ends)
    assert got.dtype == torch.bfloat16
    for e, (begin, end) in enumerate(groups(ends)):
        ref = fp8_gemm_ref(q_x[begin:end], s_x[begin:end], q_w[e], s_w[e], out_dtype=torch.bfloat16)
        assert sqnr_db(ref.float(), got[begin:end].float()) > FAST_DB


def test_each_weights_gradient_is_the_product_over_its_own_rows(device):
    q_x, s_x, _, _, q_dy, s_dy, ends = problem(device)
    transposed = wgrad_operands(q_dy, s_dy, q_x, s_x, ends)
    got = GG.grouped_wgrad(*transposed, ends)
    assert got.shape == (4, 96, 160)
    for e, (begin, end) in enumerate(groups(ends)):
        dy, x = (q[begin:end].float() * s[begin:end, None] for q, s in ((q_dy, s_dy), (q_x, s_x)))
        # Codes move between scales that are powers of two: what is lost is what underflows under the group's scale.
        assert sqnr_db(dy.T @ x, got[e].float()) > FAST_DB


def test_rows_of_zeros_give_an_expert_exactly_no_gradient(device):
    # As the layout fills an expert that nobody chose.
    ends = torch.tensor([16, 48], dtype=torch.int32, device=device)
    x, dy = torch.randn(48, 32), torch.randn(48, 16)
    x[:16] = dy[:16] = 0
    rows = [t.to(device) for t in (*quantize_rows_ref(dy), *quantize_rows_ref(x))]
    got = GG.grouped_wgrad(*wgrad_operands(*rows, ends), ends)
    assert not got[0].any()
    assert got[1].any()


def test_a_nan_is_seen_in_its_row_and_in_its_experts_gradient_alone(device):
    q_x, s_x, q_w, s_w, q_dy, s_dy, ends = problem(device)
    s_x[70] = float("nan")
    bad = GG.grouped_gemm(q_x, s_x, q_w, s_w, ends).isnan().any(1)
    assert bad.nonzero().flatten().tolist() == [70]
    transposed = wgrad_operands(q_dy, s_dy, q_x, s_x, ends)
    assert GG.grouped_wgrad(*transposed, ends).isnan().flatten(1).any(1).tolist() == [False, False, True, False]


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (lambda x, sx, w, sw, e: GG.grouped_gemm(x.float(), sx, w, sw, e), "a_PK has dtype"),
        (lambda x, sx, w, sw, e: GG.grouped_gemm(x[:, :16], sx, w, sw, e), "K and E must agree"),
        (lambda x, sx, w, sw, e: GG.grouped_gemm(x, sx[:3], w, sw, e), "scale of a_PK"),
        (lambda x, sx, w, sw, e: GG.grouped_gemm(x, sx, w, sw[:, :3], e), "scale of b_ENK"),
        (lambda x, sx, w, sw, e: GG.grouped_wgrad(x.T, sx, x.T, sx, e), "scale of a_NP"),
        (lambda x, sx, w, sw, e: GG.grouped_wgrad(x.T, sx[:4], x[:8].T, sx[:4], e), "must be equal"),
    ],
)
def test_wrong_arguments_are_named(call, names):
    q_x, s_x, q_w, s_w, _, _, ends = problem("cpu")
    with pytest.raises(ConfigError, match=names):
        call(q_x, s_x, q_w, s_w, ends)


def test_sizes_that_no_kernel_takes_are_refused_on_a_gpu():
    for sizes in ((24, 16, 16), (16, 24, 16), (16, 16, 8), (0, 16, 16)):
        with pytest.raises(UnsupportedError, match="multiple of 16"):
            GG._check_sizes(*sizes)


def self_check() -> str:
    (candidate,) = GG.built_in("grouped_gemm")
    return verify(candidate, GG.cases(candidate, Problem(op="grouped_gemm", precision="fp8"))).reason


def test_the_self_check_passes_where_the_products_are_the_references():
    # On a CPU both sides are the reference; that a wrong product fails it is the next test.
    assert self_check() == ""


def test_the_self_check_finds_a_product_with_the_wrong_expert(monkeypatch):
    right = GG.grouped_gemm
    monkeypatch.setattr(GG, "grouped_gemm", lambda a, sa, b, sb, ends: right(a, sa, b.roll(1, 0), sb, ends))
    assert "wrong at product" in self_check()


def test_the_self_check_finds_a_nan_made_a_number(monkeypatch):
    right = GG.grouped_gemm
    monkeypatch.setattr(GG, "grouped_gemm", lambda *given: right(*given).nan_to_num(0.0))
    assert "hides a NaN of its input" in self_check()


@pytest.mark.gpu
def test_this_gpu_passes_the_self_check_or_says_why():
    reason = why_rejected("grouped_gemm", torch.device("cuda", 0))
    if torch.cuda.get_device_capability(0)[0] == 9:
        assert reason == ""
    else:
        assert isinstance(reason, str)
