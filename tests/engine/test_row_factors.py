"""Scales of rows are left to a product's readers: which ones, and that no bit of a step changes."""

import operator
from typing import NamedTuple

import pytest
import torch
import zoo_models
from torch import Tensor, fx, nn
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import default_partition

from deepwell.engine.backend import BackendOptions, compile_graph
from deepwell.engine.passes import row_factors
from deepwell.engine.passes.fuse_quantize import through_views
from deepwell.engine.times.ops import measure_calls
from deepwell.formats.metrics import assert_bitwise_equal, sqnr_db
from deepwell.kernels.activation.autograd import activation, swiglu_packed
from deepwell.kernels.gemm import fp8 as gemm
from deepwell.kernels.gemm.linear import low_precision_linear
from deepwell.kernels.norm.autograd import add_rms_norm, rms_norm
from deepwell.kernels.registry import KernelRegistry
from deepwell.kernels.rope.autograd import rope_qkv

FP8 = "fp8_row|fp8_row|fp8_row"
gemm_op = torch.ops.deepwell.fp8_gemm.default


def step(model: nn.Module, batch: dict[str, Tensor], **how) -> tuple[BackendOptions, list[Tensor]]:
    """Loss and gradients of one compiled training step."""
    torch._dynamo.reset()
    linears = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"]
    options = BackendOptions(schemes=dict.fromkeys(linears, FP8), **how)
    compiled = torch.compile(model, backend=lambda graph, inputs: compile_graph(graph, inputs, options))
    model.zero_grad(set_to_none=True)
    with torch._inductor.config.patch(force_disable_caches=True):
        loss = compiled(**batch).loss
        loss.backward()
    return options, [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def apart(*given, **how) -> list[Tensor]:
    """The same with every product scaled by its rows."""
    options, found = step(*given, row_factors=False, **how)
    assert "row_factors" not in options.counts
    return found


# Forward qkv, o, gate and up, down; backward all but o, whose gradient attention reads. Qwen2 has a bias of q, k, v.
@pytest.mark.parametrize(("model_type", "count"), [("llama", 7), ("qwen2", 12), ("phi3", 5)])
def test_a_step_has_the_same_bits_on_architectures_of_hugging_face(batch, model_type, count) -> None:
    layers = {} if model_type == "qwen2" else {"num_hidden_layers": 1}
    model = zoo_models.tiny_model(model_type, **layers).bfloat16()
    options, got = step(model, batch)
    assert options.counts["row_factors"] == count
    for one, other in zip(got, apart(model, batch), strict=True):
        assert_bitwise_equal(one, other)


@pytest.mark.slow  # half a minute; Inductor meets the pass in test_passes.py and on a GPU too
@pytest.mark.usefixtures("cxx_compiler")
def test_inductor_compiles_the_same_step(batch) -> None:
    # With all copies recomputed: scales are then needed where their codes are not kept.
    model = zoo_models.tiny_model("llama", num_hidden_layers=1).bfloat16()
    options, got = step(model, batch, use_inductor=True, recompute="copies")
    assert options.counts["row_factors"] == 7
    for one, other in zip(got, apart(model, batch, use_inductor=True, recompute="copies"), strict=True):
        assert_bitwise_equal(one, other)


# ---- single graphs ----


class Joint(NamedTuple):
    """A joint graph after the pass, how many products it changed, and what the forward gave."""

    graph: fx.Graph
    count: int
    out: Tensor


def joint(function, *inputs: Tensor, least_flops: float = 0.0, dynamic: bool = False) -> Joint:
    """The joint graph of a function, which also ran, backward too."""
    seen: list[tuple[fx.Graph, int]] = []

    def partition(module, *operands, **how):
        seen.append((module.graph, row_factors.leave_row_scales(module.graph, least_flops)))
        return default_partition(module, *operands, **how)

    compiled = aot_function(function, fw_compiler=lambda g, _: g.forward, partition_fn=partition, dynamic=dynamic)
    out = compiled(*inputs)
    (out.float() * torch.linspace(0.5, 1.5, out.numel()).view(out.shape)).sum().backward()
    ((graph, count),) = seen
    return Joint(graph, count, out.detach())


def products(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.target is gemm_op]


def make(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).bfloat16().requires_grad_() for shape in shapes]


