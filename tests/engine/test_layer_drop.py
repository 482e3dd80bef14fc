"""LayerDrop: at a rate of 0 a model is one graph and draws what eager mode draws; above, layers are dropped as ever."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import deepwell as dw
from deepwell.engine.backend import keep_draws
from deepwell.graph.layer_drop import layer_drop_decided


def _opt(model: nn.Module) -> bool:
    if model.training:
        number = torch.rand([])
        if number < model.rate:
            return True
    return False


def _wav2vec2(model: nn.Module) -> Any:
    number = torch.rand([])
    return model.training and number < model.rate


def _musicgen(model: nn.Module) -> bool:
    number = random.uniform(0, 1)
    return model.training and (number < model.rate)


class Layer(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(32, 32), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.linear(x))


class Layers(nn.Module):
    def __init__(self, is_dropped: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(dropout) for dropout in (0.1, 0.2, 0.3))  # no two could share a graph
        self.rate, self.is_dropped = 0.0, is_dropped

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            is_dropped = self.is_dropped(self)
            if not is_dropped:
                x = layer(x)
        return x


def step(model: nn.Module, call: Callable[..., Tensor]) -> list[Any]:
    """A seeded step: what comes out, all gradients, and where the generators are behind it."""
    torch.manual_seed(3)
    random.seed(3)
    model.zero_grad()
    out = call(torch.ones(4, 32, requires_grad=True))
    out.square().sum().backward()
    grads = [torch.zeros(1) if p.grad is None else p.grad for p in model.parameters()]
    return [out.detach(), *grads, torch.get_rng_state(), torch.tensor(random.random())]


@pytest.mark.parametrize("is_dropped", [_opt, _wav2vec2, _musicgen])
def test_a_rate_of_zero_is_one_graph_and_draws_the_same_numbers(is_dropped) -> None:
    model = Layers(is_dropped)
    engine = dw.compile(model, precision="bf16", inductor=False)
    for rate in (0.0, 0.3):
        model.rate = rate
        for got, wanted in zip(step(model, engine), step(model, model), strict=True):
            torch.testing.assert_close(got, wanted, rtol=0, atol=0)
        assert (engine.options.graphs == 1) == (rate == 0)


def test_inductors_graphs_draw_outside() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    numbers = [graph.call_function(torch.rand, ([],)) for _ in range(2)]
    read = graph.call_function(torch.rand, ([],))
    graph.output((graph.call_function(torch.add, (x, read)),))
    module = fx.GraphModule(nn.Module(), graph)
    run = keep_draws(module, outside=True)(module)
    assert numbers[0].graph is graph and sum(node.target is torch.rand for node in module.graph.nodes) == 1
    torch.manual_seed(0)
    out = run(torch.zeros(()))
    after = torch.rand([])
    torch.manual_seed(0)
    assert [float(value) for value in (*out, after)] == [float(torch.rand([])) for _ in range(4)][2:]


def test_a_comparison_that_is_read_as_a_tensor_is_one() -> None:
    def compared(x: Tensor) -> tuple[Any, ...]:
        is_less = torch.rand([]) < 0.0
        return is_less, x * is_less, torch.where(is_less, x, 2 * x), torch.rand(3) < 0.0

    with layer_drop_decided():
        found = torch.compile(compared, backend="eager", fullgraph=True)(torch.ones(3))
    for got, wanted in zip(found, compared(torch.ones(3)), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)
