"""The run's page: exact data from hand-made records, and in a real headless Chromium every panel is drawn."""

import functools
import html
import json
import math
import random
import re
import shutil
import subprocess
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from deepwell.cli.report import report_command
from deepwell.errors import ConfigError
from deepwell.report.run.data import read_events, read_run, read_runs, run_of
from deepwell.report.run.page import run_page
from deepwell.report.run.panels import page_data
from deepwell.report.run.series import picked, rounded, smoothed
from deepwell.report.run.summary import duration, summary, time_shares

PANELS = ("loss", "optimizer", "throughput", "memory", "predicted", "guard", "precision", "experts", "goodput",
          "checkpoints", "settings")  # fmt: skip
CHROMIUM = next((p for name in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(name))), None)
browser = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: `apt install chromium` brings one"),
]
Event = dict[str, Any]
T0 = 1_760_000_000.0


# ---- records ----


class FakeRun:
    """The events of a run that never was: a loss curve, guard events, experts, saves, kills that lose steps."""

    def __init__(
        self, steps: int = 400, *, kills: Iterable[int] = (), experts: int = 8, layers: int = 4, **header: Any
    ):
        self.steps, self.kills, self.layers, self.experts = steps, list(kills), layers, experts
        self.random = random.Random(steps)
        self.header = {
            "schema": 1, "version": "0.1.0", "world": 8, "device": "NVIDIA H200", "model": "llama-moe-8x1b",
            "layout": "DP4 EP2 ZeRO-3", "plan": {"gpus": 8, "step_s": 0.92, "tier": "measured", "peak_gib": 101.5},
            "precision": "mxfp8", "seq_len": 4096, "global_batch": 64, "steps": steps, "host": "node-1",
            "settings": {"optimizer": "adamw_dw", "lr": 3e-4, "clip": 1.0, "schedule": {"name": "cosine"}},
        } | header  # fmt: skip
        self.t = T0
        names = ("self_attn.q_proj", "self_attn.o_proj", "mlp.experts.up", "mlp.experts.down")
        self.formats = {
            f"model.layers.{i}.{name}": "mxfp8|mxfp8|mxfp8" for i in range(layers) for name in names
        } | {"lm_head": "bf16|bf16|bf16"}  # fmt: skip

    def event(self, kind: str, **fields: Any) -> Event:
        return {"t": round(self.t, 3), "kind": kind, **fields}

    def __iter__(self) -> Iterator[Event]:
        generation, done, saved = 0, 0, 0
        every = max(1, self.steps // 8)
        while True:
            yield self.event("run", **self.header, generation=generation, start_step=done)
            if generation:
                yield self.event("restart", generation=generation, step=done, reason="rank 3 died (signal 9)",
                                 lost_steps=self.kills[generation - 1] - done, recovery_s=41.5, world=8)  # fmt: skip
            yield self.event("formats", step=done, formats=self.formats)
            self.t += 38
            for step in range(done + 1, self.steps + 1):
                yield from self.one_step(step, is_first=step == done + 1)
                if step % every == 0:
                    yield self.event("eval", step=step, loss=self.level(step) + 0.08, tokens=262144, seconds=2.1)
                    self.t += 2.1
                    yield self.event("save", step=step, path=f"checkpoints/step-{step:08d}", stall_s=0.31, seconds=9.4,
                                     bytes=96 * 2**30, committed=True)  # fmt: skip
                    saved = step
                if generation < len(self.kills) and step == self.kills[generation]:
                    break
            else:
                break
            generation, done, self.t = generation + 1, saved, self.t + 25
        yield self.event("end", step=self.steps, reason="done", exit=0)

    def level(self, step: int) -> float:
        return 2.1 + 8.6 * math.exp(-6 * step / self.steps) + 0.9 * math.exp(-1.2 * step / self.steps)

    def one_step(self, step: int, is_first: bool) -> Iterator[Event]:
        draw, share = self.random.gauss, step / self.steps
        spike = 2.5 if 0 <= step - self.steps // 3 < max(2, self.steps // 100) else 0.0
        is_bad = step == self.steps // 2
        seconds = abs(0.95 + draw(0, 0.015)) + (22 if is_first else 0)
        self.t += seconds
        lr = 3e-4 * min(1, 20 * share) * (0.55 + 0.45 * math.cos(math.pi * share))
        yield self.event(
            "step", step=step, loss=math.nan if is_bad else self.level(step) + draw(0, 0.06) + spike,
            grad_norm=math.inf if is_bad else abs(0.6 + 2 * math.exp(-9 * share) + draw(0, 0.05)) + spike, lr=lr,
            seconds=seconds, tokens=262144, tokens_per_s_per_gpu=262144 / seconds / 8, tflops=410 / seconds,
            mfu=0.415 / seconds, mfu_weighted=0.29 / seconds, memory_gib=103.2 + min(5.0, step / 40),
            memory_limit_gib=136.0, predicted_s=0.92, ratio=0.92 / seconds, skipped=is_bad, goodput=0.93 - 0.2 / step,
        )  # fmt: skip
        if spike:
            yield self.event("guard", step=step, what="spike", path="", gemm="", reason="loss 5.1 against 2.6",
                             rank=None, **{"from": "", "to": ""})  # fmt: skip
        if is_bad:
            yield from self.fall_back(step)
        if self.experts and step % max(1, self.steps // 30) == 0:
            loads = {
                f"model.layers.{i}.mlp": [
                    int(32768 * abs(1 + draw(0, 0.12) + (0.8 * (1 - share) if e == i else 0)))
                    for e in range(self.experts)
                ]
                for i in range(self.layers)
            }
            dropped = {path: int(900 * (1 - share)) for path in loads}
            yield self.event("experts", step=step, layers=loads, dropped=dropped)

    def fall_back(self, step: int) -> Iterator[Event]:
        path = "model.layers.2.mlp.experts.down"
        self.formats = self.formats | {path: "mxfp8|bf16|bf16"}
        yield self.event("guard", step=step, what="nonfinite", path=path, gemm="wgrad", reason="inf in the gradient",
                         rank=3, **{"from": "", "to": ""})  # fmt: skip
        yield self.event("guard", step=step, what="fallback", path=path, gemm="wgrad", rank=None,
                         reason="2 non-finite gradients in 50 steps", **{"from": "mxfp8", "to": "bf16"})  # fmt: skip
        yield self.event("formats", step=step, formats=self.formats)


def written(folder: Path, events: Iterable[Event], tail: str = "") -> Path:
    """A run's folder with its record, as Python writes it: NaN and Infinity stay words."""
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(event) + "\n" for event in events) + tail
    (folder / "events.jsonl").write_text(text, encoding="utf-8")
    return folder


def step(number: int, t: float, loss: float = 1.0, **fields: Any) -> Event:
    return {"t": t, "kind": "step", "step": number, "loss": loss, "seconds": 1.0, "tokens": 100, **fields}


def start(t: float, generation: int = 0, start_step: int = 0, **fields: Any) -> Event:
    return {
        "t": t,
        "kind": "run",
        "generation": generation,
        "start_step": start_step,
        "world": 2,
        "steps": 10,
        **fields,
    }


# ---- reading ----


def test_a_record_is_read_while_it_is_written_and_after_it_was_torn(tmp_path: Path) -> None:
    # A kill tears a line; the run that starts again writes on it. The last line is still being written.
    torn = '{"t": 3.0, "kind": "step", "st' + json.dumps(start(9.0, 1, 1)) + "\n"
    broken = '{"t": 3.5, "kind": \nnull\n[]\n{"t": 4}\n\xff\x00\n'
    tail = torn + broken + json.dumps(step(2, 10.0, math.nan)) + '\n\n{"t": 11.0, "kind": "step", "step": 3, "lo'
    folder = written(tmp_path / "run", [start(1.0), step(1, 2.0)], tail)
    events = read_events(folder)
    assert [event["kind"] for event in events] == ["run", "step", "run", *["damaged"] * 5, "step"]
    assert [event["line"] for event in events if event["kind"] == "damaged"] == [4, 5, 6, 7, 8]
    assert [event["t"] for event in events] == [1.0, 2.0, *[9.0] * 6, 10.0]
    run = read_run(folder)
    assert run.name == "run"
    assert run.damaged == (4, 5, 6, 7, 8)
    assert run.steps["step"].tolist() == [1, 2]
    # A last line without its end is whole if it can be read.
    written(folder, [start(1.0), step(1, 2.0)], json.dumps(step(2, 3.0)))
    assert read_run(folder).steps["step"].tolist() == [1, 2]


def test_times_that_are_none_are_those_of_the_line_before(tmp_path: Path) -> None:
    events = [{"t": T0, "kind": "run"}, {"t": -1e308, "kind": "note"}, {"t": 1e308, "kind": "note"}]
    run = read_run(written(tmp_path, events))
    assert (run.began, run.last) == (T0, T0)
    assert "No step was logged yet." in run_page([run])


def test_a_folder_without_a_record_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for given, named in ((tmp_path / "empty", "empty/events.jsonl"), (tmp_path / "none", "none/events.jsonl")):
        with pytest.raises(ConfigError, match=re.escape(f"RUN_DIR: there is no {tmp_path}/{named}")):
            read_run(given)
    written(tmp_path / "empty", [], '{"t": 1.0, "ki')
    with pytest.raises(ConfigError, match=r"empty/events\.jsonl holds no event yet"):
        read_run(tmp_path / "empty")


def test_the_later_attempt_counts_and_what_it_replaced_is_lost() -> None:
    run = run_of([
        start(0.0), {"t": 0.5, "kind": "formats", "step": 0, "formats": {"a": "mxfp8"}},
        step(1, 1.0, 5.0), step(2, 2.0, 4.0), {"t": 2.5, "kind": "save", "step": 2, "stall_s": 0.5},
        step(3, 3.0, 3.5), step(4, 4.0, 3.3), {"t": 4.1, "kind": "eval", "step": 4, "loss": 9.0, "seconds": 0.25},
        {"t": 4.2, "kind": "guard", "step": 4, "what": "spike"},
        {"t": 4.3, "kind": "formats", "step": 4, "formats": {"a": "bf16"}},
        start(20.0, 1, 2, world=4), {"t": 20.5, "kind": "restart", "generation": 1, "step": 2, "lost_steps": 2},
        {"t": 20.6, "kind": "formats", "step": 3, "formats": {"a": "fp8"}},
        step(3, 23.0, 3.4), step(4, 24.0, 3.2), step(5, 25.0, 3.1),
        start(40.0, 2, 4),
    ])  # fmt: skip
    assert run.steps["step"].tolist() == [1, 2, 3, 4]  # step 5 is lost too: the third attempt starts after 4
    assert run.steps["loss"].tolist() == [5.0, 4.0, 3.4, 3.2]
    assert run.lost["step"].tolist() == [3, 4, 5]
    assert run.lost["loss"].tolist() == [3.5, 3.3, 3.1]
    assert run.lost["attempt"].tolist() == [0, 0, 1]
    assert run.kept("eval") == ()
    assert run.events["guard"][0]["lost"] is True
    assert [event["formats"]["a"] for event in run.kept("formats")] == ["mxfp8", "fp8"]
    assert [(a.began, a.ended, a.first_step, a.last_step, a.first_step_at) for a in run.attempts] == [
        (0.0, 4.3, 1, 4, 1.0), (20.0, 25.0, 3, 5, 23.0), (40.0, 40.0, None, None, None),
    ]  # fmt: skip
    found = summary(run, now=41.0)
    assert (found["state"], found["step"], found["restarts"], found["lost_steps"]) == ("starting", 4, 2, 3)
    # Going back inside one attempt, without a new start, loses steps as well.
    back = run_of([start(0.0), step(1, 1.0), step(2, 2.0), step(3, 3.0), step(2, 4.0, 8.0), step(3, 5.0)])
    assert back.steps["t"].tolist() == [1.0, 4.0, 5.0]
    assert back.lost["t"].tolist() == [2.0, 3.0]
    assert len(back.attempts) == 1


def test_where_the_time_went_adds_up() -> None:
    run = run_of([
        start(100.0), step(1, 110.0, seconds=6.0), step(2, 111.0), step(3, 112.0, math.nan, skipped=True),
        {"t": 112.5, "kind": "save", "step": 3, "stall_s": 0.5, "committed": True}, step(4, 113.5),
        {"t": 115.5, "kind": "eval", "step": 4, "loss": 2.0, "seconds": 2.0}, step(5, 116.5),
        start(130.0, 1, 3), {"t": 130.5, "kind": "restart", "generation": 1, "step": 3},
        step(4, 134.0, seconds=2.5), step(5, 135.0), step(6, 138.0), {"t": 138.0, "kind": "end", "reason": "done"},
    ])  # fmt: skip
    assert time_shares(run) == {
        "training": 5.0,  # steps 1, 2, 4, 5, 6; the two first ones count as ordinary
        "starting": 9.0 + 3.0, "evaluation": 2.0, "saving": 0.5, "skipped steps": 1.0, "lost steps": 2.0,
        "down": 13.5, "other": 38.0 - 36.0,
    }  # fmt: skip
    assert sum(time_shares(run).values()) == run.last - run.began == 38.0
    # A stall inside a step's seconds is not counted twice.
    inside = run_of([start(0.0), step(1, 1.0), step(2, 2.0), {"t": 2.0, "kind": "save", "step": 2, "stall_s": 0.75}])
    assert time_shares(inside)["training"] == 1.25
    assert sum(time_shares(inside).values()) == 2.0


def test_a_run_that_logs_every_tenth_step_counts_its_tokens_and_seconds() -> None:
    run = run_of([start(0.0), *(step(n, float(n)) for n in (10, 20, 30)), start(50.0, 1, 20), step(30, 60.0)])
    assert summary(run, 61.0)["tokens"] == 3000
    assert time_shares(run)["lost steps"] == 10.0
    assert summary(run, 61.0)["lost_steps"] == 10


@pytest.mark.parametrize(
    ("events", "now", "state"),
    [
        ([start(0.0)], 60.0, "starting"),
        ([start(0.0)], 2000.0, "stale"),
        ([start(0.0), step(1, 1.0)], 100.0, "running"),
        ([start(0.0), step(1, 1.0)], 400.0, "stale"),
        ([start(0.0), step(1, 1.0), step(2, 101.0, seconds=100.0)], 1100.0, "running"),
        ([start(0.0), step(1, 1.0), start(9.0, 1, 1)], 1000.0, "starting"),
        ([start(0.0), {"t": 1.0, "kind": "end", "reason": "done"}], 9e9, "finished"),
        ([start(0.0), {"t": 1.0, "kind": "end", "reason": "gave up", "exit": 3}], 2.0, "gave up"),
        ([start(0.0), {"t": 1.0, "kind": "end", "reason": "signal"}], 2.0, "stopped"),
        ([start(0.0), {"t": 1.0, "kind": "end", "reason": "error"}], 2.0, "failed"),
        ([start(0.0), {"t": 1.0, "kind": "end", "reason": "error"}, start(5.0, 1), step(1, 6.0)], 7.0, "running"),
        ([step(1, 1.0)], 2.0, "running"),
    ],
)
def test_the_state_of_a_run(events: list[Event], now: float, state: str) -> None:
    assert summary(run_of(events), now)["state"] == state


def test_an_end_and_a_failed_save_say_why() -> None:
    end = {"t": 3.0, "kind": "end", "reason": "error", "exit": 75, "error": "no step for 600 s"}
    failed = {
        "t": 2.0,
        "kind": "save",
        "step": 1,
        "path": "p",
        "committed": False,
        "error": "disk full",
        "stall_s": 0.1,
    }
    run = run_of([start(0.0), step(1, 1.0), failed, end])
    assert summary(run, 5.0)["why"] == "ended: error, exit status 75, 2 s ago: no step for 600 s"
    assert (summary(run, 5.0)["saves"], summary(run, 5.0)["last_save_step"]) == (1, None)
    assert page_data([run], 5.0)["runs"][0]["checkpoints"]["rows"][0]["error"] == "disk full"


def test_figures_are_medians_of_the_last_steps_and_never_words_json_lacks() -> None:
    rates = [step(n, float(n), 2.0 + n, tokens_per_s_per_gpu=1.0 * n, mfu=None, memory_gib=n) for n in range(1, 301)]
    odd = step(301, 301.0, math.inf, grad_norm="x", lr=None, tokens_per_s_per_gpu=math.nan, memory_gib=10**400)
    found = summary(run_of([start(0.0, steps=401, model="m"), *rates, odd]), 302.0)
    assert found["tokens_per_s_per_gpu"] == 250.5  # of steps 202 to 300, and 50 of the last
    assert (found["loss"], found["nonfinite_losses"], found["mfu"], found["grad_norm"]) == (302.0, 1, None, None)
    assert found["peak_gib"] == 300
    assert found["eta_s"] == 100.0
    assert found["predicted_over_real"] is None
    json.dumps(found, allow_nan=False)
    # Without a rate in the record it follows from tokens, seconds and GPUs.
    assert summary(run_of([start(0.0), step(1, 1.0), step(2, 2.0)]), 3.0)["tokens_per_s_per_gpu"] == 50.0
    assert [duration(s) for s in (0.0, 1.234, 59.4, 90, 3600, 100000)] == [
        "0 s", "1.23 s", "59 s", "1 min 30 s", "1 h", "1 d 4 h",
    ]  # fmt: skip


# ---- what is drawn ----


def test_a_long_series_keeps_its_extremes_ends_and_gaps() -> None:
    values = np.sin(np.arange(100_000) / 500.0)
    values[[31_234, 77_777, 5]] = (9.0, -9.0, math.nan)
    at = picked(values, 2000)
    assert len(at) <= 2500
    assert {0, 5, 31_234, 77_777, 99_999} <= set(at.tolist())
    assert (np.diff(at) > 0).all()
    assert picked(values[:1500], 2000).tolist() == list(range(1500))
    assert picked(np.full(9000, math.nan), 400).size <= 400
    assert smoothed(np.array([1.0, math.nan, 3.0, 5.0, math.inf]), 3).tolist() == [1.0, 2.0, 4.0, 4.0, 5.0]
    assert np.isnan(smoothed(np.array([math.nan, math.nan]), 20)).all()
    assert [rounded(x) for x in (1.0, 0.12345678, math.nan, -math.inf, 1e300)] == [1, 0.123457, None, None, 1e300]


def test_layers_with_one_history_share_a_row() -> None:
    names = [f"model.layers.{i}.mlp.up" for i in range(4)]
    changed = {"t": 5.0, "kind": "formats", "step": 6, "formats": {names[2]: "mxfp8|bf16|bf16"}}  # names what changed
    run = run_of([
        start(0.0),
        {"t": 0.0, "kind": "formats", "step": 0, "formats": {**dict.fromkeys(names, "mxfp8"), "head": "bf16"}},
        *(step(n, float(n)) for n in range(1, 11)), changed,
    ])  # fmt: skip
    found = page_data([run], 12.0)["runs"][0]["precision"]
    assert [(row["name"], row["layers"], row["spans"]) for row in found["rows"]] == [
        ("model.layers.[0-1,3].mlp.up", 3, [[0, 11, "mxfp8", "mxfp8", "mxfp8"]]),
        ("model.layers.2.mlp.up", 1, [[0, 6, "mxfp8", "mxfp8", "mxfp8"], [6, 11, "mxfp8", "bf16", "bf16"]]),
        ("head", 1, [[0, 11, "bf16", "bf16", "bf16"]]),
    ]
    assert (found["layers"], found["changed"]) == (5, 1)
    assert found["now"] == {"mxfp8": 0.6667, "bf16": 0.3333}


def test_loads_of_experts_are_relative_and_averaged_where_there_are_many() -> None:
    def experts(number: int, loads: Any, dropped: Any = None) -> Event:
        return {"t": float(number), "kind": "experts", "step": number, "layers": {"a": loads}, "dropped": dropped}

    run = run_of([start(0.0), experts(1, [1, 3], {"a": 2}), experts(2, [3, 1]), experts(3, "no"), experts(4, [0, 0])])
    found = page_data([run], 5.0)["runs"][0]["experts"]
    assert [(f["from"], f["to"], f["load"]) for f in found["frames"]] == [
        (1, 1, [[0.5, 1.5]]), (2, 2, [[1.5, 0.5]]), (4, 4, [[0, 0]]),
    ]  # fmt: skip
    assert found["worst"] == [[1, 1.5], [2, 1.5], [4, None]]
    assert found["dropped"][0] == [1, 0.5]
    many = run_of([start(0.0), *(experts(n, [n % 2, 1 - n % 2]) for n in range(1, 1001))])
    frames = page_data([many], 5.0)["runs"][0]["experts"]["frames"]
    assert len(frames) <= 60
    assert all(abs(frame["load"][0][0] - 1) < 0.07 for frame in frames)
    assert (frames[0]["from"], frames[-1]["to"]) == (1, 1000)


@pytest.mark.parametrize(
    "events",
    [
        [start(0.0)],
        [step(1, 1.0)],
        [step(1, 1.0, math.nan)],
        [{"t": 0.0, "kind": "note", "text": "hello"}],
        [{"t": 0.0, "kind": "end", "reason": None}],
        [{"t": 0.0, "kind": "unknown"}],
        [{"t": 0.0, "kind": kind, "step": "x"} for kind in ("eval", "save", "guard", "formats", "experts", "restart")],
        [
            {"t": 0.0, "kind": kind}
            for kind in ("run", "step", "eval", "save", "guard", "formats", "experts", "restart")
        ],
        [{"kind": "step", "step": 1, "t": None}],
        [start(0.0, settings=["a"], plan=7, world="many", steps=None), step(1, 1.0, "bad", seconds=0)],
        [step(10**15, 1.0, 1e308, tokens=1e300)],
    ],
)
def test_a_page_of_little_or_odd_events(tmp_path: Path, events: list[Event]) -> None:
    (run,) = read_runs([written(tmp_path / "run", events)])
    data = page_data([run], 5.0)
    json.dumps(data, allow_nan=False)
    assert len(run_page([run], now=5.0)) > 1e6
    for panel in ("loss", "guard", "precision", "experts", "checkpoints", "goodput", "settings"):
        assert data["runs"][0][panel]["why"] is None or data["runs"][0][panel]["why"].endswith((".", "settings."))


def test_a_hundred_thousand_steps_make_a_small_page_in_seconds() -> None:
    events = FakeRun(400, kills=[250])
    few = [event for event in events if event["kind"] == "step"]
    many = [{**few[n % len(few)], "t": T0 + n, "step": n + 1} for n in range(100_000)]
    many[61_234]["loss"] = 77.7
    begin = time.process_time()
    run = run_of([start(T0), *many])
    text = run_page([run, run], now=T0 + 100_001)
    assert time.process_time() - begin < 10
    assert len(text) < 5e6
    series = page_data([run], T0)["runs"][0]["series"]["loss"]
    assert max(y for y in series["y"] if y is not None) == 77.7
    assert len(series["y"]) < 3000


def test_equal_names_of_folders_are_distinguished(tmp_path: Path) -> None:
    folders = [written(tmp_path / name, [start(0.0)]) for name in ("x/run", "y/run")]
    assert [run.name for run in read_runs(folders)] == ["x/run", "y/run"]
    assert [run.name for run in read_runs([folders[0], folders[0]])] == ["1: x/run", "2: x/run"]


# ---- the command ----


app = typer.Typer()
app.command()(report_command)


def test_the_command_writes_a_page_and_prints_the_figures(tmp_path: Path) -> None:
    folder = written(tmp_path / "run", FakeRun(40, kills=[23]))
    ran = CliRunner().invoke(app, [str(folder)])
    assert ran.exit_code == 0, ran.output
    assert "run: finished, step 40 of 40" in ran.output
    assert "wrote" in ran.output
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert "<title>run - Deepwell run</title>" in text
    assert 'http-equiv="refresh"' not in text
    assert sorted(path.name for path in folder.iterdir()) == ["events.jsonl", "report.html"]

    (folder / "report.html").unlink()
    ran = CliRunner().invoke(app, [str(folder), "--json"])
    found = json.loads(ran.output)
    assert (found["step"], found["restarts"], found["lost_steps"], found["guard"]["fallback"]) == (40, 1, 3, 1)
    assert not (folder / "report.html").exists()
    ran = CliRunner().invoke(app, [str(folder), str(folder), "--json", "-o", str(tmp_path / "two.html")])
    assert (tmp_path / "two.html").exists()

    for given, match in (
        (["--watch", "0"], "--watch: got 0"),
        (["--watch", "nan"], "--watch: got nan"),
        (["--watch", "5", "--json"], "--json prints once"),
        (["-o", str(tmp_path / "none" / "x.html")], "-o: cannot write"),
    ):
        error = CliRunner().invoke(app, [str(folder), *given]).exception
        assert isinstance(error, ConfigError)
        assert match in str(error)


def test_watching_writes_the_page_until_the_run_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = list(FakeRun(20))
    for event in events:
        event["t"] += time.time() - T0
    folder = written(tmp_path / "run", events[:10])
    pages = []

    def sleep(seconds: float) -> None:
        pages.append((folder / "report.html").read_text(encoding="utf-8"))
        written(folder, events[: 10 * (len(pages) + 1)] if len(pages) < 3 else events)

    monkeypatch.setattr(time, "sleep", sleep)
    ran = CliRunner().invoke(app, [str(folder), "--watch", "7"])
    assert ran.exit_code == 0, ran.output
    assert len(pages) == 3
    assert all('http-equiv="refresh" content="7"' in page for page in pages)
    assert 'http-equiv="refresh"' not in (folder / "report.html").read_text(encoding="utf-8")


# ---- the page as text ----


@functools.cache
def page(which: str = "one") -> str:
    one = run_of(FakeRun(400, kills=[150, 260]), name="first", path="runs/first")
    if which == "one":
        return run_page([one], now=T0 + 900)
    two = run_of(FakeRun(300, precision="bf16", experts=0), name="second", path="runs/second")
    return run_page([one, two], now=T0 + 900)


BAD = "</script><img src=x onerror=document.title='gone'>"


def nasty() -> str:
    """A page whose every text tries to leave its place."""
    events = FakeRun(60, model=BAD, host=BAD, layout=BAD, settings={BAD: BAD})
    events.formats = {f"{BAD}.{path}": f"{BAD}|{BAD}|{BAD}" for path in events.formats}
    texts = [
        {key: BAD if key in ("path", "reason", "what", "from", "to", "gemm") else value for key, value in event.items()}
        for event in events
    ]
    return run_page([run_of([*texts, {"t": T0, "kind": "note", "text": BAD}], name=BAD)] * 2, now=T0 + 900)


def test_the_page_loads_nothing_and_no_text_can_leave_its_place() -> None:
    text = page("two")
    assert not re.findall(r"""(?:src|href)=["'](?!data:)([^"']+)["']""", text.split("<script>")[0])
    own = text.rsplit("<script>", 1)[1]
    assert "fetch(" not in own
    assert "http" not in own
    assert "Apache License 2.0" in text
    assert BAD not in nasty()
    assert html.escape(BAD, quote=False).replace("'", "&#39;") in nasty()


# ---- in Chromium ----

# Counts what was painted on each canvas: a panel with a blank canvas is not drawn.
PAINTED = """
  const painted = {};
  for (const panel of document.querySelectorAll(".body")) {
    painted[panel.id] = [...panel.querySelectorAll("canvas")].map((canvas) => {
      const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
      let count = 0;
      for (let i = 3; i < data.length; i += 4) count += data[i] > 0;
      return count;
    });
  }
  document.documentElement.dataset.out = JSON.stringify(painted);
"""
CONTROLS = """
  const press = (label, value) =>
    document.querySelector(`[aria-label="${label}"] [data-value="${value}"]`).click();
  const type = (id, value) => {
    const box = document.getElementById(id);
    box.value = value;
    box.dispatchEvent(new Event("input"));
  };
  const out = {};
  press("over", "seconds");
  press("smoothing", "100");
  document.getElementById("log").click();
  press("GEMM", "wgrad");
  document.getElementById("changed").click();
  out.address = location.hash;
  type("expert-frame", 0);
  out.frame = document.getElementById("expert-step").textContent;
  type("guard-text", "inf gradient wgrad");
  out.rows = document.querySelectorAll("#guard tbody tr").length;
  type("guard-text", "nothing of the kind");
  out.none = document.querySelector("#guard .empty").textContent;
  const writeText = async (text) => { out.copied = JSON.parse(text).memory_gib.step.slice(-1); };
  Object.defineProperty(navigator, "clipboard", { value: { writeText } });
  document.querySelector('button.copy[data-panel="memory"]').click();
  press("run", "1");
  out.name = document.getElementById("name").textContent;
  out.empty = document.querySelector("#experts .empty").textContent;
  out.charts = PAGE.charts.length;
  document.documentElement.dataset.out = JSON.stringify(out);
"""
ATTACK = """
  const tip = (dataIndex) => ({ type: "showTip", seriesIndex: 0, dataIndex });
  for (const chart of PAGE.charts) for (let i = 0; i < 3; i++) chart.dispatchAction(tip(i));
  document.documentElement.dataset.out = document.querySelectorAll("img").length;
  undefinedFunction();
"""
# One Chromium shows all pages, each in a frame: its window has a least width, and it takes seconds to start.
FRAMES = """<body><script>
  const frames = PAGES.map(([name, address, width]) => {
    const frame = document.createElement("iframe");
    Object.assign(frame.style, { width: width + "px", height: "900px" });
    frame.src = name + ".html" + address;
    document.body.append(frame);
    return frame;
  });
  const read = () => {
    const pages = frames.map((frame) => frame.contentDocument.documentElement);
    if (pages.some(({ dataset }) => dataset.ready !== "yes" || !dataset.out)) return setTimeout(read, 100);
    const texts = pages.map((page) => {
      for (const script of page.querySelectorAll("script")) script.remove();
      return { dom: page.outerHTML, out: page.dataset.out, width: page.scrollWidth };
    });
    const result = document.createElement("pre");
    result.textContent = JSON.stringify(texts);
    document.body.replaceChildren(result);
  };
  setTimeout(read, 1000);
</script></body>"""


def little(*runs: int) -> str:
    both = [run_of([start(T0, model="m")], name="none"), run_of([start(T0), step(1, T0 + 1)], name="one")]
    return run_page([both[i] for i in runs], now=T0 + 2)


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """For each page its DOM after its script ran, what the script found, its width, and what the console said."""
    folder = tmp_path_factory.mktemp("pages")
    address = "#smooth=20&log=1&x=tokens"
    pages = {
        "wide": (page("two"), PAINTED, address, 1400), "phone": (page("two"), PAINTED, address, 390),
        "controls": (page("two"), CONTROLS, "", 1400), "nasty": (nasty(), ATTACK, "", 1400),
        "none": (little(0, 1), PAINTED, "", 390), "one": (little(1), PAINTED, "", 390),
    }  # fmt: skip
    for name, (text, script, _, _) in pages.items():
        head, _, tail = text.rpartition("</body>")
        (folder / f"{name}.html").write_text(f"{head}<script>{script}</script></body>{tail}", encoding="utf-8")
    given = json.dumps([[name, address, width] for name, (_, _, address, width) in pages.items()])
    (folder / "frames.html").write_text(FRAMES.replace("PAGES", given), encoding="utf-8")
    command = [
        str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        f"--user-data-dir={folder / 'profile'}", "--window-size=1500,1000", "--virtual-time-budget=6000",
        "--allow-file-access-from-files", "--enable-logging=stderr", "--v=0", "--dump-dom",
        (folder / "frames.html").as_uri(),
    ]  # fmt: skip
    run = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True)
    result = re.search(r"<pre>(.*)</pre>", run.stdout, re.DOTALL)
    assert result, run.stderr[-2000:]
    lines = [line for line in run.stderr.splitlines() if "CONSOLE" in line]
    found = dict(zip(pages, json.loads(html.unescape(result[1])), strict=True))
    for name, one in found.items():
        one["console"] = [line for line in lines if f"/{name}.html" in line]
    assert len(lines) == sum(len(one["console"]) for one in found.values())
    return found


