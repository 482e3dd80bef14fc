"""The public API in one file, as far as it is built: probe, capture, policy, plan, compile, dry run, train, report."""

import sys
from pathlib import Path

import pytest
import torch

import deepwell as dw

sys.path.append(str(Path(__file__).resolve().parents[1] / "recipes"))
from llama import Llama, LlamaConfig

SMALL = LlamaConfig(width=64, num_heads=4, num_kv_heads=2, hidden=96, num_layers=2, vocab=128, max_positions=64)


@pytest.fixture
def model() -> Llama:
    torch._dynamo.reset()
    return Llama(SMALL).init_weights()


@pytest.fixture
def data() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 128, (2, 33))
    return tokens[:, :-1], tokens[:, 1:]


def test_probe_describes_this_machine_and_named_ones() -> None:
    hw = dw.probe()
    assert hw.gpus[0].name
    assert isinstance(hw.gpus[0].is_blackwell, bool)
    assert dw.probe("8xB200").gpus[0].is_blackwell


def test_capture_compile_train_and_report(model, data) -> None:
    hw = dw.probe()
    ir = dw.capture(model)
    assert ir.num_layers == 2
    policy = dw.PrecisionPolicy()
    policy.set_default("mxfp8")
    policy.set_layer_precision("attention", "bf16")
    engine = dw.compile(ir, hw, precision="mxfp8", precision_policy=policy)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-2)
    losses = []
    for _ in range(8):
        loss = engine(*data)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5
    report = engine.report()
    low = {row.op.split(".")[0] for row in report.bindings if row.format == "mxfp8"}
    assert low == {"mlp"}
    assert report.passes["linear"] == 2 * 3


def test_one_call_does_it_all(model, data) -> None:
    fast = dw.optimize_for_blackwell(model, precision="mxfp8", batch_size=2, seq_len=32)
    torch.testing.assert_close(fast(*data), model(*data), rtol=2e-3, atol=0)
    assert fast.report().passes["linear"] == 14


def test_torch_compile_takes_the_name(model, data) -> None:
    fast = torch.compile(model, backend="deepwell")
    torch.testing.assert_close(fast(*data), model(*data), rtol=2e-3, atol=0)


def test_a_plan_is_compiled_and_tried_before_it_runs(model, data) -> None:
    ir = dw.capture(model, data)
    plan = dw.autoplan(ir, hw="1xB200", seq_len=32, global_batch=2, arch="blackwell", precision="mxfp8", gpus=1)
    engine = dw.compile(ir, plan=plan, precision="mxfp8", fallback="safe")
    before = [p.clone() for p in model.parameters()]
    found = dw.dryrun(engine)
    assert found.fits and found.figure("step").value > 0
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    engine(*data).backward()


def test_a_model_of_three_lines_is_optimized() -> None:
    nn = torch.nn
    model = nn.Sequential(nn.Linear(768, 3072), nn.GELU(), nn.Linear(3072, 768))
    fast = dw.optimize_for_blackwell(model, precision="mxfp8", batch_size=2, seq_len=16)
    x = torch.randn(2, 16, 768)
    assert (fast(x) - model(x)).norm() / model(x).norm() < 0.06
    assert fast.report().passes["linear"] >= 1


def test_a_policy_by_kinds_of_layers(model, data) -> None:
    from deepwell.precision import PrecisionPolicy

    policy = PrecisionPolicy()
    policy.set_default("mxfp8")
    policy.set_layer_precision("attention", "bf16")
    policy.set_layer_precision("mlp", "fp4")
    engine = dw.compile(dw.capture(model), dw.probe(), precision_policy=policy)
    engine(*data).backward()
    formats = {(row.op.split(".")[0], row.format) for row in engine.report().bindings}
    assert {kind for kind, fmt in formats if fmt == "nvfp4"} == {"mlp"}
    assert {fmt for kind, fmt in formats if kind == "attention"} == {"bf16"}


@pytest.mark.parametrize("precision", ["bf16", "fp8", "mxfp8", "nvfp4", "fp4"])
def test_every_recipe_runs_forward_and_backward(model, data, precision) -> None:
    engine = dw.compile(dw.capture(model), precision=precision, fallback="safe")
    loss = engine(*data)
    loss.backward()
    torch.testing.assert_close(loss, model(*data), rtol=2e-2, atol=0)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_formats_quantize_and_come_back() -> None:
    x = torch.randn(32, 64)
    q = dw.quantize(x, "mxfp8")
    assert (q.dequantize() - x).norm() / x.norm() < 0.04


def test_a_users_kernel_is_registered_and_compiled_in(model, data) -> None:
    from deepwell.kernels import KernelRegistry

    def my_custom_kernel(a, b):
        return a @ b

    registry = KernelRegistry()
    registry.register("custom_gemm", my_custom_kernel, precision="mxfp8", min_size=32)
    engine = dw.compile(dw.capture(model), dw.probe(), precision="mxfp8", use_cutlass=True, kernel_registry=registry)
    engine(*data).backward()
    assert "custom_gemm" in {row.kernel for row in engine.report().kernels}


def test_the_doors_to_single_kernels() -> None:
    from deepwell.kernels.cutlass_bindings import CutlassConfig, CutlassKernel, MicroscaleManager
    from deepwell.kernels.production_kernels import ProductionKernelManager

    m, n, k = 32, 48, 64
    a, b = torch.randn(m, k), torch.randn(k, n)
    manager = ProductionKernelManager()
    torch.testing.assert_close(manager.gemm(a, b, activation="gelu"), torch.nn.functional.gelu(a @ b))
    config = CutlassConfig(use_tcgen05=True, tmem_residency=True, microscale_block_size=32)
    kernel = CutlassKernel(config)
    kernel.initialize(m, n, k, "mxfp8", use_microscaling=True)
    result = kernel.gemm(a, b)
    assert (result - a @ b).norm() / (a @ b).norm() < 0.05
    x_quant, x_scales = MicroscaleManager.quantize_mxfp8(a)
    assert (MicroscaleManager.dequantize_mxfp8(x_quant, x_scales) - a).norm() / a.norm() < 0.04
