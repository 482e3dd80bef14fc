"""The formats and options of an engine as a file keeps them, and the engine that they give again.

A policy says what was asked for; an engine may run less of it: a GEMM that was found fragile, one that the guard took
back, a linear that FP8 would not speed up. What it runs now is pinned, module path by module path, so that the loaded
engine runs the same. It measures nothing: a linear whose codes are in the file is multiplied by them at every size.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from deepwell.engine.compile import compile as compile_engine
from deepwell.engine.engine import Engine
from deepwell.graph.ir import IR
from deepwell.precision.gemm_format import GEMMS, POLICY_FORMATS
from deepwell.precision.policy import PrecisionPolicy

_RECOMPUTE = ("hidden", "copies", "nothing")
# The options of `dw.compile` that change what is computed, or how fast.
OPTIONS = dict.fromkeys(("inductor", "cuda_graphs", "fuse_head", "cache_weights"), bool) | {"recompute": _RECOMPUTE}
# What one GEMM of one linear runs in where the policy says otherwise.
PIN = {"path": str, "gemm": GEMMS, "format": POLICY_FORMATS, "reason": str}


def options_of(engine: Engine) -> dict[str, Any]:
    """The engine's own OPTIONS."""
    own = engine.deepwell.options
    return {
        "inductor": own.use_inductor,
        "cuda_graphs": bool(own.cuda_graphs),
        "fuse_head": own.fuse_head,
        "cache_weights": own.cache_weights,
        "recompute": own.recompute if own.recompute in _RECOMPUTE else "hidden",
    }


def pins_of(engine: Engine) -> list[dict[str, str]]:
    """What the engine runs now that its policy does not say, as PINs."""
    resolution = engine.deepwell.policy.resolve(engine.deepwell.ir, engine.deepwell.step)
    slower = {path: gain.reason for path, gain in engine.deepwell.options.gains.items() if not gain.gains}
    found = []
    for row in engine.deepwell.bound.bindings:
        asked = resolution[row.path][row.gemm].precision
        runs = "bf16" if row.scheme == "bf16" or row.path in slower else row.format
        if asked.is_low and runs != asked.format:
            reason = slower.get(row.path, row.reason)
            found.append({"path": row.path, "gemm": row.gemm, "format": runs, "reason": reason})
    return found


def rebuilt(
    ir: IR,
    policy: PrecisionPolicy,
    pins: Sequence[Mapping[str, str]],
    options: Mapping[str, Any],
    *,
    step: int,
    is_cuda: bool,
) -> Engine:
    """The engine of a captured model with these formats. Inductor and CUDA graphs where the device has them."""
    own = policy.copy()
    for pin in pins:
        own.set_layer_precision(pin["path"], pin["format"], gemms=pin["gemm"])
    on_cpu = {} if is_cuda else {"inductor": None, "cuda_graphs": False, "cache_weights": False}
    engine = compile_engine(ir, precision_policy=own, measure=False, **{**options, **on_cpu})
    return engine.deepwell.at_step(step)