def test_gate_and_up_are_read_with_factors_in_forward_and_backward() -> None:
    graph, count, _ = joint(
        lambda x, w: swiglu_packed(low_precision_linear(x, [w], None, FP8), "silu"), *make((32, 64), (96, 64))
    )
    assert count == 1  # the gradient of x is a result
    product = next(node for node in products(graph) if node.args[1] is None)
    ops = torch.ops.deepwell
    places = {ops.swiglu.default: (0, 2), ops.swiglu_backward.default: (1, 3)}
    readers = [node for node in graph.nodes if node.target in places]
    scale, other = (node.args[places[node.target][1]] for node in readers)
    assert scale is other and all(through_views(n.args[places[n.target][0]]) is product for n in readers)
    assert scale.target is operator.getitem and scale.args[1] == 1
    # A weight's scale is one number.
    assert product.args[3].meta["val"].dim() == 0


def _normed(*operands: Tensor) -> tuple[Tensor, ...]:
    return (rms_norm if len(operands) == 2 else add_rms_norm)(*operands, 1e-6, "torch")


def _rotated(y: Tensor) -> Tensor:
    tables = (torch.ones(32, 8), torch.zeros(32, 8))
    return torch.cat(rope_qkv(y.view(1, 32, 96), *tables, (4, 4, 4), "blocks", "half"), 2)


# What reads a product y [32, 96], another matrix z beside it, and whether it is left to the scales of its rows.
READ = {
    "a gate": (lambda y, z: swiglu_packed(y, "silu"), 1),
    "a gate of a batch": (lambda y, z: swiglu_packed(y.view(4, 8, 96), "silu"), 1),
    "an activation": (lambda y, z: activation(y, "gelu"), 1),
    "a norm of a sum, first": (lambda y, z: _normed(y, z, z[0])[1], 1),
    "both of a sum and its norm": (lambda y, z: torch.cat(_normed(y, z, z[0])), 1),
    "a rotation": (lambda y, z: _rotated(y), 1),
    "a rotation and a gate": (lambda y, z: torch.cat([_rotated(y).flatten(), swiglu_packed(y, "silu").flatten()]), 1),
    "a result": (lambda y, z: y, 0),
    "an op that knows nothing of factors": (lambda y, z: torch.relu(y), 0),
    "a gate and its columns": (lambda y, z: swiglu_packed(y, "silu") + y[:, :48], 0),
    "a gate of longer rows": (lambda y, z: swiglu_packed(y.view(16, 192), "silu"), 0),
    "a gate of shorter rows": (lambda y, z: swiglu_packed(y.view(64, 48), "silu"), 0),
    "a gate of some rows": (lambda y, z: swiglu_packed(y[8:], "silu"), 0),
    "a gate of rows in another order": (lambda y, z: swiglu_packed(y.view(4, 8, 96).transpose(0, 1), "silu"), 0),
    "a gate of columns": (lambda y, z: swiglu_packed(y.t(), "silu"), 0),
    "a gate of rows that are repeated": (lambda y, z: swiglu_packed(y[:, None].expand(32, 2, 96), "silu"), 0),
    "a gate behind a bias": (lambda y, z: swiglu_packed(y + z[0], "silu"), 0),
    "a gate of two products": (lambda y, z: swiglu_packed(y + y, "silu"), 0),
    "a norm": (lambda y, z: _normed(y, z[0]), 0),
    "a norm of a sum, second": (lambda y, z: _normed(z, y, z[0])[1], 0),
    "a norm of its double": (lambda y, z: _normed(y, y, z[0])[1], 0),
    "a gain": (lambda y, z: _normed(z, y[0]), 0),
}


