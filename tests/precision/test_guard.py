"""The guard's decisions: exact events for exact findings, with no engine and no clock."""

import json
import math

import pytest

from deepwell.errors import ConfigError, NumericsError
from deepwell.precision.guard import (
    BITS,
    WHAT,
    Finding,
    Guard,
    GuardedGemm,
    GuardEvent,
    GuardSettings,
    GuardStop,
    SpikeDetector,
    changes,
    next_rung,
    noisiest,
    rung_back,
)

A, B = ("layers.0.up", "fwd"), ("layers.1.down", "wgrad")


class Run:
    """A guard with the formats of an engine: what it decides is carried out."""

    def __init__(self, policy="nvfp4", **settings):
        self.guard = Guard(GuardSettings(**settings))
        keys = [(f"layers.{i}.{name}", gemm) for i in (0, 1) for name in ("up", "down") for gemm in BITS_OF_GEMMS]
        self.gemms = {key: GuardedGemm(now=policy, policy=policy, share=1.0) for key in keys}

    def step(self, step, *findings, loss=1.0):
        events = self.guard.decide(step, findings, self.gemms, loss)
        for asked in changes(events, self.gemms).values():
            for key, name in asked.items():
                policy = self.gemms[key].policy
                self.gemms[key] = GuardedGemm(now=name or policy, policy=policy, share=1.0)
        return [(e.what, e.path, e.gemm, e.before, e.after) for e in events]

    def others(self, *keys):
        return {gemm.now for key, gemm in self.gemms.items() if key not in keys}


BITS_OF_GEMMS = ("fwd", "dgrad", "wgrad")


def sqnr(step, key=A, **more):
    return Finding(step=step, what="sqnr", path=key[0], gemm=key[1], reason="3.0 dB in nvfp4, below 8 dB", **more)


def bad(step, rank=0):
    return Finding(step=step, what="nonfinite", reason="loss is not finite", rank=rank)


# ---- the ladder ----


def test_the_ladder_ends_in_bf16_and_its_middle_is_the_devices():
    assert [next_rung(name) for name in ("nvfp4", "mxfp4", "mxfp6", "mxfp8", "fp8", "bf16", "fp32")] == [
        *("mxfp8", "mxfp8", "mxfp8", "bf16", "bf16"),
        *(None, None),
    ]
    assert next_rung("nvfp4", "fp8") == "fp8"
    assert rung_back("bf16", "nvfp4") == "mxfp8" and rung_back("bf16", "nvfp4", "fp8") == "fp8"
    assert rung_back("mxfp8", "nvfp4") == "nvfp4" and rung_back("bf16", "mxfp8") == "mxfp8"
    assert rung_back("nvfp4", "nvfp4") is None and rung_back("mxfp8", "bf16") is None
    assert set(BITS) == {"fp32", "bf16", "fp16", "fp8", "mxfp8", "mxfp6", "mxfp4", "nvfp4"}


def test_a_finding_must_be_confirmed_within_the_window_and_moves_one_gemm_one_rung():
    run = Run(confirm=2, window=10, cool_down=5)
    assert run.step(1, sqnr(1)) == [("sqnr", *A, "", "")]
    # Too late: the first one is out of the window.
    assert run.step(11, sqnr(11)) == [("sqnr", *A, "", "")]
    assert run.guard.suspects(12) == {A}
    assert run.step(12, sqnr(12)) == [("sqnr", *A, "", ""), ("fallback", *A, "nvfp4", "mxfp8")]
    assert run.others(A) == {"nvfp4"} and run.guard.suspects(13) == set()
    # Cooling down: told, not acted on, and not counted.
    assert [run.step(s, sqnr(s)) for s in range(13, 17)] == [[("sqnr", *A, "", "")]] * 4
    assert run.step(17, sqnr(17)) == [("sqnr", *A, "", "")]
    assert run.step(18, sqnr(18))[1:] == [("fallback", *A, "mxfp8", "bf16")]
    assert run.gemms[A].now == "bf16" and run.others(A) == {"nvfp4"}
    # bf16 has no rung below.
    assert run.step(40, sqnr(40)) == [("sqnr", *A, "", "")] == run.step(41, sqnr(41))


def test_nan_out_of_finite_numbers_needs_no_confirmation_and_two_findings_are_one_fallback():
    run = Run(confirm=3)
    events = run.step(5, sqnr(5, is_severe=True), Finding(step=5, what="underflow", path=A[0], gemm=A[1], reason="97%"))
    assert events == [("sqnr", *A, "", ""), ("underflow", *A, "", ""), ("fallback", *A, "nvfp4", "mxfp8")]


