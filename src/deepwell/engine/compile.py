"""`dw.compile`: an IR, a policy and this device become an engine."""

from __future__ import annotations

import difflib
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from deepwell.engine.arguments import (
    captured,
    check_flags,
    check_recompute,
    check_sizes,
    limit_experts,
    notes_on_hardware,
    policy_of,
)
from deepwell.engine.binding import FP8_1X128, GROUPED_FP8, Bound, Target, bind
from deepwell.engine.engine import Engine
from deepwell.engine.fragile import check_batch
from deepwell.engine.overrides import Overrides
from deepwell.engine.passes.work import BackendOptions
from deepwell.engine.recompute import LayerRecompute
from deepwell.errors import ConfigError, UnsupportedError
from deepwell.graph.ir import IR
from deepwell.hardware.amx import bf16_fault
from deepwell.hardware.capability import capability_of
from deepwell.hardware.host import read_host
from deepwell.hardware.model import Hardware
from deepwell.kernels.cutlass.library import why_unavailable
from deepwell.kernels.gemm.native_candidates import FORMATS, native_kernel
from deepwell.kernels.registry import KernelRegistry, default_registry
from deepwell.kernels.tune.choose import why_rejected
from deepwell.planner.plan import Plan
from deepwell.precision.policy import PrecisionPolicy

FALLBACKS = ("safe", "strict")
NO_OVERRIDES = Overrides()
# Without low precision and Inductor there is nothing to gain on a CPU: fusions there are plain torch, and graphs that
# run node by node cost more than the model's own Python. `inductor=False` asks for the passes all the same.
PLAIN_ON_CPU = True

__all__ = ["Engine", "compile", "optimize_for_blackwell"]


def compile(  # noqa: A001 - the public name
    ir: IR | nn.Module,
    hw: Hardware | str | None = None,
    *,
    plan: Plan | None = None,
    precision: str | None = None,
    precision_policy: PrecisionPolicy | str | None = None,
    fallback: str = "safe",
    inductor: bool | None = None,
    cuda_graphs: bool | None = None,
    recompute: bool | str = False,
    fuse_head: bool = True,
    cache_weights: bool = False,
    use_cutlass: bool = False,
    kernel_registry: KernelRegistry | None = None,
    measure: bool | None = None,
    example_inputs: Any = None,
) -> Engine:
    """Bind kernels to the model behind `ir` and return an engine that is called like it.

    `precision` names a recipe ("mxfp8" where nothing is said), `precision_policy` replaces it; a `plan` brings its own
    policy and says which layers are recomputed. `fallback="strict"` raises UnsupportedError where a format is not
    native here; "safe" binds the nearest and says so in `engine.report()`. `inductor` compiles what no pass touches; by
    default on a GPU only. On a CPU, where nothing leaves the model's dtype and `inductor` is not given, the model runs
    as it was written. `cuda_graphs` records forward and backward once and replays them, for steps whose kernels are
    shorter than their launches; by default where the first calls show that the GPU waits for the host.
    `recompute=True` keeps each layer's input alone and computes the layer again in the backward; a word says which FP8
    copies the backward recomputes: "hidden" (an MLP's hidden values; as with False), "copies" (of all inputs of
    linears: less memory), "nothing". `fuse_head` computes head and loss together and the logits only where they are
    looked at. `cache_weights` keeps the FP8 weights, 2 bytes for each, and recomputes them only where a weight changed:
    once for a step, however many micro-batches it has.
    `kernel_registry` lets its kernels, users' own included, compete for the low-precision products;
    `use_cutlass` lets Deepwell's own compete, CUTLASS among them. `measure` keeps layers in bf16 where FP8 would not be
    faster on this GPU (with "strict": raises); by default with "safe". `example_inputs` is one batch as the model
    takes it (a dict of keyword arguments, a tuple or a tensor): GEMMs that their formats would spoil on it stay in bf16
    (with "strict": raises), see `Engine.check_fragile`. `hw` describes the machine to run on, or is its name as for
    `dw.probe`; the engine always runs where the model is, and the report has a note where that is another device.
    """
    check_fallback(fallback)
    check_flags(inductor=inductor, cuda_graphs=cuda_graphs, fuse_head=fuse_head, cache_weights=cache_weights)
    check_flags(use_cutlass=use_cutlass, measure=measure)
    if example_inputs is not None:
        check_batch("example_inputs", example_inputs)
    ir = captured(ir)
    model = ir.require_module()
    device = device_of(list(model.parameters()))
    if plan is not None:
        check_plan(plan, ir)
    policy = policy_of(plan, precision, precision_policy).copy().freeze()
    registry, missing = registry_for(kernel_registry, use_cutlass, device)
    elsewhere = notes_on_hardware(hw, device)
    layers, kept = recomputed_layers(plan, check_recompute(recompute))
    kept = [*kept, *limit_experts(model, plan)]
    options = BackendOptions(
        registry=registry,
        measure=measured_fallback(measure, fallback, device),
        use_inductor=use_inductor(inductor, device),
        cuda_graphs=use_cuda_graphs(cuda_graphs, device),
        fuse_head=fuse_head,
        cache_weights=cache_weights,
        recompute=recompute if isinstance(recompute, str) else "hidden",
        plain_as_written=PLAIN_ON_CPU and device.kind == "cpu" and inductor is None and registry is None and not plan,
    )

    def bind_at(ir: IR, step: int, overrides: Overrides = NO_OVERRIDES) -> tuple[Bound, BackendOptions]:
        resolution = overrides.applied(policy.resolve(ir, step))
        bound = overrides.explained(bind(ir, resolution, device, fallback=fallback), resolution)
        notes = (*elsewhere, *resolution.notes, *missing, *kept)
        return replace(bound, notes=notes), options.for_schemes(bound.schemes)

    if fallback == "strict":
        for step in policy.changes(ir):
            bind_at(ir, step)  # better now than after a thousand steps
    bound, first = bind_at(ir, 0)
    engine = Engine(ir, bound, policy, options=first, device=str(device), bind_at=bind_at, plan=plan)
    if layers is not None:
        engine.deepwell.recompute(LayerRecompute(ir, layers or None))
    if example_inputs is not None:
        engine.deepwell.check_fragile(example_inputs, strict=fallback == "strict")
    return engine


