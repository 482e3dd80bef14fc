"""Saves beside training: what is saved is the state of that moment, and no failure leaves half a checkpoint."""

import errno
import json
import os
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from deepwell import files
from deepwell.artifacts.checkpoint import (
    SaveEvent,
    Saver,
    TrainState,
    latest,
    list_checkpoints,
    load,
    load_checkpoint,
    save_checkpoint,
    verify,
)
from deepwell.artifacts.checkpoint.keep import tidy
from deepwell.artifacts.checkpoint.pieces import units_of
from deepwell.artifacts.checkpoint.staging import Staging
from deepwell.artifacts.checkpoint.team import Team
from deepwell.artifacts.checkpoint.writer import failed_job, prepare, run_job
from deepwell.errors import CheckpointError, ConfigError
from warm import run_python

HERE = Path(__file__).parent


def make_state(step: int, net: nn.Module | None = None) -> TrainState:
    net = nn.Linear(16, 16) if net is None else net
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(float(step))
    return TrainState(model=net, meta={"step": step, "loss": 0.5})


def value_of(path: Path | None) -> float:
    assert path is not None
    return float(load(path).weights()["weight"][0, 0])


class Disk:
    """Stands between the checkpoint and the system: counts calls that change the disk, and can fail or hold them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls, self.fail_at = 0, -1
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.error = OSError(errno.ENOSPC, "No space left on device")
        real = {
            name: getattr(os, name)
            for name in ("open", "write", "fsync", "close", "O_WRONLY", "O_CREAT", "O_EXCL", "O_RDONLY", "getpid")
        }
        for name in ("open", "write", "fsync"):
            real[name] = self._watched(real[name])
        monkeypatch.setattr(files, "os", SimpleNamespace(**real))
        for name in ("mkdir", "rename"):
            monkeypatch.setattr(Path, name, self._watched(getattr(Path, name)))

    def _watched(self, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            assert self.goes_on.wait(60)
            self.calls += 1
            if self.calls - 1 == self.fail_at:
                raise self.error
            return function(*args, **kwargs)

        return call


def test_the_checkpoint_holds_the_values_of_its_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    net = nn.Linear(16, 16)

    def save_and_train_on(step: int) -> SaveEvent:
        event = saver.save(make_state(step, net))
        assert (event.step, event.committed, event.error) == (step, False, "")
        saver.before_update()
        with torch.no_grad():
            net.weight.add_(100)
        return event

    with Saver(tmp_path, keep_last=9) as saver:
        disk.goes_on.clear()
        save_and_train_on(1)
        assert saver.poll() == [] and latest(tmp_path) is None  # nothing is written yet, and training went on
        threading.Timer(0.3, disk.goes_on.set).start()
        second = save_and_train_on(2)  # waits for the first
        assert second.stall_s > 0.25 and value_of(tmp_path / "step-00000001") == 1
        save_and_train_on(3)
    events = saver.poll()
    assert [e.step for e in events] == [1, 2, 3] and saver.poll() == []
    for event in events:
        path = Path(event.path)
        assert event.committed and not event.error and event.seconds > 0
        assert event.bytes == sum(f.stat().st_size for f in path.iterdir() if f.name != "COMMITTED")
        assert value_of(path) == event.step
    with Saver(tmp_path, asynchronous=False) as saver:
        event = saver.save(make_state(4, net))
        assert event.committed and event.stall_s >= event.seconds
        assert saver.poll() == [event]


@pytest.mark.parametrize("again", [False, True], ids=["new step", "same step"])
def test_no_failed_call_leaves_half_a_checkpoint(again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path, make_state(1))
    before = save_checkpoint(tmp_path, make_state(2))
    step = 2 if again else 3
    disk = Disk(monkeypatch)
    failures = 0
    with Saver(tmp_path, keep_last=2, keep_every=1) as saver:
        while True:
            disk.calls, disk.fail_at = 0, failures
            net = nn.Linear(16, 16)
            state = make_state(step, net)
            with torch.no_grad():
                net.weight.fill_(77)
            saver.save(state)
            saver.wait()
            disk.fail_at = -1
            (event,) = saver.poll()
            path = latest(tmp_path)
            assert path is not None
            verify(path)
            if event.committed:
                break
            failures += 1
            assert (
                "No space left on device" in event.error
                and str(tmp_path) in event.error
                and f"step-{step:08d} was not saved" in event.error
            )
            assert not [p for p in tmp_path.iterdir() if p.name.endswith(".tmp")]
            if value_of(path) == 77:  # only the last word, that the name is on the disk, was missing
                assert failures >= disk.calls - 1
                for extra in [tmp_path / "step-00000003"] if not again else []:
                    shutil.rmtree(extra)
            else:
                assert path == before and value_of(path) == 2
    assert failures > 15
    assert value_of(path) == 77


def test_a_folder_that_cannot_be_written_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with Saver(tmp_path / "file" / "run") as saver:
        saver.save(make_state(1))
    (event,) = saver.poll()
    assert not event.committed and "Not a directory" in event.error and str(tmp_path / "file") in event.error
    disk = Disk(monkeypatch)
    disk.error = PermissionError(errno.EACCES, "Permission denied")
    disk.fail_at = 0
    with Saver(tmp_path / "run") as saver:
        saver.save(make_state(1))
        saver.wait()
        saver.save(make_state(2))
    refused, saved = saver.poll()
    assert "Permission denied" in refused.error and saved.committed


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_comes_late_to_a_save_that_failed_does_not_wait(late: int, tmp_path: Path) -> None:
    """Two ranks of one save, one after the other: whoever is first fails, and the other hears of it at once."""
    token, units = "0123456789ab", units_of(TrainState(model=nn.Linear(4, 4)))
    teams = [Team(rank=r, world=2, token=token, mine=frozenset(), known=frozenset(units)) for r in (0, 1)]
    state = TrainState(model=nn.Linear(4, 4), meta={"step": 3})
    jobs = [failed_job(tmp_path, 3, teams[1 - late], f"{token}-3-0", "it is not healthy")]
    jobs += [prepare(tmp_path, state, teams[late], f"{token}-3-0", Staging())]
    began = time.monotonic()
    for job, words in zip(
        jobs, ("it is not healthy", "it is not healthy" if late == 0 else "another rank"), strict=True
    ):
        with pytest.raises(CheckpointError, match=words):
            run_job(job, Staging(), timeout_s=60)
    assert time.monotonic() - began < 30
    assert list_checkpoints(tmp_path) == [] and not list(tmp_path.glob("*.tmp"))
    tidy(tmp_path, "ba9876543210")
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = save_checkpoint(tmp_path, make_state(1))
    disk = Disk(monkeypatch)
    disk.error = KeyboardInterrupt()  # type: ignore[assignment]
    disk.fail_at = 4
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, make_state(2))
    assert list(tmp_path.iterdir()) == [before]


def test_killed_and_full_in_real_processes(tmp_path: Path) -> None:
    run = run_python(HERE / "checkpoint_faults.py", str(tmp_path / "run"), timeout=120)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["killed"] > 30 and found["new"] > 0 and found["old"] > 15
    assert found["left"] == found["after"] == ["step-00000001", "step-00000002"]
    assert not found["full"]["committed"] and "File too large" in found["full"]["error"]
    assert found["again"].endswith("step-00000003")


def test_what_is_kept(tmp_path: Path) -> None:
    mine = tmp_path / "step-00000015"
    mine.mkdir()
    (mine / "notes.txt").write_text("a user's own folder of that name")
    (tmp_path / "notes").mkdir()
    with Saver(tmp_path, keep_last=2, keep_every=20) as saver:
        for step in (10, 20, 30, 40, 50, 60, 70):
            saver.save(make_state(step))
    assert all(event.committed and not event.error for event in saver.poll())
    kept = [path.name for path in list_checkpoints(tmp_path)]
    assert kept == [f"step-{step:08d}" for step in (20, 40, 60, 70)]
    assert (mine / "notes.txt").exists() and (tmp_path / "notes").exists()

    # A damaged one is neither counted nor deleted; one that was just saved stays, whatever its number.
    (tmp_path / "step-00000070" / "model-00000.safetensors").write_bytes(b"")
    assert latest(tmp_path) == tmp_path / "step-00000060"
    with Saver(tmp_path, keep_last=1) as saver:
        saver.save(make_state(5))
        saver.wait()
        left = sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("step"))
        assert left == [f"step-{step:08d}" for step in (5, 15, 60, 70)]
    for number in (0, -1, True, 1.5):
        with pytest.raises(ConfigError, match="keep_last is"):
            Saver(tmp_path, keep_last=number)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="keep_every is"):
            Saver(tmp_path, keep_every=number)  # type: ignore[arg-type]


def test_fifty_saves_leave_no_handles_memory_or_threads(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 256)).sum().backward()
    optimizer.step()

    def resources() -> tuple[int, int, int]:
        kib = next(
            int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if "VmRSS" in line
        )
        return len(os.listdir("/proc/self/fd")), threading.active_count(), kib  # noqa: PTH208

    saver = Saver(tmp_path, keep_last=2)
    for step in range(60):
        if step == 10:
            saver.wait()
            before = resources()
        saver.save(TrainState(model=net, optimizer=optimizer, meta={"step": step, "loss": 1.0}))
        if step % 10 == 5:
            load_checkpoint(latest(tmp_path) or "", TrainState(model=net, optimizer=optimizer))
    saver.wait()
    after = resources()
    assert after[:2] == before[:2]
    assert after[2] - before[2] < 16 * 1024, "each checkpoint has 1.5 MiB"
    assert all(event.committed for event in saver.poll())
    saver.close()
    assert threading.active_count() < before[1]


@pytest.mark.gpu
def test_on_a_gpu_the_update_waits_for_the_copy_and_the_host_does_not(tmp_path: Path) -> None:
    net = nn.ParameterList(nn.Parameter(torch.full((1 << 26,), float(i), device="cuda")) for i in range(8))
    changing = torch.ones(1 << 20, device="cuda")
    net.register_buffer("changing", changing)
    with Saver(tmp_path, keep_last=9) as saver:
        for step in (1, 2, 3):
            event = saver.save(TrainState(model=net, meta={"step": step}))
            if step > 1:
                assert event.stall_s < 5.0
            changing.add_(1)  # a forward may do that
            began = time.perf_counter()
            saver.before_update()
            with torch.no_grad():
                for parameter in net:
                    parameter.add_(100)
            assert time.perf_counter() - began < 0.02
            saver.wait()
    for event in saver.poll():
        weights = load(event.path).weights()
        for i in range(8):
            assert bool((weights[str(i)] == i + 100 * (event.step - 1)).all())
        assert bool((weights["changing"] == event.step).all())
