"""Experts in graphs: which products are theirs, and the one function or grouped products that take their place."""

from deepwell.engine.passes.experts.dense import rewrite_dense_experts
from deepwell.engine.passes.experts.grouped import find_experts, rewrite_calls, rewrite_experts, rewrite_fallback
from deepwell.engine.passes.experts.looped import group_loops

__all__ = [
    "find_experts", "group_loops", "rewrite_calls", "rewrite_dense_experts", "rewrite_experts", "rewrite_fallback",
]  # fmt: skip
