"""Linears that share an input are one product, which learns what each of them would by itself."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import deepwell as dw
from deepwell.engine import compile as compile_module
from deepwell.engine.binding import Target


def without_gradient(linear: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return linear(x)


class Three(nn.Module):
    """Linears that share an input, and so are one product."""

    def __init__(self, bias: tuple[int, ...] = (32,)) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(32, 32) for _ in range(3))
        for linear in (self.a, self.b):
            linear.bias = nn.Parameter(torch.randn(bias))

    def forward(self, x: Tensor) -> Tensor:
        return self.c(F.gelu(self.a(x))) * self.b(x)


class Teacher(Three):
    def forward(self, x: Tensor) -> Tensor:
        target = without_gradient(self.a, x)
        return self.c(F.gelu(self.a(x))) + target * self.b(x) + F.relu(without_gradient(self.c, x)) @ self.c.weight


@pytest.mark.parametrize("sizes", [(), (1,), (1, 32), (16, 32)], ids=["teacher", *"123"])
def test_merged_linears_learn_what_they_do_by_themselves(sizes: tuple[int, ...], monkeypatch) -> None:
    torch.manual_seed(0)  # other tests' models are made before, and take numbers of the same generator
    model = Three(sizes) if sizes else Teacher()
    # As on Hopper, by the references: emulated linears are not merged.
    monkeypatch.setattr(compile_module, "device_of", lambda _: Target(kind="cuda", capability=(9, 0)))
    engine = dw.compile(model, precision_policy=dw.PrecisionPolicy("mxfp8"), inductor=False, measure=False)
    x = torch.randn(16, 32, requires_grad=True)
    found = []
    for call in (model, engine):
        model.zero_grad()
        x.grad = None
        out = call(x)
        (out * torch.linspace(-1, 2, out.numel()).view(out.shape)).sum().backward()
        found.append([out.detach(), x.grad, *(p.grad for p in model.parameters())])
    for ours, eagers in zip(found[1], found[0], strict=True):
        assert ours is not None and eagers is not None and ours.shape == eagers.shape
        assert F.cosine_similarity(ours.flatten(), eagers.flatten(), dim=0) > 0.995
    assert engine.report().passes["linear"] == (6 if isinstance(model, Teacher) else 3)
