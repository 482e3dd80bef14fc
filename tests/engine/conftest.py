"""What the engine's tests share: one pass run on one captured graph, and tiny Hugging Face models."""

import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from deepwell.engine.passes.edit import erase_unread

# So that tests can `import zoo_models`, the tiny Hugging Face models of the graph tests, and what lies beside them.
sys.path += [str(Path(__file__).resolve().parents[1] / "graph"), str(Path(__file__).resolve().parent)]

torch.set_num_threads(1)


@dataclass(frozen=True, kw_only=True)
class Rewritten:
    """What a pass returned, the graph it left and what that graph computes."""

    found: Any
    graph: fx.Graph
    out: Any

    def names(self) -> list[str]:
        """The called functions and methods by name, in order."""
        calls = [node for node in self.graph.nodes if node.op in ("call_function", "call_method")]
        return [n.target if isinstance(n.target, str) else getattr(n.target, "__name__", str(n.target)) for n in calls]


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    """Graphs of one test are not those of the next: Dynamo counts them per function."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def run_pass() -> Callable[..., Rewritten]:
    """Capture `function(*inputs)` as one graph, run a pass on it, and run what it left."""

    def run(function: Callable[..., Any], rewrite: Callable[[fx.Graph], Any], *inputs: Any, dynamic: Any = None) -> Any:
        seen: list[tuple[Any, fx.Graph]] = []

        def backend(graph_module: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
            found = rewrite(graph_module.graph)
            erase_unread(graph_module.graph)
            graph_module.graph.lint()
            graph_module.recompile()
            seen.append((found, graph_module.graph))
            return graph_module.forward

        out = torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)(*inputs)
        assert len(seen) == 1
        return Rewritten(found=seen[0][0], graph=seen[0][1], out=out)

    return run


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    """Token ids for the tiny models, with labels; an odd length, so that nothing divides by luck."""
    import zoo_models

    ids = torch.randint(3, zoo_models.VOCAB, (2, 37), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


@pytest.fixture
def cxx_compiler() -> None:
    """Inductor writes C++ on a CPU; a bare machine has no compiler for it."""
    if not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("Inductor on a CPU needs a C++ compiler")