def test_what_is_no_matter_of_formats_changes_none():
    run = Run(confirm=1)
    own = Finding(step=1, what="nonfinite", path=A[0], gemm=A[1], reason="own dtype", is_format=False, is_severe=True)
    assert run.step(1, own) == [("nonfinite", *A, "", "")]
    unknown = Finding(step=2, what="sqnr", path="lm_head", gemm="fwd", reason="x")
    assert run.step(2, unknown) == [("sqnr", "lm_head", "fwd", "", "")]
    assert run.others() == {"nvfp4"}


def test_the_order_of_findings_does_not_matter():
    found = [sqnr(1, key) for key in (B, A, ("layers.1.down", "fwd"))]
    first, second = Run(confirm=1), Run(confirm=1)
    assert first.step(1, *found) == second.step(1, *reversed(found))
    assert json.dumps(first.guard.state_dict()) == json.dumps(second.guard.state_dict())


# ---- the way back ----


def test_the_way_back_is_one_rung_after_clean_steps_and_at_most_so_often():
    off = Run(confirm=1)
    off.step(1, sqnr(1))
    assert all(off.step(s) == [] for s in range(2, 500, 50)) and off.gemms[A].now == "mxfp8"
    run = Run(confirm=1, cool_down=0, recover_after=10, max_recoveries=2)
    run.step(1, sqnr(1))
    run.step(2, sqnr(2))
    assert run.gemms[A].now == "bf16"
    assert run.step(11) == []
    assert run.step(12) == [("recover", *A, "bf16", "mxfp8")]
    # A bad step anywhere is no clean step.
    assert run.step(20, bad(20))[0][0] == "skip"
    assert run.step(29) == []
    assert run.step(30) == [("recover", *A, "mxfp8", "nvfp4")] and run.others() == {"nvfp4"}
    # It falls again, and has used up its ways back.
    run.step(31, sqnr(31))
    assert [run.step(s) for s in range(32, 100)] == [[]] * 68 and run.gemms[A].now == "mxfp8"


# ---- bad steps ----


def test_bad_steps_are_counted_and_too_many_in_a_row_end_the_run():
    run = Run(max_skipped=3)
    assert run.step(1, bad(1, rank=2)) == [("skip", "", "", "", "")]
    assert run.step(2, bad(2)) == [("skip", "", "", "", "")]
    assert run.step(3) == [] and run.guard.skipped_in_row == 0 and run.guard.num_skipped == 2
    for step in (4, 5):
        run.step(step, bad(step))
        assert not run.guard.stop
    assert [e[0] for e in run.step(6, bad(6))] == ["skip", "nonfinite"]
    assert run.guard.stop == "3 steps in a row were not finite, the last one at step 6: loss is not finite"
    assert issubclass(GuardStop, NumericsError)


def test_a_spike_is_reported_once_and_a_new_level_is_the_new_normal():
    settings = GuardSettings(spike_warmup=8, spike_window=16, spike_z=10.0, spike_calm_z=4.0)
    detector = SpikeDetector(settings)
    noisy = [2.0 + 0.01 * math.sin(7 * i) for i in range(20)]
    assert not any(detector.add(loss)[0] for loss in noisy)
    begins, z, middle = detector.add(3.0)
    assert begins and z > 10 and abs(middle - 2.0) < 0.02
    assert [detector.add(loss)[0] for loss in (3.0, 2.5, 2.09)] == [False] * 3 and detector.in_spike == 4
    assert detector.add(2.05) == (False, pytest.approx(2.5, abs=0.6), pytest.approx(2.0, abs=0.02))
    assert detector.in_spike == 0 and 3.0 not in detector.losses
    # A drop is none, and what stays up is learned.
    assert not detector.add(0.5)[0]
    assert detector.add(9.0)[0]
    assert not any(detector.add(9.0)[0] for _ in range(30))
    assert detector.in_spike == 0 and set(detector.losses) == {9.0}


def test_no_spike_before_the_warmup_nor_in_a_falling_or_flat_curve():
    detector = SpikeDetector(GuardSettings())
    assert not any(detector.add(loss)[0] for loss in [1.0] * 10 + [50.0] + [1.0] * 10)
    falling = SpikeDetector(GuardSettings())
    assert not any(falling.add(10.0 * 0.99**i)[0] for i in range(300))
    flat = SpikeDetector(GuardSettings())
    assert not any(flat.add(1.0 + 0.02 * (i % 2))[0] for i in range(300))


# ---- budget and repair ----


