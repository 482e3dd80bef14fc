"""`set_experts_implementation("deepwell")` gives what Hugging Face's grouped products give, for every gate."""

import pytest
import torch
import zoo_models

import deepwell  # noqa: F401 - registers the implementation
from deepwell.formats.metrics import assert_bitwise_equal, sqnr_db
from deepwell.kernels.experts.reference import ExpertActivation
from deepwell.moe.hugging_face import READS_IN_TRACES, activation_of, chooses_experts

pytest.importorskip("transformers")
KNOWN = {
    "mixtral": ExpertActivation(), "lfm2_moe": ExpertActivation(),
    "gpt_oss": ExpertActivation(interleaved=True, limit=7.0, alpha=1.702, up_shift=1.0),
    "nemotron_h": ExpertActivation(function="relu2", gated=False),
}  # fmt: skip


@pytest.mark.parametrize("model_type", KNOWN)
def test_it_gives_what_grouped_products_give(model_type):
    torch.manual_seed(0)
    model = zoo_models.tiny_model(model_type)
    module = next(m for m in model.modules() if chooses_experts(m))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.5)
    x = torch.randn(12, module.down_proj.shape[2 if module.is_transposed else 1])
    index = torch.stack([torch.randperm(module.num_experts)[:2] for _ in range(12)])
    weight, runs = torch.rand(12, 2), []
    for name in ("grouped_mm", "deepwell"):
        model.set_experts_implementation(name)
        assert module.config._experts_implementation == name
        module.zero_grad()
        given = x.clone().requires_grad_()
        y = module(given, index, weight)
        y.square().sum().backward()
        runs.append((y, given.grad, *(p.grad for p in module.parameters())))
    assert_bitwise_equal(runs[1][0], runs[0][0])
    for wanted, got in zip(*runs, strict=True):  # rows of an expert are added up in another order
        assert sqnr_db(wanted, got) > 110
    found, how = activation_of(module), KNOWN[model_type]
    probe = torch.linspace(-9, 9, 64).expand(2, 64)
    assert found is not None and torch.allclose(found.of_rows(probe), how.of_rows(probe), rtol=1e-6)


def test_it_runs_in_a_graph_that_is_made_before_the_model_was_ever_called():
    model = zoo_models.tiny_model("gpt_oss")
    model.set_experts_implementation("deepwell")
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph.code)
        return graph

    compiled, tokens = torch.compile(model, backend=backend, fullgraph=True), torch.arange(12).view(2, 6)
    got = [compiled(input_ids=tokens).logits for _ in range(2)]
    assert len(graphs) == 1
    # Hugging Face's products run in its stead where Dynamo cannot ask a module what its gate does.
    assert ("grouped_mm" in graphs[0]) != READS_IN_TRACES
    model.set_experts_implementation("eager")
    assert sqnr_db(model(input_ids=tokens).logits, got[1]) > 100


def test_a_gate_that_nobody_knows_runs_as_grouped_products():
    model = zoo_models.tiny_model("mixtral")
    module = next(m for m in model.modules() if chooses_experts(m))
    module._apply_gate = lambda rows: torch.tanh(rows[..., : rows.shape[-1] // 2])
    assert activation_of(module) is None
    x, index, weight = torch.randn(5, module.gate_up_proj.shape[2]), torch.zeros(5, 1).long(), torch.ones(5, 1)
    results = []
    for name in ("grouped_mm", "deepwell"):
        model.set_experts_implementation(name)
        results.append(module(x, index, weight))
    assert_bitwise_equal(results[1], results[0])