@pytest.mark.parametrize("reader", READ)
def test_only_who_takes_the_scales_of_all_rows_is_left_with_them(reader) -> None:
    read, count = READ[reader]

    def function(x: Tensor, w: Tensor, z: Tensor) -> Tensor:
        return read(low_precision_linear(x, [w], None, FP8), z)

    results = []
    for least_flops in (0.0, float("inf")):
        operands = make((32, 64), (96, 64), (32, 96))
        made = joint(function, *operands, least_flops=least_flops)
        assert made.count == (count if least_flops == 0 else 0)
        assert sum(node.args[1] is None for node in products(made.graph)) == made.count
        results.append([made.out, *(leaf.grad for leaf in operands if leaf.grad is not None)])
    for mine, theirs in zip(*results, strict=True):
        assert_bitwise_equal(mine, theirs)


def test_a_right_operand_with_scales_of_its_own_rows_keeps_them() -> None:
    # Two activations multiplied: neither has one scale.
    ops = torch.ops.deepwell

    class Both(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            return ops.fp8_gemm(*ops.quantize_rows(x), *ops.quantize_rows(y), False)

        @staticmethod
        def backward(ctx, grad):
            return grad @ grad.new_ones(96, 64), grad.T @ grad.new_ones(32, 64)

    graph, count, _ = joint(lambda x, y: swiglu_packed(Both.apply(x, y), "silu"), *make((32, 64), (96, 64)))
    assert count == 0 and len(products(graph)) == 1


def test_on_a_gpu_small_products_and_those_of_open_size_keep_their_scales() -> None:
    # Nobody times their algorithms, and torch's first choice for one scale is no better than that for rows.
    def mlp(x, w):
        return swiglu_packed(low_precision_linear(x, [w], None, FP8), "silu")

    operands, flops = make((32, 64), (96, 64)), 2.0 * 32 * 64 * 96
    assert joint(mlp, *operands, least_flops=flops).count == 1
    assert joint(mlp, *operands, least_flops=flops + 1).count == 0
    assert joint(mlp, *operands, least_flops=flops, dynamic=True).count == 0
    assert joint(mlp, *operands, dynamic=True).count == 1


def test_a_report_names_and_times_products_without_scales(batch) -> None:
    options, _ = step(zoo_models.tiny_model("llama", num_hidden_layers=1).bfloat16(), batch)
    without = {call: count for call, count in options.calls.items() if call.name == "fp8_gemm" and call.args[1] is None}
    assert sum(without.values()) == options.counts["row_factors"] == 7
    rows = measure_calls(without)
    assert {"74x192x64", "74x64x96"} <= {row.shape for row in rows}  # gate and up, down: MxNxK
    assert all(row.us and row.us > 0 for row in rows), rows


def test_a_users_kernel_for_whole_chains_still_gets_them(batch) -> None:
    registry = KernelRegistry()
    registry.register("mine", lambda a, b: a @ b, precision="fp8")
    options, _ = step(zoo_models.tiny_model("llama", num_hidden_layers=1).bfloat16(), batch, registry=registry)
    assert options.counts.get("row_factors", 0) == 0


def test_a_kept_one_is_the_scale_of_products_without(monkeypatch) -> None:
    monkeypatch.setattr(gemm, "_ones", {torch.device("cpu"): torch.tensor(1.0)})
    assert gemm.one_on(torch.device("cpu")) is gemm.one_on(torch.device("cpu"))
    monkeypatch.setattr(gemm, "_ones", {})
    gemm.keep_one(torch.device("cpu"))  # only where graphs of launches are recorded
    assert not gemm._ones and gemm.one_on(torch.device("cpu")).item() == 1.0


# ---- on a GPU ----


@pytest.mark.gpu
@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_a_large_step_agrees_with_one_scaled_by_rows(cuda_graphs) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=2, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=4096, use_cache=False,
    )  # fmt: skip
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).bfloat16()
        ids = torch.randint(0, 4096, (4, 4096))
    batch = {"input_ids": ids, "labels": ids}
    how = {"use_inductor": True, "cuda_graphs": cuda_graphs}
    options, got = step(model, batch, **how)
    assert options.counts["row_factors"] >= 12
    # Other algorithms add in another order, in the tensor cores' short accumulator.
    pairs = zip(got[1:], apart(model, batch, **how)[1:], strict=True)
    assert min(sqnr_db(other, one) for one, other in pairs) > 25
