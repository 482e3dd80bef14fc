"""Microseconds of each linear's GEMMs in the report, by the shapes of the compiled graphs."""

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import deepwell as dw
from deepwell.engine.binding import Binding
from deepwell.engine.passes.choose_kernels import KernelRow
from deepwell.engine.passes.linear import find_linears, rewrite_linears
from deepwell.engine.report import EngineReport
from deepwell.engine.times.gemms import LinearSizes, find_products, with_times

TOKENS = 2 * 16


@pytest.fixture(scope="module")
def reports():
    """The reports of a small Llama with a wgrad in bf16: not measured and measured."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=64))
    policy = dw.PrecisionPolicy("mxfp8")
    policy.set_layer_precision("mlp", "bf16", gemms="wgrad")
    engine = dw.compile(dw.capture(model), precision_policy=policy)
    tokens = torch.randint(0, 64, (2, 16))
    engine(input_ids=tokens, labels=tokens).loss.backward()
    return engine.report(), engine.report(measure=True)


def test_every_gemm_of_every_linear_has_its_shape_and_time(reports):
    _, measured = reports
    rows = {(row.op, row.gemm): row for row in measured.bindings if row.layer == 1}
    assert rows["mlp.down_proj", "fwd"].shape == f"{TOKENS}x64x96"
    assert rows["mlp.down_proj", "dgrad"].shape == f"{TOKENS}x96x64"
    assert rows["mlp.down_proj", "wgrad"].shape == f"64x96x{TOKENS}"
    assert rows["self_attn.k_proj", "fwd"].shape == f"{TOKENS}x32x64"
    # Emulated and in the model's dtype alike.
    assert rows["mlp.down_proj", "wgrad"].scheme == "bf16"
    assert all(row.us > 0 for row in rows.values())
    # The head is one op with its loss: it has no product of its own.
    assert all(row.us is None and row.shape == "" for row in measured.bindings if row.path == "lm_head")


def test_layers_of_one_shape_have_one_time_so_that_they_are_printed_once(reports):
    plain, measured = reports
    times = {(row.op, row.gemm): set() for row in measured.bindings}
    for row in measured.bindings:
        times[row.op, row.gemm].add(row.us)
    assert all(len(found) == 1 for found in times.values())
    assert "layers 0-1 (2x)" in str(measured)
    assert " us " in str(measured) and " us " not in str(plain)
    down = next(row for row in measured.bindings if (row.op, row.gemm) == ("mlp.down_proj", "fwd"))
    assert f"{down.us:.1f}" in str(measured)
    assert EngineReport.from_json(measured.to_json()) == measured


def test_without_measuring_nothing_is_timed(reports):
    assert all(row.us is None and row.shape == "" for row in reports[0].bindings)


def test_merged_linears_are_one_product(run_pass):
    # FP8 linears of one input are one GEMM: each has its shape. The one beside them stays alone.
    def function(x, q, k, other):
        return F.linear(x, q) + F.linear(x, k) + F.linear(x + 1, other)

    def rewrite(graph):
        placeholders = [node.name for node in graph.nodes if node.op == "placeholder"]
        weights = {name: (f"{'xqko'[i]}.weight",) for i, name in enumerate(placeholders) if i}
        fp8 = "fp8_row|fp8_row|fp8_row"
        rewrite_linears(graph, find_linears(graph, weights, {"q": fp8, "k": fp8}))
        return find_products(graph, weights)

    weights = [torch.randn(48, 32) for _ in range(3)]
    found = run_pass(function, rewrite, torch.randn(4, 8, 32), *weights).found
    assert found == {
        "q": LinearSizes(tokens=32, n=96, k=32),
        "k": LinearSizes(tokens=32, n=96, k=32),
        "o": LinearSizes(tokens=32, n=48, k=32),
    }


def test_weights_stored_the_other_way_round_have_the_same_sizes(run_pass):
    # Conv1D: addmm with a [K, N] weight, rewritten and not.
    def function(x, w, v, bias):
        return torch.addmm(bias, x, w) + torch.addmm(bias, x * 2, v)

    def rewrite(graph):
        names = [node.name for node in graph.nodes if node.op == "placeholder"]
        by_shape = [
            node.name for node in graph.nodes if node.op == "placeholder" and node.meta["example_value"].dim() == 2
        ]
        weights = {name: (f"{name}.weight",) for name in by_shape[1:]}
        sites = find_linears(graph, weights, {by_shape[1]: "|".join(["emulate:mxfp8"] * 3)})
        rewrite_linears(graph, sites)
        assert len(sites) == 1 and names
        return find_products(graph, weights)

    inputs = (torch.randn(8, 32), torch.randn(32, 48), torch.randn(32, 48), torch.randn(48))
    found = run_pass(function, rewrite, *inputs).found
    assert list(found.values()) == [LinearSizes(tokens=8, n=48, k=32)] * 2


def _binding(gemm, scheme):
    return Binding(path="q", op="q", layer=None, gemm=gemm, format="fp8", binding="native", scheme=scheme, reason="")


def test_products_of_codes_take_the_time_of_the_kernel_that_runs_them():
    # At one shape a forward in the fast accumulator and a wgrad in fp32; a shape that nothing was measured at.
    kernels = [
        KernelRow(op="fp8_gemm", shape="64x64x64", format="", count=1, kernel="cublaslt", us=20.0),
        KernelRow(op="fp8_gemm", shape="64x64x64", format="", count=1, kernel="cublaslt_fast", us=10.0),
        KernelRow(op="quantize_rows", shape="64x64x64", format="", count=1, kernel="deepwell", us=1.0),
    ]
    rows = [_binding(gemm, "fp8_row") for gemm in ("fwd", "dgrad", "wgrad")]
    options = {"device": "cpu", "dtype": torch.float32}
    timed = with_times(rows, {"q": LinearSizes(tokens=64, n=64, k=64)}, kernels, **options)
    assert [row.us for row in timed] == [10.0, 10.0, 20.0]
    timed = with_times(rows[:1], {"q": LinearSizes(tokens=128, n=64, k=64)}, kernels, **options)
    assert [(row.us, row.shape) for row in timed] == [(None, "128x64x64")]
