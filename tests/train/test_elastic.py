"""Runs that are killed, hang, lose agents and get them back: what they say of it, and that nothing is lost."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import deepwell as dw
from deepwell.bench.faults import FaultSetup, run_faults
from deepwell.bench.faults.checks import read_stream
from deepwell.bench.faults.siege import AgentHost
from deepwell.errors import ConfigError, DeepwellError
from deepwell.train.elastic import StopSignal, Watchdog, World
from deepwell.train.settings import TrainSettings
from deepwell.train.starts import FILE, Fence, Journal, last_events, note_end, note_start
from warm import run_python

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
GLOO = "RuntimeError: [gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:1950: Connection reset by peer"


# ---- the journal ----


def test_causes_of_a_restart(tmp_path: Path) -> None:
    def cause(world: int, ends: list[tuple[int, str, str]], now: int | None = None) -> str:
        (tmp_path / FILE).unlink(missing_ok=True)
        start, before, _ = note_start(tmp_path, 7, world, 5)
        assert start.generation == 0 and not before
        for rank, what, error in ends:
            note_end(tmp_path, 0, rank, what, error)
        start, before, first = note_start(tmp_path, 7, world if now is None else now, 5)
        assert start.generation == 1 and first <= start.t
        return before

    assert cause(1, []) == "rank 0 ended without a word (killed?)"
    assert cause(4, [(0, "error", GLOO), (2, "error", GLOO)]) == "ranks 1, 3 ended without a word (killed?)"
    # The rank that failed by itself is the cause, not those that missed it, whoever wrote first.
    found = cause(3, [(0, "error", GLOO), (2, "error", "OutOfMemoryError: CUDA out\nof memory"), (1, "error", GLOO)])
    assert found == "rank 2 failed: OutOfMemoryError: CUDA out of memory"
    assert cause(2, [(0, "error", GLOO), (1, "error", GLOO)]).startswith("rank 0 failed: RuntimeError")
    assert cause(2, [(0, "hung", "no step finished for 9 s")]) == "rank 1 hung: no step finished for 9 s"
    assert cause(2, [(0, "hung", "no step"), (1, "hung", "no step")]) == "hung: no step"
    assert cause(2, [(0, "signal", ""), (1, "signal", "")]) == "stopped by SIGTERM"
    assert cause(4, [(0, "error", GLOO), (1, "error", GLOO)], now=2) == (
        "world changed from 4 to 2: ranks 2, 3 ended without a word (killed?)"
    )
    assert cause(1, [(0, "error", "ValueError: " + "x" * 10_000)]).count("x") < 300


def test_a_journal_with_torn_and_foreign_lines_is_read(tmp_path: Path) -> None:
    note_start(tmp_path, 0, 2, 5)
    with (tmp_path / FILE).open("ab") as file:
        file.write(b'{"generation": 1, "st')  # killed while it wrote
    note_end(tmp_path, 0, 1, "error", "boom")
    with (tmp_path / FILE).open("ab") as file:
        file.write(b'\xff\xfe\n[]\n{"generation": 3}\n7\n')
    start, _, _ = note_start(tmp_path, 0, 2, 5)
    journal = Journal.read(tmp_path)
    assert [found.generation for found in journal.starts] == [0, 1] and start.generation == 1
    assert [(end.rank, end.error) for end in journal.ends] == [(1, "boom")]
    assert Journal.read(tmp_path / "nowhere") == Journal(starts=[], ends=[])


def test_it_gives_up_after_starts_without_progress_only(tmp_path: Path) -> None:
    for _ in range(3):
        note_start(tmp_path, 10, 1, 2)
    with pytest.raises(DeepwellError, match=r"3 starts in a row from step 10.*ended without a word"):
        note_start(tmp_path, 10, 1, 2)
    assert len(Journal.read(tmp_path).starts) == 3  # a start that was refused is none
    # A later step is progress.
    for _ in range(3):
        note_start(tmp_path, 11, 1, 2)
    with pytest.raises(DeepwellError):
        note_start(tmp_path, 11, 1, 2)
    # So is an end in order: a run that was stopped, paused or done may be started for ever.
    note_end(tmp_path, 5, 0, "signal")
    for _ in range(9):
        start, _, _ = note_start(tmp_path, 11, 1, 2)
        note_end(tmp_path, start.generation, 0, "paused")


def test_a_start_that_was_overtaken_stops(tmp_path: Path) -> None:
    start, _, _ = note_start(tmp_path, 0, 1, 5)
    fence = Fence(tmp_path, start.generation)
    fence.check()
    note_end(tmp_path, 0, 1, "error", "another rank")  # a longer file is no later start
    fence.check()
    note_start(tmp_path, 0, 1, 5)
    with pytest.raises(DeepwellError, match="started again \\(start 1\\) while this one, start 0"):
        fence.check()
    (tmp_path / FILE).unlink()
    fence.check()


def test_only_the_end_of_a_long_event_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "events.jsonl"
    lines = [{"kind": "run"}, *({"kind": "step", "step": n, "pad": "x" * 200} for n in range(5000)), {"kind": "note"}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "st')
    found = last_events(path, lambda event: event["kind"] == "step")
    assert [event["kind"] for event in found] == ["step", "note"] and found[0]["step"] == 4999
    assert len(last_events(path, lambda event: event["kind"] == "run")) == 5002
    assert len(last_events(path, lambda event: event["kind"] == "none")) == 5002
    assert last_events(tmp_path / "none", lambda event: True) == []


# ---- signals, hangs, notes ----


def test_more_sigterms_change_nothing_and_the_handler_goes_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopSignal() as stop:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
        assert stop.name == "SIGTERM"
    assert signal.getsignal(signal.SIGTERM) is before
    seen = []
    thread = threading.Thread(target=lambda: seen.append(StopSignal().__enter__().name))
    thread.start()
    thread.join()
    assert seen == [""]  # in another thread than the main one nothing can be noted, and nothing is broken


def test_a_sigterm_before_fit_ends_the_process_and_changes_nothing(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\nfrom deepwell.bench.faults.worker import WorkerJob, make_trainer\n"
        "job = WorkerJob(folder=sys.argv[1], steps=9, world=1, seed=0, save_every=2, hang_after_s=0.0)\n"
        "make_trainer(job).fit(stop_at=3)\n"
        "trainer = make_trainer(job)\nassert trainer.step == 3\n"
        "os.kill(os.getpid(), signal.SIGTERM)\ntrainer.fit()\n"
    )
    done = run_python(code, str(tmp_path), timeout=120)
    assert done.returncode == -signal.SIGTERM, done.stderr
    assert dw.load(tmp_path).step == 3 and dw.load(tmp_path).verify()
    assert len(Journal.read(tmp_path).starts) == 1


def test_the_watchdog_dumps_and_ends_a_process_that_hangs(tmp_path: Path) -> None:
    code = (
        "import time\nfrom deepwell.train.elastic import Watchdog\n"
        "def in_here():\n    time.sleep(60)\n"
        "with Watchdog(0.4, lambda s: print('told', s > 0.4, flush=True), first_s=60.0) as dog:\n"
        "    time.sleep(1.0)  # the first step may take longer\n"
        "    for _ in range(5): dog.alive(); time.sleep(0.2)\n"
        "    print('alive', flush=True)\n    in_here()\n"
    )
    done = run_python(code, timeout=120)
    assert done.returncode == 75 and done.stdout.split() == ["alive", "told", "True"]
    assert "this rank hangs" in done.stderr and "in_here" in done.stderr
    with Watchdog(0.0) as off:
        assert off._thread is None


def test_settings_and_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="hang_after"):
        TrainSettings(hang_after="20")  # seconds or steps?
    assert TrainSettings(hang_after="0").hang_after == "0"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.delenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", raising=False)
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in World(size=2).note(elastic=True)
    assert not World(size=2).note(elastic=False) and not World().note(elastic=True)
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    assert not World(size=2).note(elastic=True)
    for wrong in ({"kills": 0}, {"world": 0}, {"minutes": 0.0}):
        with pytest.raises(ConfigError):
            FaultSetup(**wrong)  # type: ignore[arg-type]


# ---- the real thing ----


@LINUX
def test_agents_that_end_at_once_are_all_noticed(tmp_path: Path) -> None:
    host = AgentHost(tmp_path / "host.log")
    says = [*("sh", "-c"), r"printf 'ended 7 1\nended 8 0\nend'; sleep 0.2; echo 'ed 9 2'; read quit"]
    with subprocess.Popen(says, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as host._process:
        deadline = time.monotonic() + 10.0
        while len(host.ended) < 3 and time.monotonic() < deadline:
            host.poll()
        assert host.ended == {7: 1, 8: 0, 9: 2}


@LINUX
def test_a_run_that_is_killed_loses_nothing(tmp_path: Path) -> None:
    result = run_faults(FaultSetup(kills=2, steps_per_kill=10, save_every=3, minutes=5.0), tmp_path, print)
    assert result.ok, str(result)
    assert result.kills == 2 and result.starts >= 3 and len(result.recoveries) >= 2
    assert result.reasons.get("ended without a word", 0) >= 1 and result.reasons.get("stopped by SIGTERM") == 1


class Nodes:
    """Agents of one job on this machine, and what the job has written."""

    def __init__(self, folder: Path, host: AgentHost) -> None:
        self.folder, self.host = folder, host
        (folder / "pids").mkdir(parents=True)

    def start(self, processes: int = 2, *, nodes: Any = None, **job: Any) -> int:
        fields = {
            "folder": str(self.folder), "steps": 100_000, "world": 4, "seed": 0, "save_every": 4, "hang_after_s": 60.0,
        }  # fmt: skip
        return self.host.start({**fields, **job}, processes, **(nodes or {}))

    def events(self, kind: str) -> list[dict[str, Any]]:
        path = self.folder / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        found = []
        for line in lines:
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
        return [event for event in found if event["kind"] == kind]

    def workers(self, agent: int) -> list[int]:
        text = Path(f"/proc/{agent}/task/{agent}/children").read_text()
        return [int(pid) for pid in text.split() if (self.folder / "pids" / pid).exists()]

    def rank_of(self, pid: int) -> int:
        return int((self.folder / "pids" / str(pid)).read_text())

    def until(self, found: Callable[[], bool], what: str, seconds: float = 180.0) -> None:
        deadline = time.monotonic() + seconds
        while not found():
            self.host.poll()
            assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s\n{self.tail()}"
            time.sleep(0.05)

    def tail(self) -> str:
        log = self.folder / "agent.log"
        return log.read_text()[-3000:] if log.exists() else ""

    def steps_of(self, generation: int) -> int:
        """Steps that were logged since a start; 0 where there was none."""
        runs = [event for event in self.events("run") if event["generation"] >= generation]
        return sum(step["t"] >= runs[0]["t"] for step in self.events("step")) if runs else 0

    def worlds(self) -> list[int]:
        return [event["world"] for event in self.events("run")]


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentHost]:
    with AgentHost(tmp_path_factory.mktemp("host") / "host.log") as found:
        yield found


def _port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.mark.slow
@LINUX
def test_agents_go_and_come_back(tmp_path: Path, host: AgentHost) -> None:
    # 4 -> 2 -> 4 processes, then the agent that has the rendezvous dies too.
    job = Nodes(tmp_path / "run", host)
    where = {"nodes": (1, 2), "endpoint": f"127.0.0.1:{_port()}"}
    first = job.start(nodes=where)
    second = job.start(nodes=where)
    job.until(lambda: job.worlds()[-1:] == [4] and job.steps_of(0) > 8, "4 processes")
    orphans = job.workers(second)
    os.kill(second, signal.SIGKILL)
    job.until(lambda: job.worlds()[-1:] == [2], "2 processes")
    assert not any(Path(f"/proc/{pid}").exists() for pid in orphans)  # they ended with their agent
    start = len(job.worlds()) - 1
    job.until(lambda: job.steps_of(start) > 8, "steps of 2 processes")
    second = job.start(nodes=where)
    job.until(lambda: job.worlds()[-1:] == [4], "4 processes again")
    start = len(job.worlds()) - 1
    job.until(lambda: job.steps_of(start) > 8, "steps of 4 processes")
    down = next(event for event in job.events("restart") if event["world"] == 2)
    assert down["reason"].startswith("world changed from 4 to 2: ranks "), down
    up = job.events("restart")[-1]
    # The agent asks its workers to stop before it starts more of them: they save, and no step is lost.
    assert up["reason"] == "world changed from 2 to 4: stopped by SIGTERM" and up["lost_steps"] == 0, up
    os.kill(first, signal.SIGKILL)
    job.until(lambda: first in host.ended, "the end of the first agent")
    for agent in (second,):
        if agent not in host.ended:
            os.kill(agent, signal.SIGKILL)
    job.until(lambda: second in host.ended, "the end of the second agent")
    where["endpoint"] = f"127.0.0.1:{_port()}"
    reached, count = job.events("step")[-1]["step"], len(job.worlds())
    first, second = job.start(nodes=where), job.start(nodes=where)
    job.until(lambda: len(job.worlds()) > count and job.steps_of(count) > 8, "a new job")
    assert job.events("step")[-1]["step"] > reached - 8
    for agent in (first, second):
        os.kill(agent, signal.SIGTERM)
    job.until(lambda: {first, second} <= host.ended.keys(), "the end")
    # On 2 as on 4 processes each step took the samples that are its own, and each of them once.
    stream, _ = read_stream(job.folder)
    last = job.events("end")[-1]
    assert last["reason"] == "signal" and last["exit"] == 0
    for step in range(1, last["step"] + 1):
        assert sorted(stream[step]) == list(range(8 * (step - 1), 8 * step)), step


@pytest.mark.slow
@LINUX
@pytest.mark.parametrize("how", ["stopped", "asleep"])
def test_a_hung_rank_is_found_and_replaced(tmp_path: Path, host: AgentHost, how: str) -> None:
    job = Nodes(tmp_path / "run", host)
    fails = {"fail_step": 9, "fail_rank": 1, "fail_how": "sleep"} if how == "asleep" else {}
    agent = job.start(world=2, hang_after_s=15.0, give_up_after=3, **fails)
    job.until(lambda: job.steps_of(0) >= (8 if how == "asleep" else 5), "steps")
    began = time.monotonic()
    if how == "stopped":
        (victim,) = (pid for pid in job.workers(agent) if job.rank_of(pid) == 1)
        os.kill(victim, signal.SIGSTOP)
    job.until(lambda: len(job.events("restart")) >= 1, "a restart", 120.0)
    seconds = time.monotonic() - began
    (restart, *_) = job.events("restart")
    assert "hung: no step finished for" in restart["reason"], restart
    if how == "stopped":
        assert restart["reason"].startswith("rank 1 hung")
        # Not after the 30 seconds that the agent would wait for a process that does not answer.
        assert not Path(f"/proc/{victim}").exists() and restart["recovery_s"] < 15.0 + 28.0, (restart, seconds)
    os.kill(agent, signal.SIGTERM)
    job.until(lambda: agent in host.ended, "the end")


@pytest.mark.slow
@LINUX
def test_a_run_that_always_fails_gives_up_with_the_reason(tmp_path: Path, host: AgentHost) -> None:
    job = Nodes(tmp_path / "run", host)
    agent = job.start(world=2, fail_step=6, fail_rank=1, give_up_after=2)
    job.until(lambda: agent in host.ended, "giving up")
    assert host.ended[agent] != 0
    # Step 4 is saved; of the starts from there three fail, and the next is refused.
    assert [start.step for start in Journal.read(job.folder).starts] == [0, 4, 4, 4]
    end = job.events("end")[-1]
    assert end["reason"] == "gave up" and end["exit"] == 1
    assert "3 starts in a row from step 4" in end["error"] and "rank 1 failed: ValueError: planned" in end["error"]


@pytest.mark.slow
@LINUX
def test_the_command_line_survives_a_kill_and_saves_at_a_sigterm(tmp_path: Path) -> None:
    recipe = Path(__file__).parents[2] / "recipes" / "tiny.toml"
    folder = tmp_path / "run"
    changes = ["model.layers=1", "train.seq_len=16", "train.save_every=2", "train.eval_every=0", "train.steps=100000"]
    changes += ["train.micro_batch=1", "model.set.vocab_size=64", "data.train=synthetic:64", "precision.recipe=bf16"]
    command = [
        sys.executable,
        "-m",
        "deepwell",
        "train",
        str(recipe),
        *changes,
        "--run-dir",
        str(folder),
        "--nproc",
        "2",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    with (tmp_path / "log").open("w") as log:
        launcher = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        _until(launcher, folder, lambda events: _steps(events) > 4, tmp_path / "log")
        (agent,) = _children(launcher.pid)
        os.kill(_children(agent)[-1], signal.SIGKILL)
        _until(launcher, folder, lambda events: any(e["kind"] == "restart" for e in events), tmp_path / "log")
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(120) == 0, (tmp_path / "log").read_text()[-3000:]
    finally:
        launcher.kill()
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert events[-1]["reason"] == "signal" and "without a word" in next(
        event["reason"] for event in events if event["kind"] == "restart"
    )
    saved = [event["step"] for event in events if event["kind"] == "save" and event["committed"]]
    assert saved[-1] == events[-1]["step"]


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _steps(events: list[dict[str, Any]]) -> int:
    return sum(event["kind"] == "step" for event in events)


def _until(
    launcher: "subprocess.Popen[bytes]", folder: Path, found: Callable[[list[dict[str, Any]]], bool], log: Path
) -> None:
    deadline = time.monotonic() + 400.0
    while True:
        path = folder / "events.jsonl"
        text = path.read_text() if path.exists() else ""
        if found([json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]):
            return
        assert launcher.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.1)
