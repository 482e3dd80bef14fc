"""Operands that few models have: subclasses of Tensor, nested tensors, tensors without a dimension or without a number.

A pattern with such an operand computes what eager does, whether a pass takes it or leaves it.
"""

import pytest
import torch
import torch.nn.functional as F
from compared import Case, check_all
from torch import Tensor

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


# What every pass below takes of plain tensors.
PATTERNS: dict[str, Case] = {
    "norm": (norm, [numbers(6, 8), numbers(8)]),
    "a norm that is written out": (written_norm, [numbers(6, 8), numbers(8)]),
    "a norm of a sum": (lambda x, w: norm(x + x * 2, w), [numbers(6, 8), numbers(8)]),
    "a gate": (lambda x, y: F.silu(x) * y, [numbers(6, 8), numbers(6, 8, seed=1)]),
    "an embedding": (F.embedding, [torch.arange(6), numbers(8, 8)]),
    "a loss": (lambda x, w, t: F.cross_entropy(F.linear(x, w), t), [numbers(6, 8), numbers(24, 8), torch.arange(6)]),
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
