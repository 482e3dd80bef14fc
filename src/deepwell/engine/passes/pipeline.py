"""All rewrites of graphs, in the order in which they run: PASSES.

On Dynamo's graph, where a linear is a linear: norms, attention, linears, SwiGLU, head and loss. On AOTAutograd's joint
graph, where both readers of a value are seen: who multiplies by scales of rows, what the backward recomputes. On its
forward and backward, where quantizations are nodes of their own: fusing them into their producers, choosing kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import fx

from deepwell.engine.passes.attention import rewrite_attention, rewrite_flexible, rewrite_narrow_values
from deepwell.engine.passes.before_linear import rewrite_before_linears
from deepwell.engine.passes.bias_epilogue import fuse_bias
from deepwell.engine.passes.edit import erase_unread
from deepwell.engine.passes.embedding import rewrite_embedding
from deepwell.engine.passes.emulated_products import emulate_in_bf16
from deepwell.engine.passes.experts import group_loops, rewrite_dense_experts, rewrite_fallback
from deepwell.engine.passes.fuse_quantize import fuse_quantize, fuse_recomputed_rows
from deepwell.engine.passes.gelu import rewrite_gelu
from deepwell.engine.passes.qk_norm_rope import rewrite_qk_norm_rope
from deepwell.engine.passes.recompute import mark_recomputed, save_readers_of_written
from deepwell.engine.passes.residual import norm_again_from_sums, rewrite_residual_norm
from deepwell.engine.passes.rms_norm import rewrite_rms_norm
from deepwell.engine.passes.rope import rewrite_rope
from deepwell.engine.passes.swiglu import rewrite_swiglu
from deepwell.engine.passes.top_k import rewrite_top_k
from deepwell.engine.passes.work import (
    Work,
    choose_by_registry,
    move_row_scales,
    note_unmatched,
    rewrite_all_experts,
    rewrite_all_linears,
    rewrite_head,
    see_unmatched,
)
from deepwell.engine.times.ops import record_calls
from deepwell.graph.fx import give_operands_by_position, mark_changed

DYNAMO, JOINT, COMPILED = "dynamo", "joint", "compiled"


@dataclass(frozen=True, slots=True)
class Pass:
    """One rewrite. It gets the graph and what it `needs`, and returns a count for each of the words in its name.

    It runs at its level if the option `when` is on.
    """

    name: str
    level: str
    function: Callable[..., Any]
    needs: tuple[str, ...] = ()
    when: str = ""


def run(level: str, graph: fx.Graph, work: Work) -> None:
    """Run the passes of one level; each sees what the ones before it made. Counts go to the options."""
    for item in PASSES:
        if item.level != level or (item.when and not work.get(item.when)):
            continue
        found = item.function(graph, *(work.get(name) for name in item.needs))
        names = item.name.split()
        if found is not None and names:
            for name, count in zip(names, found if isinstance(found, tuple) else (found,), strict=True):
                work.options.note(name, count)


def swapped(name: str, function: Callable[..., Any]) -> tuple[Pass, ...]:
    """PASSES with another function under a name: to compare what a pass does with what happens without it."""
    assert name in [item.name for item in PASSES]
    return tuple(replace(item, function=function) if item.name == name else item for item in PASSES)


def files() -> tuple[str, ...]:
    """The source of all passes: compiled code that is kept on disk belongs to it."""
    return tuple(sorted(map(str, Path(__file__).parent.rglob("*.py"))))


# fmt: off
PASSES: tuple[Pass, ...] = (
    Pass("",                                      DYNAMO,   give_operands_by_position),
    Pass("",                                      DYNAMO,   mark_changed),
    Pass("",                                      DYNAMO,   see_unmatched, ("work",)),
    Pass("causal_mask kv_heads window attention", DYNAMO,   rewrite_attention, ("outer",)),
    Pass("packed soft_cap",                       DYNAMO,   rewrite_flexible, ("outer",), when="use_inductor"),
    Pass("narrow_values",                         DYNAMO,   rewrite_narrow_values),
    Pass("cross_entropy",                         DYNAMO,   rewrite_head, ("work",), when="fuse_head"),
    Pass("embedding",                             DYNAMO,   rewrite_embedding),
    Pass("gelu",                                  DYNAMO,   rewrite_gelu),
    Pass("rms_norm",                              DYNAMO,   rewrite_rms_norm),
    Pass("linear merged_linear",                  DYNAMO,   rewrite_all_linears, ("work",)),
    Pass("qk_norm_rope",                          DYNAMO,   rewrite_qk_norm_rope),
    Pass("rope rope_qkv",                         DYNAMO,   rewrite_rope),
    Pass("swiglu",                                DYNAMO,   rewrite_swiglu),
    Pass("dense_experts",                         DYNAMO,   rewrite_dense_experts),
    Pass("looped_experts",                        DYNAMO,   group_loops, ("weights", "schemes")),
    Pass("experts fused_experts",                 DYNAMO,   rewrite_all_experts, ("work",)),
    Pass("plain_experts",                         DYNAMO,   rewrite_fallback),
    Pass("layer_norm activation bias_activation", DYNAMO,   rewrite_before_linears),
    Pass("residual_norm",                         DYNAMO,   rewrite_residual_norm),
    Pass("",                                      DYNAMO,   note_unmatched, ("work",)),
    Pass("",                                      DYNAMO,   erase_unread),
    Pass("",                                      JOINT,    save_readers_of_written, when="use_inductor"),
    Pass("",                                      JOINT,    norm_again_from_sums, when="recomputes_copies"),
    Pass("row_factors",                           JOINT,    move_row_scales, ("work",), when="row_factors"),
    Pass("recomputed",                            JOINT,    mark_recomputed, ("recompute",), when="recomputes"),
    Pass("fused_quantize",                        COMPILED, fuse_quantize),
    Pass("fused_recompute",                       COMPILED, fuse_recomputed_rows, when="use_inductor"),
    Pass("",                                      COMPILED, choose_by_registry, ("work",)),
    Pass("bias_epilogue",                         COMPILED, fuse_bias),
    Pass("",                                      COMPILED, emulate_in_bf16),
    Pass("top_k",                                 COMPILED, rewrite_top_k),
    Pass("",                                      COMPILED, record_calls, ("calls",)),
)
# fmt: on