def test_the_budget_asks_once_and_stops_on_request():
    run = Run(confirm=1, budget=0.1)
    assert [e[0] for e in run.step(1, sqnr(1))] == ["sqnr", "fallback"]  # 1 of 12
    assert [e[0] for e in run.step(2, sqnr(2, B))] == ["sqnr", "fallback", "budget"]
    assert not run.guard.stop
    assert [e[0] for e in run.step(3, sqnr(3, ("layers.0.up", "wgrad")))] == ["sqnr", "fallback"]
    strict = Run(confirm=1, budget=0.0, stop_at_budget=True)
    strict.step(1, sqnr(1))
    assert strict.guard.stop.startswith("8% of the low-precision flops have fallen back, more than the budget of 0%")


def test_a_repair_lowers_the_learning_rate_for_some_steps():
    run = Run(repair_steps=3, repair_lr=0.5, confirm=1)
    assert [e[0] for e in run.step(7, sqnr(7))] == ["sqnr", "fallback", "repair"]
    assert [run.guard.lr_scale(step) for step in (8, 9, 10, 11)] == [0.5, 0.5, 0.5, 1.0]
    assert [e[0] for e in run.step(8, bad(8))] == ["skip"]  # it is under repair already


# ---- gradient against noise ----


def test_the_loudest_gemms_go_first_until_the_gradient_is_heard():
    noise = {("a", "wgrad"): 4.0, ("b", "wgrad"): 1.0, ("c", "wgrad"): 0.25}
    root3 = math.sqrt(3)
    assert noisiest(noise, 4.0, root3) == []  # 16 >= 3 * 5.25
    assert noisiest(noise, 3.0, root3) == [("a", "wgrad")]  # 9 < 15.75, 9 >= 3.75
    assert noisiest(noise, 1.0, root3) == [("a", "wgrad"), ("b", "wgrad")]
    assert noisiest(noise, 0.0, root3) == [("a", "wgrad"), ("b", "wgrad"), ("c", "wgrad")]
    assert noisiest({("a", "wgrad"): 0.0}, 0.0, root3) == [] and noisiest({}, 1.0, root3) == []


# ---- values ----


def test_a_resumed_guard_decides_as_the_other_would_have():
    settings = {"confirm": 2, "window": 20, "recover_after": 30, "spike_warmup": 4, "repair_steps": 2}
    story = {3: [sqnr(3)], 5: [sqnr(5)], 8: [bad(8)], 9: [sqnr(9, B)], 14: [sqnr(14, B)]}
    losses = {12: 50.0}

    def play(cut):
        run, told = Run(**settings), []
        for step in range(1, 60):
            if step == cut:
                state, old = json.loads(json.dumps(run.guard.state_dict())), run
                run = Run(**settings)
                run.guard.load_state_dict(state)
                run.gemms = old.gemms
            told.append((step, run.step(step, *story.get(step, ()), loss=losses.get(step, 1.0))))
        return told, run.guard.state_dict()

    whole = play(None)
    assert {"fallback", "recover", "skip", "spike", "repair"} <= {e[0] for _, events in whole[0] for e in events}
    assert all(play(cut) == whole for cut in (2, 4, 6, 9, 10, 13, 20, 40))


def test_foreign_states_and_wrong_settings_are_named():
    guard = Guard(GuardSettings())
    for state in ({}, {"schema": 2}, [], {"schema": 1}, {**guard.state_dict(), "gemms": [["a", "fwd", {"x": 1}]]}):
        with pytest.raises(ConfigError, match="guard's state"):
            guard.load_state_dict(state)
    wrong = {"max_skipped": 0, "confirm": 1.5, "enabled": 1, "budget": -1, "spike_calm_z": 20.0, "sample_cost": 0.0}
    for name, value in {**wrong, "window": True, "spike_warmup": 100}.items():
        with pytest.raises(ConfigError, match=f"guard.{name} is"):
            GuardSettings(**{name: value})
    with pytest.raises(ConfigError, match="guard has no setting 'windw'"):
        GuardSettings.from_dict({"windw": 3})
    assert GuardSettings.from_dict(json.loads(json.dumps(GuardSettings(window=9).to_dict()))) == GuardSettings(window=9)
    assert not GuardSettings.off().enabled and GuardSettings().enabled


def test_an_event_is_a_line_of_the_log():
    event = GuardEvent(
        step=9, what="fallback", path=A[0], gemm=A[1], before="nvfp4", after="mxfp8", reason="r", rank=None
    )
    line = {"step": 9, "what": "fallback", "path": A[0], "gemm": A[1], "from": "nvfp4", "to": "mxfp8"}
    assert event.to_dict() == {**line, "reason": "r", "rank": None}
    assert str(event) == "fallback layers.0.up fwd nvfp4 -> mxfp8: r" and event.what in WHAT
