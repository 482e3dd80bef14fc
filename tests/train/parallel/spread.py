"""Runs a case as `cases.run` does, where no rank has all parameters: what ranks hold is put together."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from cases import Case, Outcome, evaluate, make_batch, make_model, make_optimizer, make_runner, parts, whole
from torch import Tensor

from deepwell.train.feed import count_items


def run(case: Case) -> Outcome:
    engine, runner = make_runner(case)
    optimizer = make_optimizer(case.optimizer, runner.parameters())
    losses, norms, grads = [], [], {}
    for step in range(case.steps):
        batch = make_batch(case.first + step, case.labels)
        mine = parts(batch, runner, case.accumulation)
        losses.append(float(runner.run(mine, num_items=count_items(batch))))
        if not step:
            grads = _together({n: whole(p.grad) for n, p in runner.named_parameters() if p.grad is not None})
        norms.append(float(runner.grad_norm(case.clip)))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        runner.end_step()
    evaluated = evaluate(runner, case)
    weights = _together({name: whole(p) for name, p in runner.named_parameters()})
    for found in (grads, weights) if case.model.startswith("tied") else ():
        head = found.pop("lm_head.weight", None)
        assert head is None or torch.equal(head, found["model.embed_tokens.weight"])
    report = engine.report()
    return Outcome(
        losses=losses, grads=grads, norms=norms, evaluated=evaluated, passes=_added(dict(report.passes)),
        unmet=[note for notes in _gathered(report.notes) for note in notes if "not met" in note or "broke" in note],
        notes=[*report.notes, *getattr(runner, "notes", [])], deferred=None,
        weights=weights,
    )  # fmt: skip


def eager(case: Case) -> Outcome:
    """What bf16 formats on an fp32 model give: fp32."""
    assert case.precision == "bf16" and case.optimizer == "sgd" and case.clip is None
    model = make_model(case.model)
    optimizer = make_optimizer(case.optimizer, list(model.parameters()))
    losses, norms, grads = [], [], {}
    for step in range(case.steps):
        loss = model(**make_batch(case.first + step, case.labels)).loss
        loss.backward()
        losses.append(float(loss.detach()))
        if not step:
            grads = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        evaluated = float(model(**make_batch(99, case.labels)).loss)
    # Of one graph for training and one for evaluation, each of all layers.
    layers = len(model.model.layers)
    passes = {"cross_entropy": 2, "rope": 4 * layers, "swiglu": 2 * layers}
    passes |= {"plain_experts": 4 * layers} if case.model.startswith("moe") else {}
    return Outcome(
        losses=losses, grads=grads, norms=norms, evaluated=evaluated, passes=passes, unmet=[], notes=[], deferred=None,
        weights={name: whole(p) for name, p in model.named_parameters()},
    )  # fmt: skip


def _gathered(value: Any) -> list[Any]:
    if not dist.is_initialized():
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def _together(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """All ranks' tensors; those of one name must be the same on all of them."""
    out: dict[str, Tensor] = {}
    for rank, found in enumerate(_gathered(tensors)):
        for name, tensor in found.items():
            assert name not in out or torch.equal(out[name], tensor), f"{name} on rank {rank} is another"
            out[name] = tensor
    return out


def _added(counts: dict[str, int]) -> dict[str, int]:
    out: dict[str, int] = {}
    for found in _gathered(counts):
        for name, count in found.items():
            out[name] = out.get(name, 0) + count
    return out
