"""Operands that few models have: subclasses of Tensor, nested tensors, tensors without a dimension or without a number.

A pattern with such an operand computes what eager does, whether a pass takes it or leaves it.
"""

import pytest
import torch
import torch.nn.functional as F
from compared import Case, check_all
from torch import Tensor

from deepwell.engine.backend import BackendOptions, compile_graph
from deepwell.formats.metrics import assert_bitwise_equal

F32_AND_BF16 = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def frozen(*shape: int, seed: int = 0) -> Tensor:
    return numbers(*shape, seed=seed).detach()


def written_norm(x: Tensor, w: Tensor) -> Tensor:
    x32 = x.float()
    return w * (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def norm(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), w, 1e-6)


def turned(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + turned(x) * sin


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2) * 0.3).softmax(-1) @ v


def loss(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w), target)


# What every pass below takes of plain tensors.
PATTERNS: dict[str, Case] = {
    "norm": (norm, [numbers(6, 8), numbers(8)]),
    "a norm that is written out": (written_norm, [numbers(6, 8), numbers(8)]),
    "a norm of a sum": (lambda x, w: norm(x + x * 2, w), [numbers(6, 8), numbers(8)]),
    "a gate": (lambda x, y: F.silu(x) * y, [numbers(6, 8), numbers(6, 8, seed=1)]),
    "an embedding": (F.embedding, [torch.arange(6), numbers(8, 8)]),
    "a loss": (loss, [numbers(6, 8), numbers(24, 8), torch.arange(6)]),
}  # fmt: skip


@pytest.fixture
def mesh():
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_distributed_tensors_are_left_to_ops_that_know_how_to_shard(mesh) -> None:
    from torch.distributed.tensor import DTensor, Replicate

    def on_mesh(function):
        def run(*given: Tensor) -> Tensor:
            return function(*(DTensor.from_local(x, mesh, [Replicate()]) for x in given)).to_local()

        return run

    heads = [numbers(2, 4, 6, 8, seed=i) for i in range(3)]
    cases = PATTERNS | {
        "a rotation": (rotated, [heads[0], frozen(6, 8), frozen(6, 8, seed=1)]),
        "attention": (attend, heads),
    }
    assert check_all({name: (on_mesh(function), inputs) for name, (function, inputs) in cases.items()}) == {}
    assert len(check_all(cases)) >= 6


def test_nested_tensors_are_left_as_they_are() -> None:
    ends = torch.tensor([0, 2, 6])

    def ragged(function):
        def run(x: Tensor, *others: Tensor) -> Tensor:
            nested = torch.nested.nested_tensor_from_jagged(x, ends)
            others = tuple(torch.nested.nested_tensor_from_jagged(y, ends) if y.shape == x.shape else y for y in others)
            out = function(nested, *others)
            return out.values() if out.is_nested else out

        return run

    cases = {name: case for name, case in PATTERNS.items() if name != "a loss"}
    assert check_all({name: (ragged(function), inputs) for name, (function, inputs) in cases.items()}) == {}


EMPTY: dict[str, Case] = {
    "a norm of one number": (written_norm, [numbers(1).detach()[0].requires_grad_(), numbers(1)]),
    "a norm by itself": (lambda x: written_norm(x, x), [numbers(8)]),
    "a norm of no width": (norm, [numbers(4, 0), numbers(0)]),
    "a written norm of no width": (written_norm, [numbers(4, 0), numbers(0)]),
    "a LayerNorm of no width": (lambda x, w: F.layer_norm(x, (0,), w), [numbers(4, 0), numbers(0)]),
    "a norm of no rows": (norm, [numbers(0, 8), numbers(8)]),
    "a sum of no width": (lambda x, w: norm(x + 2 * x, w) + x, [numbers(4, 0), numbers(0)]),
    "a gate of no width": (lambda x, y: F.silu(x) * y, [numbers(4, 0), numbers(4, 0)]),
    "a gate of no rows": (lambda x, y: F.silu(x) * y, [numbers(0, 4), numbers(0, 4)]),
    "halves of no width": (lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1], [numbers(4, 0)]),
    "a gate of one number": (lambda x, y: F.silu(x[0]) * y[0], [numbers(4), numbers(4, seed=1)]),
    "an activation of no width": (lambda x: x * torch.sigmoid(x), [numbers(4, 0)]),
    "an embedding of no width": (F.embedding, [torch.arange(3), numbers(5, 0)]),
    "an embedding of one index": (F.embedding, [torch.tensor(3), numbers(5, 4)]),
    "a loss of no width": (loss, [numbers(3, 0), numbers(24, 0), torch.arange(3)]),
    "a loss of no rows": (loss, [numbers(0, 8), numbers(24, 8), torch.arange(0)]),
    "a rotation of no width": (rotated, [numbers(2, 3, 4, 0), frozen(4, 0), frozen(4, 0)]),
    "a rotation of two columns": (rotated, [numbers(2, 3, 4, 2), frozen(4, 2), frozen(4, 2, seed=1)]),
    "a rotation of no tokens": (rotated, [numbers(2, 3, 0, 4), frozen(0, 4), frozen(0, 4)]),
    "attention of no keys": (attend, [numbers(2, 3, 4, 8), numbers(2, 3, 0, 8), numbers(2, 3, 0, 8)]),
    "attention of no width": (attend, [numbers(2, 3, 4, 0), numbers(2, 3, 4, 0), numbers(2, 3, 4, 8)]),
    "attention of no batch": (attend, [numbers(0, 3, 4, 8), numbers(0, 3, 4, 8), numbers(0, 3, 4, 8)]),
}  # fmt: skip


@F32_AND_BF16
def test_tensors_without_numbers_or_dimensions(dtype) -> None:
    counts = check_all(EMPTY, dtype)
    assert counts["rms_norm"] >= 2 and counts["swiglu"] >= 1 and counts["rope"] >= 1


def test_low_precision_linears_of_no_width_and_of_no_rows() -> None:
    widths = {"w": (16, 32), "none": (16, 0), "nothing": (0, 32)}
    model = torch.nn.ParameterDict({name: torch.nn.Parameter(numbers(*size).detach()) for name, size in widths.items()})
    options = BackendOptions(schemes=dict.fromkeys(model, "|".join(["fp8_row"] * 3)), parameters=model.named_parameters)

    def program(x: Tensor) -> tuple[Tensor, ...]:
        empty = x[:, :0]
        return F.linear(x[:0], model["w"]), F.linear(empty, model["none"]), F.linear(x, model["nothing"])

    run = torch.compile(program, backend=lambda graph, inputs: compile_graph(graph, inputs, options), fullgraph=True)
    for made, wanted in zip(run(frozen(6, 32)), program(frozen(6, 32)), strict=True):
        assert_bitwise_equal(made, wanted)
    assert options.rewritten == {"w", "nothing"}
