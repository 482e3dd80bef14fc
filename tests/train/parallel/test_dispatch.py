"""Experts on 2 and 4 ranks give what one process gives: values, gradients, statistics."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import run_cases
from torch import Tensor

from deepwell import DeepwellMoE
from deepwell.errors import ConfigError, UnsupportedError
from deepwell.formats.metrics import sqnr_db
from deepwell.moe.dispatch import shard_experts, spread_experts
from deepwell.moe.statistics import end_step

H, FFN, E, K, WORLD = 32, 24, 8, 3, 4


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    ep: int = WORLD
    tokens: tuple[int, ...] = (9, 9, 9, 9)
    options: dict[str, Any] = field(default_factory=dict)
    skewed: bool = False
    fsdp: bool = False


_GLOBAL = {"router": {"balance_loss": {"global": 0.5}, "z_loss": 0.1}}
CASES = (
    Case(name="4 ranks, global loss", options=_GLOBAL),
    Case(name="2 ranks, shared experts beside the exchange", ep=2, options={"shared_ffn": 16, "shared_gate": True}),
    Case(name="2 x 2 with FSDP2 on the other axis", ep=2, fsdp=True),
    Case(name="all tokens to one rank", skewed=True),
    Case(name="no tokens, one token", tokens=(0, 1, 5, 30)),
    Case(name="dropped, biases", options={"capacity_factor": 0.6, "bias": True, "drop": "position"}),
    Case(name="fp8 on the way", options={"dispatch": "fp8"}),
)


def make(case: Case) -> DeepwellMoE:
    torch.manual_seed(0)
    block = DeepwellMoE(H, FFN, E, K, **case.options)
    if case.skewed:
        with torch.no_grad():
            block.gate.weight.zero_()  # ties: the first experts, all on rank 0
    return block


def inputs(case: Case) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(count, H) for count in case.tokens]


def spread(case: Case) -> dict[str, Tensor]:
    """One rank's part; gradients and outputs of all ranks are gathered on every one."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    block, rank = make(case), dist.get_rank()
    mesh = init_device_mesh("cpu", (WORLD // case.ep, case.ep), mesh_dim_names=("edp", "ep"))
    spread_experts(block.experts, mesh["ep"], is_fp8=lambda: block.config.dispatch == "fp8")
    block.gate.group = dist.group.WORLD
    if case.fsdp:
        fully_shard(block.experts, mesh=mesh["edp"])
        block.experts.set_gradient_divide_factor(1.0)
        block.experts.set_force_sum_reduction_for_comms(True)
    x = inputs(case)[rank].requires_grad_()
    y = block(x)
    y.square().sum().backward()
    found = {"x": x.grad, "y": y.detach()}
    gathered: list[Any] = [None] * WORLD
    dist.all_gather_object(gathered, found)
    whole = {name: torch.cat([each[name] for each in gathered]) for name in found}
    for name, parameter in block.named_parameters():
        grad = parameter.grad
        assert grad is not None, name
        if name.startswith("experts."):
            grad = grad.full_tensor()
            if not case.fsdp and case.ep < WORLD:  # copies of the experts on the other ranks saw other tokens
                dist.all_reduce(grad, group=mesh["edp"].get_group())
        else:
            dist.all_reduce(grad)
        whole[name] = grad
    loads = end_step(block, dist.group.WORLD).read()["gate"]
    whole["loads"] = torch.tensor(loads.tokens_per_expert)
    return whole


def alone(case: Case) -> dict[str, Tensor]:
    """One process: each rank's tokens are a micro-batch of their own, so that limits and losses see the same ones."""
    block = make(case)
    parts = [x.requires_grad_() for x in inputs(case)]
    routing = [block.gate(x) for x in parts]
    ys = []
    for i, x in enumerate(parts):
        if "global" in block.config.router.balance_loss:
            with torch.no_grad():  # what the other ranks chose
                block.gate.seen.zero_()
                for j, other in enumerate(routing):
                    if i != j:
                        block.gate.seen[:E] += torch.bincount(other.index_TK.flatten(), minlength=E)
                        block.gate.seen[E + 1] += len(parts[j])
        y = block(x)
        y.square().sum().backward()
        ys.append(y.detach())
    grads = {name: p.grad for name, p in block.named_parameters()}
    loads = torch.tensor(end_step(block).read()["gate"].tokens_per_expert)
    return {"x": torch.cat([x.grad for x in parts]), "y": torch.cat(ys), **grads, "loads": loads}


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Tensor]]:
    return dict(zip((case.name for case in CASES), run_cases(spread, CASES, WORLD), strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_ranks_give_what_one_process_gives(case: Case, found: dict[str, dict[str, Tensor]]) -> None:
    wanted, got = alone(case), found[case.name]
    assert wanted.keys() == got.keys()
    assert torch.equal(got.pop("loads"), wanted.pop("loads"))
    for name, value in wanted.items():
        if not value.any():  # the router of the skewed case has ties
            assert got[name].abs().max() < 1e-4
        elif case.options.get("dispatch") == "fp8":
            assert 20 < sqnr_db(value, got[name]) < 60, name
        else:
            assert sqnr_db(value, got[name]) > 100, name


def test_what_cannot_be_spread_is_named() -> None:
    class Mesh:
        def size(self) -> int:
            return 3

    block: Any = DeepwellMoE(H, FFN, E, K)
    with pytest.raises(ConfigError, match="ep is 3 and experts has 8"):
        shard_experts(block.experts, Mesh())  # type: ignore[arg-type]
    block.experts.num_experts = 9
    with pytest.raises(UnsupportedError, match=r"experts\.gate_up_proj is \(8, 48, 32\)"):
        shard_experts(block.experts, Mesh())  # type: ignore[arg-type]
