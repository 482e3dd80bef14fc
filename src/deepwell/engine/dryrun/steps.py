"""A few real training steps of an engine that leave no trace: weights, gradients, buffers and random states come back.

Forward, backward and adamw_dw on synthetic tokens. Weights are copied to the host before and back afterwards, bit for
bit; the optimizer is the trial's own, so that the user's is never met.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from deepwell.engine.dryrun.plan import OPTIMIZERS, Prediction, engine_device
from deepwell.engine.dryrun.values import Trial
from deepwell.engine.engine import Engine
from deepwell.errors import UnsupportedError
from deepwell.graph.example_inputs import ExampleInputs
from deepwell.kernels.tune.timing import launched_ms
from deepwell.planner.plan import Plan
from deepwell.train.adamw.optimizer import AdamWDW

# Steps before those that count: the first compiles, the others meet every kernel warm.
WARMUP = 3
# Steps at most until it is known whether CUDA graphs are replayed.
SETTLING = 12
_LR = 1e-5


def run_trial(engine: Engine, inputs: ExampleInputs, before: Prediction, steps: int) -> Trial:
    """Measure `steps` steps; where memory does not suffice, a trial that says so.

    Raises UnsupportedError where the user's own hooks on parameters would see these steps.
    """
    refuse_hooks(engine.deepwell.model)
    plan, micro_batches = before.plan, before.plan.accumulation
    trial = Trial(
        what=f"{plan.layout.micro_batch} x {plan.workload.seq_len:,} tokens, {micro_batches} micro-batch"
        f"{'es' * (micro_batches > 1)}, {plan.workload.optimizer}",
        device=plan.hardware.gpus[0].name,
        steps=steps,
        predicted_s=before.step_s,
        predicted_bytes=before.peak_bytes,
        tier=before.tier,
    )
    with untouched(engine.deepwell.model):
        try:
            return _measured(trial, engine, inputs, plan)
        except torch.OutOfMemoryError as error:
            return replace(trial, problem=f"out of memory: {str(error).splitlines()[0]}")


def refuse_hooks(model: nn.Module) -> None:
    """Raise UnsupportedError where a parameter has hooks: they may train, count or send, and cannot be undone."""
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise UnsupportedError(
                f"parameter {name} has hooks, which real steps would run; take them off, or dry-run with measure=False"
            )


# ---- leaving no trace ----


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Whatever is trained inside, the model, its gradients and every random state are the same afterwards."""
    parameters = list(model.parameters())
    buffers = [(module, name, b) for module in model.modules() for name, b in module._buffers.items() if b is not None]
    tensors = list({id(t): t for t in (*parameters, *(b for _, _, b in buffers))}.values())
    saved = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
    grads = [parameter.grad for parameter in parameters]
    modes = [(module, module.training) for module in model.modules()]
    cuda = sorted({t.device.index for t in tensors if t.is_cuda})
    python_state, numpy_state = random.getstate(), np.random.get_state()
    for parameter in parameters:
        parameter.grad = None
    try:
        with torch.random.fork_rng(devices=cuda):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        for module, mode in modes:
            module.training = mode
        for module, name, buffer in buffers:
            module._buffers[name] = buffer
        with torch.no_grad():
            for tensor, value in zip(tensors, saved, strict=True):
                tensor.copy_(value)
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad


# ---- measuring ----


class _Stepper:
    """Forward, backward and optimizer on the same batch again and again."""

    def __init__(self, engine: Engine, inputs: ExampleInputs, plan: Plan) -> None:
        self.engine, self.inputs, self.micro_batches = engine, inputs, plan.accumulation
        trained = [parameter for parameter in engine.parameters() if parameter.requires_grad]
        if not trained:
            raise UnsupportedError("the model has no parameter that requires a gradient; nothing can be trained")
        self.optimizer = AdamWDW(trained, lr=_LR, **OPTIMIZERS[plan.workload.optimizer])  # type: ignore[arg-type]

    def __call__(self) -> Tensor:
        for _ in range(self.micro_batches):
            loss = loss_of(self.engine(*self.inputs.args, **self.inputs.kwargs))
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def state_bytes(self) -> int:
        tensors = [v for state in self.optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
        return sum(t.numel() * t.element_size() for t in tensors)


def loss_of(out: Any) -> Tensor:
    """The model's own loss; where it returns none, the mean of squares of its first floating tensor."""
    loss = getattr(out, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    leaves = [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, Tensor) and t.is_floating_point()]
    if not leaves:
        raise UnsupportedError(f"the model returns {type(out).__name__} without a tensor to train on")
    return leaves[0] if leaves[0].dim() == 0 else leaves[0].float().square().mean()


def _measured(trial: Trial, engine: Engine, inputs: ExampleInputs, plan: Plan) -> Trial:
    device = engine_device(engine)
    engine.train()
    is_cuda = device.type == "cuda"
    others = 0
    if is_cuda:
        torch.cuda.synchronize(device)
        others = torch.cuda.memory_allocated(device) - _resident(engine.deepwell.model, inputs)
        torch.cuda.reset_peak_memory_stats(device)
    stepper = _Stepper(engine, inputs, plan)
    started = time.perf_counter()
    losses = [stepper().item()]
    first = time.perf_counter() - started
    losses += [stepper().item() for _ in range(WARMUP - 1)]
    for _ in range(SETTLING):
        if engine.deepwell.is_settled:
            break
        losses.append(stepper().item())
    if is_cuda:
        if not engine.deepwell.is_replayed:
            # Compiling is over: what it held for a moment is none of the step's. Recorded graphs allocate only once.
            torch.cuda.reset_peak_memory_stats(device)
        times = [ms / 1e3 for ms in launched_ms(stepper, trial.steps)]
        peak, by = torch.cuda.max_memory_allocated(device) - others, "torch.cuda.max_memory_allocated"
    else:
        times = _time_on_cpu(stepper, trial.steps)
        peak = _resident(engine.deepwell.model, inputs) + stepper.state_bytes() + _cpu_growth(stepper)
        by = "weights and state, plus what torch's CPU allocator handed out in one profiled step"
    return replace(
        trial,
        step_s=statistics.median(times),
        fastest_s=min(times),
        slowest_s=max(times),
        first_s=first,
        peak_bytes=float(peak),
        memory_by=by,
        losses=tuple(losses),
    )


def _resident(model: nn.Module, inputs: ExampleInputs) -> int:
    """Bytes of weights, buffers and the batch, tied tensors once."""
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [t for t in torch.utils._pytree.tree_leaves((inputs.args, dict(inputs.kwargs))) if isinstance(t, Tensor)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def _time_on_cpu(step: Callable[[], Any], count: int) -> list[float]:
    times = []
    for _ in range(count):
        started = time.perf_counter()
        step()
        times.append(time.perf_counter() - started)
    return times


def _cpu_growth(step: Callable[[], Any]) -> int:
    """The most that torch's CPU allocator handed out over one step, over what was there when it began."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as found:
        step()
    assert found.profiler is not None and found.profiler.kineto_results is not None
    now = peak = 0
    for event in found.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak
