"""Every kind of parallelism on two processes, against one process: the quick part of the matrices.

One test: a process group and the runs of one process serve all cases.
"""

from __future__ import annotations

import cases
import spread
from cases import Case, Outcome
from compare import difference, outcomes
from test_model_parallel import check

from deepwell.planner.layout import Offload

_ADAMW = {"clip": 0.5, "optimizer": "adamw_dw"}
_ULYSSES = {"dp": 1, "cp": 2, "context_parallel_kind": "ulysses"}

DATA = (
    # Buckets small enough for several; the second micro-batch of rank 1 predicts nothing.
    Case(
        name="ddp", layout={"dp": 2, "sharding": "ddp", "offload": Offload(activations=1.0)}, accumulation=2,
        settings={"bucket_mib": 0.05}, **_ADAMW,
    ),
    Case(
        name="zero3", layout={"dp": 2, "sharding": "zero3"}, model="tied", precision="mxfp8", labels="all",
        recompute=True,
    ),
    Case(name="tp", layout={"dp": 1, "tp": 2}, **_ADAMW),
)  # fmt: skip
MODEL = (
    Case(name="pp 1f1b", layout={"dp": 1, "pp": 2}, accumulation=4),
    Case(name="cp ulysses", layout=_ULYSSES),
    Case(
        name="ep", layout={"dp": 2, "ep": 2, "sharding": "zero3", "offload": Offload(optimizer=1.0)}, model="moe",
        accumulation=2,
    ),
)  # fmt: skip


def run(case: Case) -> Outcome:
    """Data and tensor parallel ranks hold all parameters; those of the others are put together."""
    if case.layout.keys() & {"pp", "cp", "ep"}:
        return spread.run(case)
    # In bf16 mode one process without an engine gives the same: nothing is compiled.
    return (
        spread.eager(case)
        if not case.layout and case.optimizer == "sgd" and case.precision == "bf16"
        else cases.run(case)
    )


def test_two_ranks_do_the_steps_of_one() -> None:
    found = outcomes((*DATA, *MODEL), run)
    for case in DATA:
        here, alone = found[case.name]
        far, is_exact = difference(here, alone), case.precision == "bf16"
        assert far.grad < 1e-5, (case.name, far)
        assert far.loss < (1e-5 if is_exact else 1e-3), (case.name, far)
        assert far.norm < (1e-5 if is_exact else 1e-2), (case.name, far)
        assert far.evaluated < (1e-5 if is_exact else 1e-3), (case.name, far)
        check_regions(case, here, alone)
    for case in MODEL:
        check(case, *found[case.name])


def check_regions(case: Case, here: Outcome, alone: Outcome) -> None:
    """Both layers share one graph, of which there is one for training and one for evaluation; one sum of each layer
    meets the next one's norm across a border."""
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
