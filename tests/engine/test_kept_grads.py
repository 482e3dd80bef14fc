"""Gradients kept over replays of CUDA graphs; the replays themselves are in test_cache_weights.py and test_gpu.py."""

import torch
from torch import nn

import deepwell as dw
from deepwell.engine.calls.kept_grads import KeptGrads
from deepwell.formats.metrics import assert_bitwise_equal


def test_a_gradient_is_copied_once_and_then_added_to_in_place():
    parameter = nn.Parameter(torch.zeros(4))
    memory = torch.ones(4)  # what a recorded backward writes each time
    kept = KeptGrads(lambda: [parameter])
    parameter.grad = memory
    assert kept.keep() == 1
    memory.fill_(2.0)
    parameter.grad += memory
    assert kept.keep() == 0
    memory.fill_(5.0)
    assert_bitwise_equal(parameter.grad, torch.full((4,), 3.0))
    parameter.grad = memory  # as after zero_grad(set_to_none=True) and a step
    assert kept.keep() == 1
    parameter.grad = None
    assert kept.keep() == 0


def test_an_engine_keeps_them_only_where_graphs_are_replayed():
    model, x = nn.Sequential(nn.Linear(16, 16)), torch.randn(4, 16)
    for cuda_graphs in (False, True):
        engine = dw.compile(model, precision="bf16", inductor=False, measure=False)
        engine.options.cuda_graphs = cuda_graphs
        model.zero_grad()
        engine(x).sum().backward()
        before = model[0].weight.grad.data_ptr()
        with torch.no_grad():
            engine(x)
        assert model[0].weight.grad.data_ptr() == before
        engine(x)
        assert (model[0].weight.grad.data_ptr() != before) == cuda_graphs
