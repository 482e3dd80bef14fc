"""Activations in host memory: the same numbers to the last bit, and what layers save is not on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepwell as dw
from deepwell.bench.llama import Llama, LlamaConfig
from deepwell.engine.engine import Engine
from deepwell.engine.offload import HostMemory
from deepwell.errors import UnsupportedError

SIZES = {"width": 64, "num_heads": 4, "num_kv_heads": 4, "hidden": 128, "num_layers": 4, "vocab": 128}
GPU = pytest.param("cuda", marks=pytest.mark.gpu)


def engine_of(device: str, precision: str, **options: Any) -> Engine:
    torch.manual_seed(0)
    model = Llama(LlamaConfig(**SIZES, max_positions=64)).init_weights().to(device)
    return dw.compile(model, precision=precision, **options)


def steps(engine: Engine, device: str) -> tuple[list[Tensor], dict[str, int]]:
    """All gradients of two steps, and the passes that fired."""
    tokens = torch.randint(0, 128, (2, 32), generator=torch.Generator().manual_seed(1)).to(device)
    found = []
    for _ in range(2):
        engine(tokens).float().square().mean().backward()
        found += [parameter.grad.clone() for parameter in engine.deepwell.model.parameters()]
    return found, dict(engine.report().passes)


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("precision", ["bf16", "mxfp8"])
def test_gradients_are_those_without_it(precision: str, device: str) -> None:
    here, away = engine_of(device, precision), engine_of(device, precision)
    here.use_regions()
    host = away.use_regions().offload()
    wanted, found = steps(here, device), steps(away, device)
    assert all(torch.equal(a, b) for a, b in zip(wanted[0], found[0], strict=True))
    # One graph for all layers, with the same passes. A fusion is counted by who compiles it, not where a cache has it.
    fused = {"bias_epilogue", "fused_quantize", "fused_recompute"} if device == "cuda" else set()
    assert all(wanted[1][name] == count for name, count in found[1].items() if name not in fused)
    # At the least each layer's input and what attention and MLP read, of 4 layers and 2 steps.
    assert host.num_bytes >= 2 * 4 * (2 * 32) * (64 + 128) * 2


def test_weights_stay_and_all_else_goes() -> None:
    host = HostMemory()
    linear = nn.Linear(8, 4)
    seen: list[Any] = []

    class Looked(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight, x.t(), x[:1].expand(3, 8), x.sum())
            return x @ weight.t()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
            x, weight, *others = ctx.saved_tensors
            seen.extend((x, weight, *others))
            return grads[0] @ weight, grads[0].t() @ x

    x = torch.randn(2, 8, requires_grad=True)
    host.around(linear, lambda x: Looked.apply(x, linear.weight))(x).sum().backward()
    saved, weight, transposed, expanded, scalar = seen
    assert torch.equal(saved, x) and saved.data_ptr() != x.data_ptr()
    assert weight.data_ptr() == linear.weight.data_ptr()
    assert torch.equal(transposed, x.t()) and transposed.stride() == x.t().stride()  # graphs count on strides
    assert expanded.stride() == (0, 1) and torch.equal(scalar, x.sum())
    assert host.num_bytes == 2 * x.nbytes


def test_a_model_that_recomputes_by_itself_is_refused() -> None:
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=64
    )
    engine = dw.compile(transformers.LlamaForCausalLM(config), precision="bf16", recompute=True)
    with pytest.raises(UnsupportedError, match=r"model\.layers\.0 is recomputed in the backward"):
        engine.use_regions().offload()


@pytest.mark.gpu
def test_two_layers_at_most_are_on_the_device() -> None:
    """What is allocated behind a forward: all layers' activations without, none but the last two's with it."""
    held = {}
    for is_away in (False, True):
        torch.manual_seed(0)
        sizes = {**SIZES, "width": 512, "hidden": 2048, "num_layers": 8}
        model = Llama(LlamaConfig(**sizes, max_positions=2048)).init_weights().to("cuda", torch.bfloat16)
        engine = dw.compile(model, precision="bf16")
        regions = engine.use_regions()
        if is_away:
            regions.offload()
        tokens = torch.randint(0, 128, (4, 2048), device="cuda")
        for _ in range(2):
            before = torch.cuda.memory_allocated()
            out = engine(tokens)
            held[is_away] = torch.cuda.memory_allocated() - before - out.nbytes
            out.float().square().mean().backward()
            engine.zero_grad()
            del out
    assert held[True] < 0.35 * held[False], held
