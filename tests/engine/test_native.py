"""Blackwell's own formats in the engine: bound where their kernels proved themselves, and the emulation's numbers.

No Blackwell is needed: binding reads a capability, and on a CPU the native ops are their references.
"""

import pytest
import torch
from torch import nn

import deepwell as dw
from deepwell.engine import compile as compile_module
from deepwell.engine.binding import Target, bind
from deepwell.errors import ConfigError, UnsupportedError
from deepwell.formats.metrics import assert_bitwise_equal, sqnr_db
from deepwell.kernels.gemm.linear import low_precision_linear
from deepwell.kernels.gemm.schemes import parse_scheme
from deepwell.precision.gemm_format import precision

B200 = Target(kind="cuda", capability=(10, 0))
# Whole blocks of 32, and sizes that are multiples of nothing.
SHAPES = [(64, 96, 32), (37, 40, 24)]


class Two(nn.Module):
    """Two linears, so that one gradient passes through the other's dgrad."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.up = nn.Linear(64, 96, dtype=dtype)
        self.down = nn.Linear(96, 64, bias=False, dtype=dtype)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def bound(policy, device):
    ir = dw.capture(Two())
    return bind(ir, dw.PrecisionPolicy(policy).resolve(ir), device)


# ---- binding ----


@pytest.mark.parametrize("fmt", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("capability", [(10, 0), (10, 3), (12, 0)])
def test_block_scaled_formats_are_native_on_blackwell(fmt, capability):
    made = bound(fmt, Target(kind="cuda", capability=capability))
    assert {(b.binding, b.scheme) for b in made.bindings} == {("native", f"{fmt}_native")}
    assert all("block-scaled tensor cores" in b.reason for b in made.bindings)


def test_what_did_not_pass_its_self_check_is_not_bound_and_says_why():
    device = Target(kind="cuda", capability=(10, 0), unproven=(("mxfp8", "vendor: 12 dB"), ("nvfp4", "triton: NaN")))
    made = bound("mxfp8", device)
    assert {(b.binding, b.scheme) for b in made.bindings} == {("substitute", "fp8_row")}
    assert all("self-check" in b.reason and "12 dB" in b.reason for b in made.bindings)
    made = bound("nvfp4", device)
    assert {(b.binding, b.scheme) for b in made.bindings} == {("emulated", "emulate:nvfp4")}
    assert all("self-check" in b.reason and "triton: NaN" in b.reason for b in made.bindings)


def test_hopper_and_a_cpu_are_bound_as_before():
    assert {b.scheme for b in bound("mxfp8", Target(kind="cuda", capability=(9, 0))).bindings} == {"fp8_row"}
    assert {b.scheme for b in bound("nvfp4", Target(kind="cuda", capability=(9, 0))).bindings} == {"emulate:nvfp4"}
    assert {b.scheme for b in bound("mxfp8", Target(kind="cpu")).bindings} == {"emulate:mxfp8"}


def test_strict_takes_native_formats_on_blackwell_and_refuses_unproven_ones():
    ir = dw.capture(Two())
    resolution = dw.PrecisionPolicy("nvfp4").resolve(ir)
    bind(ir, resolution, B200, fallback="strict")
    unproven = Target(kind="cuda", capability=(10, 0), unproven=(("nvfp4", "wrong"),))
    with pytest.raises(UnsupportedError, match="self-check"):
        bind(ir, resolution, unproven, fallback="strict")


def test_options_of_a_format_travel_in_the_scheme():
    policy = dw.PrecisionPolicy("bf16")
    policy.set_layer_precision("*", precision("nvfp4", {"hadamard": False}))
    ir = dw.capture(Two())
    schemes = set(bind(ir, policy.resolve(ir), B200).schemes.values())
    assert schemes == {"|".join(["nvfp4_native,hadamard=False"] * 3)}
    how = parse_scheme(schemes.pop())
    assert how.wgrad.method == "native" and not how.wgrad.format.lhs.hadamard
    with pytest.raises(ConfigError, match="_native"):
        parse_scheme("fp8_native|bf16|bf16")


# ---- numerics: the native ops' references against the emulation ----


def gradients(scheme, shape, dtype, weights=1):
    """Output and gradients of one linear under a scheme, from one seed for data and one for rounding."""
    t, k, n = shape
    torch.manual_seed(1)
    x = (torch.randn(t, k) * torch.logspace(-2, 1, t)[:, None]).to(dtype).requires_grad_()
    w = [torch.randn(n, k).div(k**0.5).to(dtype).requires_grad_() for _ in range(weights)]
    dy = (torch.randn(t, n * weights) * torch.logspace(-3, 0, n * weights)).to(dtype)
    torch.manual_seed(2)
    y = low_precision_linear(x, w, None, scheme)
    y.backward(dy)
    return y.detach(), x.grad, *[one.grad for one in w]


def both(name, shape, dtype, options="", weights=1):
    native = gradients("|".join([f"{name}_native{options}"] * 3), shape, dtype, weights)
    emulated = gradients("|".join([f"emulate:{name}{options}"] * 3), shape, dtype, weights)
    return zip(("y", "dx", "dw", "dw of the second"), native, emulated, strict=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mxfp8", ""),
        ("mxfp8", ",gradients=e5m2"),
        ("nvfp4", ",hadamard=False,stochastic_rounding=False"),
        ("nvfp4", ",hadamard=False"),  # stochastic: one seed, the same draws in the same order
        ("nvfp4", ",hadamard=False,weight_blocks=1x16"),
    ],
)
def test_native_formats_give_the_emulations_bits(name, options, shape, dtype):
    for what, native, emulated in both(name, shape, dtype, options):
        assert_bitwise_equal(native, emulated, f"{name}{options} {what}")


def test_several_weights_of_one_input_give_the_emulations_bits():
    for what, native, emulated in both("mxfp8", (64, 96, 32), torch.float32, weights=2):
        assert_bitwise_equal(native, emulated, what)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_with_the_hadamard_transform_only_the_order_of_sums_differs(shape):
    # The emulation undoes the transform before the product, the tensor core multiplies transformed numbers.
    results = list(both("nvfp4", shape, torch.float32))
    for what, native, emulated in results[:2]:
        assert_bitwise_equal(native, emulated, what)
    _, native, emulated = results[2]
    assert not torch.equal(native, emulated)
    assert sqnr_db(emulated, native) > 110


def test_frozen_sides_get_no_copies_they_do_not_need(monkeypatch):
    # Quantizing both ways costs a write; a frozen weight needs no gradient and a first layer no dgrad.
    seen = []
    ops = torch.ops.deepwell
    for name in ("mx_quantize_rows", "mx_quantize_both"):
        own = getattr(ops, name)
        monkeypatch.setattr(
            ops, name, lambda *args, own=own, name=name: (seen.append((name, tuple(args[0].shape))), own(*args))[1]
        )
    x, w = torch.randn(32, 64), torch.randn(96, 64, requires_grad=True)
    low_precision_linear(x, [w], None, "|".join(["mxfp8_native"] * 3)).sum().backward()
    assert seen == [
        ("mx_quantize_both", (32, 64)),
        ("mx_quantize_rows", (96, 64)),
        ("mx_quantize_both", (32, 96)),
    ]


# ---- the whole engine with a faked device ----


@pytest.mark.parametrize("fmt", ["mxfp8", "nvfp4"])
def test_an_engine_bound_natively_trains_with_the_emulations_numbers(fmt, monkeypatch):
    policy = dw.PrecisionPolicy("bf16")
    options = {} if fmt == "mxfp8" else {"hadamard": False, "stochastic_rounding": False}
    policy.set_layer_precision("*", precision(fmt, options))

    def step(device):
        torch._dynamo.reset()
        torch.manual_seed(3)
        model = Two()
        monkeypatch.setattr(compile_module, "device_of", lambda tensors: device)
        engine = dw.compile(dw.capture(model), precision_policy=policy, inductor=False)
        x = torch.randn(48, 64, requires_grad=True)
        y = engine(x)
        y.square().mean().backward()
        report = str(engine.report())
        return report, [y.detach(), x.grad, *(p.grad for p in model.parameters())]

    report, native = step(B200)
    _, emulated = step(Target(kind="cpu"))
    assert f"{fmt}_native" in report and "native" in report
    for i, (got, wanted) in enumerate(zip(native, emulated, strict=True)):
        assert_bitwise_equal(got, wanted, f"tensor {i}")


def test_a_device_is_asked_for_its_proofs(monkeypatch):
    asked = []

    def native_kernel(fmt, device):
        asked.append(fmt)
        return (None, "vendor: wrong") if fmt == "nvfp4" else ("vendor", "passed")

    monkeypatch.setattr(compile_module, "native_kernel", native_kernel)
    found = compile_module.unproven_formats((10, 0), torch.device("cpu"))
    assert found == (("nvfp4", "vendor: wrong"),) and asked == ["mxfp8", "nvfp4"]
    asked.clear()
    assert compile_module.unproven_formats((9, 0), torch.device("cpu")) == () and not asked
