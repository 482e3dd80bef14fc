"""Learning rates over a run, and settings that say no to nonsense."""

import pytest

from deepwell.errors import ConfigError
from deepwell.train.schedules import Schedule
from deepwell.train.settings import Every, TrainSettings


def test_warm_up_rises_linearly_and_each_kind_ends_at_its_floor() -> None:
    for kind in ("linear", "cosine", "wsd"):
        schedule = Schedule(kind=kind, steps=100, warmup=10, floor=0.1)
        assert [schedule(i) for i in range(10)] == [pytest.approx((i + 1) / 10) for i in range(10)]
        assert schedule(10) == 1.0
        assert schedule(99) == pytest.approx(0.1)
        falling = [schedule(i) for i in range(10, 100)]
        assert falling == sorted(falling, reverse=True)
    assert Schedule(kind="constant", steps=100, warmup=10)(99) == 1.0


def test_cosine_is_half_way_in_the_middle_and_wsd_falls_at_the_end_alone() -> None:
    assert Schedule(kind="cosine", steps=101, floor=0.0)(50) == pytest.approx(0.5)
    wsd = Schedule(kind="wsd", steps=100, floor=0.0, decay=20)
    assert wsd(79) == 1.0 and wsd(80) == pytest.approx(0.95) and wsd(99) == 0.0
    assert Schedule(kind="wsd", steps=100, decay=0)(99) == 1.0


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"schedule": "cosin"}, "schedule"),
        ({"warmup": 2000}, "warmup"),
        ({"lr": 0}, "lr"),
        ({"lr": "fast"}, "lr"),
        ({"steps": 0}, "steps"),
        ({"steps": 1.5}, "steps"),
        ({"steps": None}, "steps"),
        ({"save_every": "soon"}, "save_every"),
        ({"lr_flor": 0.1}, "did you mean lr_floor"),
        ({"async_save": "perhaps"}, "async_save"),
        ({"schedule": "wsd", "decay": 1001}, "decay"),
        ({"clip_norm": -1.0}, "clip_norm"),
    ],
)
def test_a_wrong_setting_is_an_error_that_names_it(changes: dict, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        TrainSettings().changed(**changes)


def test_settings_come_from_text_and_go_through_json() -> None:
    found = TrainSettings().changed(steps="1e3", lr="3e-4", clip_norm="0", async_save="off", warmup="none")
    assert (found.steps, found.lr, found.clip_norm, found.async_save, found.warmup) == (1000, 3e-4, None, False, None)
    assert TrainSettings.from_dict(found.to_dict()) == found


def test_every_counts_steps_or_time() -> None:
    assert [step for step in range(1, 10) if Every.read("x", 3).is_due(step, 1e9)] == [3, 6, 9]
    assert Every.read("x", "2m").is_due(1, 120.0) and not Every.read("x", "2m").is_due(1, 119.0)
    assert not Every.read("x", 0).is_due(5, 1e9)