class TestInChromium:
    pytestmark = browser

    @pytest.mark.parametrize(("name", "width"), [("wide", 1400), ("phone", 390)])
    def test_every_panel_is_drawn_and_nothing_is_too_wide(self, shown: dict[str, Any], name: str, width: int) -> None:
        one = shown[name]
        assert one["console"] == []
        assert width - 20 <= one["width"] <= width
        painted = json.loads(one["out"])
        charts = {"loss": 1, "optimizer": 1, "throughput": 1, "memory": 1, "predicted": 1, "precision": 1, "experts": 2,
                  "checkpoints": 1, "compare": 2, "guard": 0, "goodput": 0, "settings": 0}  # fmt: skip
        assert {panel: len(counts) for panel, counts in painted.items()} == charts
        assert min(count for counts in painted.values() for count in counts) > 3000
        for panel in PANELS:
            assert re.search(rf'id="{panel}"[^>]*>\s*<', one["dom"]), f"{panel} is empty"
        assert 'class="empty"' not in one["dom"]
        for text in ("fallback", "rank 3 died (signal 9)", "model.layers.2.mlp.experts.down", "first", "second"):
            assert text in one["dom"]

    def test_the_controls_choose_run_axis_filter_and_frame(self, shown: dict[str, Any]) -> None:
        assert shown["controls"]["console"] == []
        out = json.loads(shown["controls"]["out"])
        assert out.pop("empty").startswith("No `experts` event was logged")
        assert out == {
            "address": "#x=seconds&smooth=100&log=1&gemm=wgrad&changed=1",
            "frame": "13",
            "rows": 1,
            "none": "No event matches the filter.",
            "name": "second training llama-moe-8x1b",
            "charts": 9,
            "copied": [400],
        }

    def test_texts_stay_texts_and_an_error_would_be_seen(self, shown: dict[str, Any]) -> None:
        assert shown["nasty"]["out"] == "0"
        assert "<title>gone" not in shown["nasty"]["dom"]
        # The check itself: a page that throws must not pass for one that does not.
        assert len(shown["nasty"]["console"]) == 1
        assert "undefinedFunction" in shown["nasty"]["console"][0]

    def test_a_page_of_one_step_or_none_says_why_panels_are_empty(self, shown: dict[str, Any]) -> None:
        none, one = shown["none"], shown["one"]
        assert none["console"] == one["console"] == []
        assert max(none["width"], one["width"]) <= 390
        assert none["dom"].count('class="empty"') == len(PANELS) - 1  # only the settings are known
        assert "No step was logged yet." in none["dom"]
        assert len(json.loads(one["out"])["loss"]) == 1