def optimize_for_blackwell(
    model: nn.Module, precision: str = "mxfp8", batch_size: int | None = None, seq_len: int | None = None
) -> Engine:
    """Capture and compile in one call.

    `batch_size` and `seq_len` may say what is coming. Nothing depends on them: the engine takes any batch and length
    and compiles for those of its first call.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is a {type(model).__name__}; pass a torch.nn.Module")
    # The capture has a length of its own that no width of the model shares, which distinguishes the axes.
    check_sizes(batch_size=batch_size, seq_len=seq_len)
    return compile(model, precision=precision)


def check_plan(plan: Plan, ir: IR) -> None:
    """Raise ConfigError unless `plan` is a Plan of this model."""
    if not isinstance(plan, Plan):
        raise ConfigError(f"plan is a {type(plan).__name__}; pass what dw.autoplan(...) returned")
    planned = plan.workload.ir
    if (planned.num_params, planned.num_layers) != (ir.num_params, ir.num_layers):
        raise ConfigError(
            f"plan is of {plan.model} with {planned.num_layers} layers and {planned.num_params:,} parameters; "
            f"ir has {ir.num_layers} and {ir.num_params:,}: plan for this model"
        )


def recomputed_layers(plan: Plan | None, recompute: bool) -> tuple[int | None, list[str]]:
    """How many layers are recomputed (0: all, None: none), and notes on what of the plan is not."""
    if recompute or plan is None:
        return 0 if recompute else None, []
    chosen = plan.layout.recompute
    if chosen.kind == "full":
        return 0, []
    if chosen.kind == "block":
        return chosen.layers or None, []
    others = sorted(set(chosen.modules) - {"core_attn"})
    # Attention kernels keep no scores: core_attn is recomputed in any case.
    return None, [f"the plan recomputes {', '.join(others)}; the engine keeps them"] if others else []


def use_cuda_graphs(asked: bool | None, device: Target) -> bool | None:
    """Whether forward and backward are recorded and replayed; None: the engine measures whether that is faster.

    Raises UnsupportedError off a GPU.
    """
    if asked and device.kind != "cuda":
        raise UnsupportedError(f"cuda_graphs=True needs a CUDA GPU; the model is on {device.kind}")
    return asked if device.kind == "cuda" else False


def registry_for(
    registry: KernelRegistry | None, use_cutlass: bool, device: Target
) -> tuple[KernelRegistry | None, list[str]]:
    """The registry that chooses kernels, or None, and a note where CUTLASS was asked for and is missing."""
    if registry is not None and not isinstance(registry, KernelRegistry):
        raise ConfigError(f"kernel_registry is a {type(registry).__name__}; pass a deepwell.kernels.KernelRegistry")
    if not use_cutlass:
        return registry, []
    reason = why_unavailable() if device.kind == "cuda" else f"a {device.kind} has no CUTLASS kernels"
    chooser = registry if registry is not None else default_registry()
    return chooser, [f"use_cutlass: other kernels run instead: {reason}"] if reason else []


def measured_fallback(measure: bool | None, fallback: str, device: Target) -> str | None:
    """The value of BackendOptions.measure: only FP8 hardware is measured, and under "strict" only on demand."""
    wanted = fallback == "safe" if measure is None else measure
    return fallback if wanted and device.has_fp8 else None


def check_fallback(fallback: str) -> str:
    """Return `fallback`; raises ConfigError unless it is one of FALLBACKS."""
    if fallback not in FALLBACKS:
        near = difflib.get_close_matches(str(fallback), FALLBACKS, n=1)
        raise ConfigError(f"fallback is {fallback!r}; it takes {' or '.join(near or FALLBACKS)}")
    return fallback


def device_of(tensors: Sequence[Tensor]) -> Target:
    """The one device that all tensors lie on. Raises ConfigError or UnsupportedError where nothing can run there."""
    devices = {tensor.device for tensor in tensors} or {torch.device("cpu")}
    kinds = {device.type for device in devices}
    if "meta" in kinds:
        raise ConfigError("the model is on the meta device: it can be planned for, not run; give it real weights first")
    if len(devices) > 1:
        raise UnsupportedError(
            f"the model's parameters lie on {', '.join(sorted(map(str, devices)))}; move them to one"
        )
    device = devices.pop()
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        unproven = unproven_formats(capability, device)
        if any(tensor.dim() == 3 for tensor in tensors) and (
            reason := why_rejected("grouped_gemm", device)
        ):  # 3D: experts
            unproven += ((GROUPED_FP8, reason),)
        return Target(kind="cuda", capability=capability, unproven=unproven)
    if device.type != "cpu":
        raise UnsupportedError(f"the model is on {device}; an engine runs on CUDA GPUs and on the CPU")
    if any(tensor.dtype is torch.bfloat16 for tensor in tensors):
        fault = _bf16_fault()
        if fault:
            raise UnsupportedError(f"bf16 on this CPU: {fault}")
    return Target(kind="cpu")


def unproven_formats(capability: tuple[int, int], device: torch.device) -> tuple[tuple[str, str], ...]:
    """(format, reason) of each format with block scales of the device whose kernels fail their self-check on it."""
    known = capability_of(capability).native_formats
    found = ((name, native_kernel(name, device)) for name in FORMATS if name in known)
    failed = [(name, reason) for name, (kernel, reason) in found if kernel is None]
    if FP8_1X128 in known and (reason := why_rejected("fp8_gemm_blocks", device)):
        failed.append((FP8_1X128, reason))
    return tuple(failed)


@lru_cache(maxsize=1)
def _bf16_fault() -> str:
    """Why bf16 is wrong on this CPU, "" where it is right. Cached: the check starts a process that loads torch."""
    return bf16_fault(read_host().instruction_sets)


def use_inductor(asked: bool | None, device: Target) -> bool:
    """Whether Inductor compiles what no pass touches: on a GPU by default. Raises UnsupportedError."""
    if asked and device.kind == "cpu" and not (shutil.which("g++") or shutil.which("clang++")):
        raise UnsupportedError("inductor=True needs a C++ compiler on a CPU: install g++, or leave it out")
    return device.kind == "cuda" if asked is None else asked
