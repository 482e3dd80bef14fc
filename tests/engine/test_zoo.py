"""Loss and every gradient of an engine are eager's in fp32, and in mxfp8 those of linears that round one by one.

All of transformers' causal language models are looked at by `python benchmarks/zoo.py --engine`; here some that differ:
merged and gated linears, Conv1D and biases, gains without a scale that make attention sharp.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def zoo() -> ModuleType:
    path = Path(__file__).resolve().parents[2] / "benchmarks" / "zoo.py"
    spec = importlib.util.spec_from_file_location("zoo", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["zoo"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_a_traced_graph_computes_what_the_model_does(zoo, monkeypatch) -> None:
    row = zoo.examine("gpt2")
    assert (row.status, row.way) == ("graph", "dynamo"), row.notes
    run_graph = zoo.run_graph
    monkeypatch.setattr(zoo, "run_graph", lambda *given: [tensor + 0.01 for tensor in run_graph(*given)])
    row = zoo.examine("gpt2")
    assert row.status == "error" and "differs from eager by 0.01" in row.notes


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gemma4_text"])
def test_an_engine_is_exact(zoo, model_type) -> None:
    row = zoo.examine_engine(model_type)
    assert row.status == "exact", row.notes


def test_another_rounding_is_seen(zoo, monkeypatch) -> None:
    linears_of = zoo.linears_of
    monkeypatch.setattr(zoo, "linears_of", lambda model, paths: set(list(linears_of(model, paths))[1:]))
    row = zoo.examine_engine("llama")  # one linear is not rounded in the reference
    assert row.status == "error" and row.notes.startswith("mxfp8")
