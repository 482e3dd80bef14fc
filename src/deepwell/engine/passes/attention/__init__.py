"""Attention in graphs: which pairs a mask opens, and what is given to the backend in its place."""

from deepwell.engine.passes.attention.flexible import rewrite_flexible
from deepwell.engine.passes.attention.narrow_values import rewrite_narrow_values
from deepwell.engine.passes.attention.rewrite import rewrite_attention

__all__ = ["rewrite_attention", "rewrite_flexible", "rewrite_narrow_values"]
