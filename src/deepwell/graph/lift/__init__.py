"""From a traced graph to the IR: patterns on the graph and its dataflow, nothing about single architectures."""

from deepwell.graph.lift.assemble import lift

__all__ = ["lift"]
