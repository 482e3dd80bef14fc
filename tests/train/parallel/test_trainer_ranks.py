"""The trainer on two ranks: the losses of one process, the watch at work, and a resume on another number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from processes import run_cases, run_groups
from trained import TrainerCase, fit


def losses(found: dict[str, Any]) -> list[float]:
    last = {event["step"]: event["loss"] for event in found["events"] if event["kind"] == "step"}
    return [last[step] for step in sorted(last)]


def test_two_ranks_train_and_one_goes_on(tmp_path: Path) -> None:
    def case(name: str, **changes: Any) -> TrainerCase:
        return TrainerCase(folder=str(tmp_path / name), **changes)

    watched = {"guard": {"sample_every": 1, "sample_cost": 1.0}}
    timed = {**watched, "eval_dataloader": "synthetic:128", "eval_every": "0.001s", "eval_batches": 1}
    begun = [case("grown", stop_at=3, is_eager=True)]
    spread = [
        case("moved", layout={"sharding": "zero3"}, stop_at=3, is_eager=True),
        case("low", layout={"sharding": "zero2"}, precision="mxfp8", options=watched),
        case("ddp", layout={"sharding": "ddp"}, precision="mxfp8", options=timed, is_eager=True),
        case("grown", layout={"sharding": "zero2"}, is_eager=True),
    ]
    ended = [case("moved", is_eager=True), case("whole", is_eager=True), case("low alone", precision="mxfp8")]
    _, (*two, grown), (moved, whole, low) = run_groups(fit, [(begun, 1), (spread, 2), (ended, 1)])
    # Of clocks the first rank's counts, and all ranks evaluate then.
    assert len([event for event in two[2]["events"] if event["kind"] == "eval"]) >= 2
    assert two[0]["began"] == 0 and moved["began"] == 3
    assert losses(moved) == pytest.approx(losses(whole), rel=2e-5)
    assert grown["began"] == 3 and losses(grown) == pytest.approx(losses(whole), rel=2e-5)
    restart = next(event for event in moved["events"] if event["kind"] == "restart")
    assert restart["step"] == 3 and restart["world"] == 1 and restart["lost_steps"] == 0
    for found, alone, most in zip(two[1:], (low, whole), (1e-2, 2e-5), strict=True):
        assert losses(found) == pytest.approx(losses(alone), rel=most)
        assert found["samples"] >= 2  # layers are looked at under FSDP2 and DDP too, and training goes on
        assert not [event for event in found["events"] if event["kind"] == "guard" and event["what"] == "skip"]
        assert all(event["world"] == 2 for event in found["events"] if event["kind"] == "run")


@pytest.mark.slow
def test_tensor_experts_and_contexts_stop_and_go_on_anywhere(tmp_path: Path) -> None:
    def case(name: str, **changes: Any) -> TrainerCase:
        return TrainerCase(folder=str(tmp_path / name), **{"model": "shared", **changes})

    split = {"tp": 2, "ep": 2, "sharding": "zero3"}
    context = {"tp": 2, "cp": 2, "context_parallel_kind": "ulysses", "sharding": "zero2"}
    begun = run_cases(
        fit, [case("down", layout=split, stop_at=3), case("again", layout=split, stop_at=2)], world=2, timeout=400
    )
    assert [each["began"] for each in begun] == [0, 0]
    # From four ranks of other degrees, from two back to four, and each of them to one process.
    four = [
        case("again", layout={**split, "dp": 2, "ep": 4}, stop_at=4),
        case("long", model="", layout=context, stop_at=3),
    ]
    assert [each["began"] for each in run_cases(fit, four, world=4, timeout=400)] == [2, 0]
    one = run_cases(
        fit, [case("down"), case("again"), case("long", model=""), case("whole"), case("dense", model="")], 1
    )
    down, again, long, whole, dense = one
    assert [each["began"] for each in one] == [3, 4, 3, 0, 0]
    assert losses(down) == pytest.approx(losses(whole), rel=1e-4)
    assert losses(again) == pytest.approx(losses(whole), rel=1e-4)
    assert losses(long) == pytest.approx(losses(dense), rel=2e-5)
