"""BlackwellGraphOptimizer: fused kernels for a graph, as a graph. `dw.compile` does the same for any model."""

from typing import Any

from torch import fx, nn

from deepwell.engine.compile import compile as compile_engine
from deepwell.engine.engine import Engine
from deepwell.errors import ConfigError
from deepwell.graph.capture import capture


class BlackwellGraphOptimizer:
    """Matches patterns (linear and GELU, norm and linear, attention), puts fused kernels there and binds formats."""

    def __init__(self, precision: str = "mxfp8") -> None:
        self.precision = precision

    def optimize(self, graph: nn.Module, example_inputs: Any = None) -> fx.GraphModule:
        """An fx.GraphModule with the call and the parameters of `graph`, whose one node is the engine that runs it.

        `graph` is an fx.GraphModule or any module; `example_inputs` as for `dw.capture`. `optimized.engine.report()`
        says what was fused and bound.
        """
        if not isinstance(graph, nn.Module):
            raise ConfigError(f"graph is a {type(graph).__name__}; pass an fx.GraphModule or an nn.Module")
        engine: Engine = compile_engine(capture(graph, example_inputs), precision=self.precision)
        found = graph.graph.nodes if isinstance(graph, fx.GraphModule) else ()
        names = [node.name for node in found if node.op == "placeholder"] or ["x"]
        around = fx.Graph()
        given = [around.placeholder(name) for name in names]
        around.output(around.call_module("engine", tuple(given)))
        return fx.GraphModule({"engine": engine}, around)
