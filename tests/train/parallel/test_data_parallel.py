"""DDP, ZeRO and tensor parallelism on two processes, against one process: the quick part of the matrix."""

from __future__ import annotations

import pytest
from cases import Case, Outcome
from compare import difference, outcomes

QUICK = (
    # Buckets small enough for several; the second micro-batch of rank 1 predicts nothing.
    Case(
        name="ddp", layout={"dp": 2, "sharding": "ddp"}, accumulation=2, settings={"bucket_mib": 0.05}, clip=0.5,
        optimizer="adamw_dw",
    ),
    Case(name="zero1", layout={"dp": 2, "sharding": "zero1"}, accumulation=2, clip=0.5, optimizer="adamw_dw"),
    Case(
        name="zero3", layout={"dp": 2, "sharding": "zero3"}, model="tied", precision="mxfp8", labels="all",
        recompute=True,
    ),
    Case(name="tp", layout={"dp": 1, "tp": 2}, clip=0.5, optimizer="adamw_dw"),
)  # fmt: skip


@pytest.fixture(scope="module")
def found() -> dict[str, tuple[Outcome, Outcome]]:
    return outcomes(QUICK)


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
def test_a_step_on_two_ranks_is_the_step_of_one(case: Case, found: dict[str, tuple[Outcome, Outcome]]) -> None:
    far = difference(*found[case.name])
    assert far.grad < 1e-5, far
    is_exact = case.precision == "bf16"
    assert far.loss < (1e-5 if is_exact else 1e-3), far
    assert far.norm < (1e-5 if is_exact else 1e-2), far
    assert far.evaluated < (1e-5 if is_exact else 1e-3), far


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
def test_passes_fire_in_regions(case: Case, found: dict[str, tuple[Outcome, Outcome]]) -> None:
    """Both layers share one graph, of which there is one for training and one for evaluation; one sum of each layer
    meets the next one's norm across a border."""
    here, alone = found[case.name]
    graphs = 2
    # Hugging Face, told to recompute, has the embedding's output require gradients: evaluation's first layer differs.
    layers = graphs + case.recompute
    assert here.passes["cross_entropy"] == alone.passes["cross_entropy"] == graphs
    for name in ("rope", "swiglu", "linear"):
        assert here.passes.get(name, 0) / layers == alone.passes.get(name, 0) / graphs / 2, name
    assert alone.passes["residual_norm"] == graphs * 4
    assert here.passes["residual_norm"] == layers
    assert here.passes["rms_norm"] == layers * 2 + graphs
    assert "causal_mask" not in {name for name, count in here.passes.items() if count}  # attention gets no mask
    assert here.unmet == []
    assert here.deferred is True
    assert here.buckets > 2 if case.name == "ddp" else here.buckets == 0
