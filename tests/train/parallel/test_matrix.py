"""The whole matrix of data and tensor parallelism: minutes long."""

from __future__ import annotations

import pytest
from cases import Case, Outcome
from compare import difference, outcomes
from matrix import MATRIX

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found() -> dict[str, tuple[Outcome, Outcome]]:
    return outcomes(MATRIX)


@pytest.mark.parametrize("case", MATRIX, ids=lambda case: case.name)
def test_matrix(case: Case, found: dict[str, tuple[Outcome, Outcome]]) -> None:
    here, alone = found[case.name]
    far = difference(here, alone)
    is_exact = case.precision == "bf16"
    assert far.grad < (1e-5 if is_exact else 5e-2), far
    assert far.loss < (1e-5 if is_exact else 1e-2), far
    assert far.evaluated < (1e-5 if is_exact else 1e-2), far
    assert here.unmet == []
    assert here.deferred in (True, None)
    for name in ("rope", "swiglu", "linear"):
        assert bool(here.passes.get(name)) == bool(alone.passes.get(name)), name
