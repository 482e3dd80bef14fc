"""The engine on a GPU: what the CPU tests prove with references, once more with the kernels and Inductor."""

import pytest
import torch
import torch.nn.functional as F
import zoo_models
from torch import Tensor, nn

import deepwell as dw
from deepwell.errors import ConfigError
from deepwell.formats.metrics import sqnr_db

pytestmark = pytest.mark.gpu


@pytest.fixture
def gpu_batch(batch) -> dict[str, Tensor]:
    return {name: value.cuda() for name, value in batch.items()}


@pytest.mark.parametrize("precision", ["bf16", "mxfp8"])
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gpt_neox", "gpt2", "opt", "phi", "granite", "gemma2"])
def test_an_engine_trains_a_step(model_type, precision, gpu_batch) -> None:
    # 74 tokens: no GEMM of the backward has a whole number of 16-byte lines.
    model = zoo_models.tiny_model(model_type).bfloat16().cuda().eval()
    eager = model(**gpu_batch).loss.item()
    engine = dw.compile(model, precision=precision, measure=False)  # so small a model would stay in bf16
    # What a cache gives back is not rewritten, nor counted.
    with torch._inductor.config.patch(force_disable_caches=True):
        loss = engine(**gpu_batch).loss
        loss.backward()
    assert abs(loss.item() - eager) < (2**-8 if precision == "bf16" else 0.01) * eager
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    report = engine.report()
    assert not any("not met" in note for note in report.notes)
    if precision != "bf16":
        assert report.passes["fused_quantize"] > 0
        schemes = {row.scheme for row in report.bindings if row.format == precision}
        assert schemes == {"fp8_row"}


@pytest.mark.parametrize("sizes", [(32, 64, 48), (20, 36, 10)], ids=str)
def test_products_keep_their_signal_whatever_their_size(sizes) -> None:
    k, hidden, n = sizes

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(k, hidden), nn.Linear(hidden, n, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(F.relu(self.up(x)))

    model = Two().bfloat16().cuda()
    policy = dw.PrecisionPolicy()
    policy.set_default("fp8", scaling="row")
    for name in ("up", "down"):
        policy.set_layer_precision(f"path:{name}", "fp8", scaling="row")
    engine = dw.compile(model, precision_policy=policy, fallback="strict")
    x = torch.randn(37, k, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y, ref = engine(x), model(x)
    assert engine.options.rewritten == {"up", "down"}
    assert sqnr_db(ref, y) > 20
    dy = torch.randn_like(y)
    got = torch.autograd.grad(y, (x, *model.parameters()), dy)
    exact = torch.autograd.grad(ref, (x, *model.parameters()), dy)
    for mine, theirs in zip(got, exact, strict=True):
        assert sqnr_db(theirs, mine) > 15  # two layers of gradients, ReLUs that flip included


def test_checkpointing_evaluation_and_other_shapes(gpu_batch) -> None:
    model = zoo_models.tiny_model("llama", num_key_value_heads=2).bfloat16().cuda()
    model.gradient_checkpointing_enable()
    engine = dw.compile(model, precision="fp8", measure=False)
    loss = engine(**gpu_batch).loss
    loss.backward()
    assert engine.options.counts["causal_mask"] == 2
    engine.eval()
    with torch.no_grad():
        out = engine(**gpu_batch)
    assert abs(out.loss.item() - loss.item()) < 0.01 * loss.item()
    assert out.logits.argmax(-1).shape == gpu_batch["input_ids"].shape
    for length in (16, 40, 64, 23):
        ids = torch.randint(3, zoo_models.VOCAB, (3, length), device="cuda")
        assert torch.isfinite(engine(input_ids=ids, labels=ids).loss)
    # With and without gradients, the first shape and at most two opened ones.
    assert engine.options.graphs <= 6


def test_cpu_tensors_for_a_gpu_engine_are_named(batch) -> None:
    engine = dw.compile(zoo_models.tiny_model("llama").bfloat16().cuda(), precision="fp8")
    with pytest.raises(ConfigError, match=r"input_ids is on cpu and the engine on cuda"):
        engine(**batch)
