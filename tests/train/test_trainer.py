"""The trainer in one process: it trains what a loop by hand trains, logs, saves, resumes and stops as it should."""

import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepwell as dw
from deepwell.artifacts.checkpoint import saver
from deepwell.errors import CheckpointError, ConfigError, NumericsError
from deepwell.planner.layout import Layout
from deepwell.precision import PrecisionPolicy
from deepwell.train.feed import Feed, count_items
from deepwell.train.log import EventLog


def events_of(trainer: dw.Trainer) -> list[dict[str, Any]]:
    """The record, which must be JSON: numbers that are not finite are words in it."""
    lines = (trainer.run_dir / "events.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=pytest.fail) for line in lines]


def losses_of(trainer: dw.Trainer) -> list[float]:
    return [event["loss"] for event in events_of(trainer) if event["kind"] == "step"]


def weights_of(trainer: dw.Trainer) -> dict[str, bytes]:
    return {n: p.detach().numpy().tobytes() for n, p in trainer.engine.named_parameters()}


@pytest.mark.usefixtures("eager")
def test_it_trains_what_a_plain_loop_trains(make_trainer: Any) -> None:
    # Two micro-batches, clipped, the same optimizer: bit for bit.
    trainer = make_trainer(optimizer="sgd", clip_norm=0.5, weight_decay=0.0)
    hand = make_trainer(optimizer="sgd", folder="hand", clip_norm=0.5)
    trainer.fit()
    model, schedule = hand.engine.deepwell.model, hand.settings.learning_rate()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    losses = []
    for step in range(6):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * schedule(step)
        total = 0.0
        for micro in range(2):
            batch = hand.loader.batch(4 * step, range(2 * micro, 2 * micro + 2))
            loss = hand.engine(**batch).loss / 2
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    assert losses_of(trainer) == pytest.approx(losses, rel=1e-6)
    for (name, mine), other in zip(trainer.engine.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-8, msg=name)


@pytest.mark.parametrize("optimizer", ["adamw_dw", pytest.param("adamw", marks=pytest.mark.slow)])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(make_trainer: Any, optimizer: str) -> None:
    # With dropout: random numbers belong to what is resumed.
    options = {"changes": {"attention_dropout": 0.1}, "optimizer": optimizer}
    whole = make_trainer(**options, folder="whole")
    whole.fit()
    first = make_trainer(**options, folder="parts")
    assert first.fit(stop_at=3).reason == "paused"
    second = make_trainer(**options, folder="parts")
    assert second.step == 3 and second.cursor == 12 and second.resumed_from is not None
    result = second.fit()
    assert result.reason == "done" and result.step == 6
    assert losses_of(second) == losses_of(whole)
    assert weights_of(second) == weights_of(whole)


def test_events_are_the_record(make_trainer: Any) -> None:
    trainer = make_trainer(
        precision="mxfp8", save_every=2, eval_every=3, eval_dataloader="synthetic:128", eval_batches=2
    )
    trainer.fit()
    events = events_of(trainer)
    kinds = [event["kind"] for event in events]
    assert kinds[0] == "run" and kinds[-1] == "end" and kinds.count("step") == 6 and kinds.count("eval") == 2
    assert [e["step"] for e in events if e["kind"] == "save" and e["committed"]] == [2, 4, 6]
    step = next(e for e in events if e["kind"] == "step")
    assert step["tokens"] == 64 and step["seconds"] > 0 and math.isfinite(step["loss"]) and step["grad_norm"] > 0
    assert step["predicted_s"] > 0 and step["ratio"] == pytest.approx(step["predicted_s"] / step["seconds"])
    run = events[0]
    assert run["precision"] == "mxfp8" and run["world"] == 1 and run["generation"] == 0 and run["global_batch"] == 4
    formats = next(e for e in events if e["kind"] == "formats")["formats"]
    assert formats["model.layers.0.mlp.up_proj"] == "mxfp8|mxfp8|mxfp8" and formats["lm_head"] == "bf16|bf16|bf16"
    assert 0.0 < [e for e in events if e["kind"] == "step"][-1]["goodput"] <= 1.0


@pytest.mark.usefixtures("eager")
def test_labels_that_are_left_out_count_nothing(make_trainer: Any) -> None:
    # Rows with other numbers of labels: the mean over tokens, not over micro-batches.
    generator = torch.Generator().manual_seed(3)
    rows = []
    for i in range(8):
        ids = torch.randint(0, 128, (16,), generator=generator)
        labels = ids.clone()
        labels[: 2 * i] = -100
        rows.append({"input_ids": ids, "labels": labels})
    trainer = make_trainer(data=rows, optimizer="sgd", weight_decay=0.0, clip_norm=None, steps=1, warmup=0, lr=1.0)
    batch = trainer.loader.batch(0, range(4))
    reference = make_trainer(folder="other", data=rows)
    loss = reference.engine(**batch).loss
    loss.backward()
    before = [p.detach().clone() for p in trainer.engine.parameters()]
    trainer.fit()
    assert losses_of(trainer)[0] == pytest.approx(loss.item(), rel=1e-6)
    for mine, old, other in zip(trainer.engine.parameters(), before, reference.engine.parameters(), strict=True):
        torch.testing.assert_close(old - mine, other.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("eager")
def test_a_step_without_labels_is_an_error(make_trainer: Any) -> None:
    rows = [{"input_ids": torch.zeros(8, dtype=torch.long), "labels": torch.full((8,), -100)}] * 4
    with pytest.raises(ConfigError, match="-100"):
        make_trainer(data=rows, seq_len=8).fit()


def test_a_model_with_targets_and_one_with_logits_alone() -> None:
    tokens = torch.randint(0, 16, (2, 8))

    class Targets(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(16, 16)

        def forward(self, ids_BS: torch.Tensor, targets_BS: torch.Tensor | None = None) -> torch.Tensor:
            if targets_BS is None:
                raise AssertionError("called without its targets")
            targets, ids = targets_BS, ids_BS
            return nn.functional.cross_entropy(self.table(ids).flatten(0, 1), targets.flatten())

    class Logits(Targets):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return self.table(ids)

    torch.manual_seed(0)
    one, two = Targets(), Logits()
    two.load_state_dict(one.state_dict())
    batch = {"input_ids": tokens, "labels": tokens}
    assert count_items(batch) == 14
    torch.testing.assert_close(Feed(one)(one, batch), Feed(two)(two, batch))
    shifted = {"input_ids": tokens, "shift_labels": torch.nn.functional.pad(tokens, (0, 1), value=-100)[:, 1:]}
    assert count_items(shifted) == 14
    torch.testing.assert_close(Feed(one)(one, shifted), Feed(two)(two, batch))


@pytest.mark.usefixtures("eager")
def test_a_bad_step_is_skipped_and_never_saved(make_trainer: Any) -> None:
    class Poison(dw.Callback):
        def on_step(self, trainer: dw.Trainer, event: Any) -> None:
            if event["step"] == 3:  # from here on every loss is NaN
                with torch.no_grad():
                    trainer.engine.lm_head.weight[0, 0] = math.nan

    trainer = make_trainer(save_every=1, async_save=False, callbacks=[Poison()], guard={"max_skipped": 2})
    with pytest.raises(NumericsError):
        trainer.fit(steps=20)
    events = events_of(trainer)
    assert events[-1]["kind"] == "end" and events[-1]["exit"] == 1
    steps = [e for e in events if e["kind"] == "step"]
    assert [e["skipped"] for e in steps[:3]] == [False] * 3 and all(e["skipped"] for e in steps[3:])
    saved = sorted(path.name for path in (trainer.run_dir / "checkpoints").iterdir() if path.is_dir())
    assert saved[-1] == "step-00000003"
    assert dw.load(trainer.run_dir).step == 3


@pytest.mark.usefixtures("eager")
def test_sigterm_saves_and_exits_with_0(make_trainer: Any) -> None:
    class Stop(dw.Callback):
        def on_step(self, trainer: dw.Trainer, event: Any) -> None:
            if event["step"] == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    trainer = make_trainer(callbacks=[Stop()])
    with pytest.raises(SystemExit) as stopped:
        trainer.fit()
    assert stopped.value.code == 0
    assert events_of(trainer)[-1]["reason"] == "signal"
    assert dw.load(trainer.run_dir).step == 3
    assert signal.getsignal(signal.SIGTERM) is not None


@pytest.mark.usefixtures("eager")
@pytest.mark.slow
def test_starts_without_progress_give_up(make_trainer: Any) -> None:
    class Crash(dw.Callback):
        def on_step(self, trainer: dw.Trainer, event: Any) -> None:
            raise RuntimeError("boom")

    for _ in range(3):
        with pytest.raises(RuntimeError, match="boom"):
            make_trainer(callbacks=[Crash()], give_up_after=2).fit()
    with pytest.raises(dw.DeepwellError, match="no new checkpoint"):
        make_trainer(callbacks=[Crash()], give_up_after=2).fit()


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"optimizer": "adam_w"}, "did you mean adam"),
        ({"global_batch": 3}, "multiple"),
        ({"lrr": 1.0}, "did you mean lr"),
        ({"data": "nowhere/at/all"}, "nowhere"),
        ({"layout": {"tp": 2}}, "processes"),
        ({"tensorboard": True, "run_dir": __file__}, "file"),
        ({"guard": {"confrm": 1}}, "confrm"),
        ({"resume": "no/such/checkpoint"}, "checkpoint"),
        ({"clip_norm": "abc"}, "clip_norm is 'abc'"),
        ({"steps": math.inf}, "steps is inf"),
        ({"lr": math.inf}, "lr is inf"),
        ({"lr_floor": 3.0}, "lr_floor is 3"),
        ({"optimizer_options": {"momnts": "fp32"}}, "AdamWDW takes no momnts"),
        ({"callbacks": [print]}, "callbacks is a builtin"),
        ({"loss": "mse"}, "loss is a str"),
        ({"layout": 2}, "layout is a int"),
        ({"eval_every": 2}, "no held-out data"),
        ({"optimizer": "muon"}, "optimizer: Muon cannot be made"),
        ({"optimizer": "lbfgs"}, "optimizer: LBFGS cannot be made"),
        ({"guard": 3}, "guard is a int"),
    ],
)
def test_wrong_arguments_are_errors_that_name_them(make_trainer: Any, options: dict[str, Any], word: str) -> None:
    with pytest.raises(dw.DeepwellError, match=word):
        make_trainer(**options)


def test_a_plan_of_another_machine_is_not_run_silently(tiny_llama: Any, tmp_path: Path) -> None:
    model = tiny_llama()
    ir = dw.capture(model)
    plan = dw.autoplan(ir, hw="8xH100", seq_len=64, global_batch=64, gpus=8)
    engine = dw.compile(ir, plan=plan)
    with pytest.raises(ConfigError, match="8 GPUs"):
        dw.Trainer.from_engine(engine, dataloader="synthetic:128", run_dir=tmp_path)
    options = {"run_dir": tmp_path, "elastic": True, "steps": 1, "quiet": True}
    trainer = dw.Trainer.from_engine(engine, dataloader="synthetic:128", **options)
    assert trainer.layout.gpus == 1 and trainer.sizes.global_batch == 64
    assert "planned anew" in trainer.plan_note


@pytest.mark.parametrize("layout", [{"micro_batch": 1}, Layout(dp=1, micro_batch=2)])
def test_a_layout_says_its_micro_batch_unless_the_run_does(make_trainer: Any, layout: Any) -> None:
    own = layout["micro_batch"] if isinstance(layout, dict) else layout.micro_batch
    assert make_trainer(layout=layout, micro_batch=None).sizes.micro_batch == own
    assert make_trainer(layout=layout).sizes.micro_batch == 2
    assert make_trainer(layout={"sharding": "ddp"}, micro_batch=None, global_batch=2).sizes.micro_batch == 2


@pytest.mark.usefixtures("eager")
def test_a_longer_run_keeps_the_peak_of_the_learning_rate(make_trainer: Any) -> None:
    trainer = make_trainer(schedule="linear", warmup=0, steps=3)
    trainer.fit()
    trainer.fit(steps=6)
    rates = [event["lr"] for event in events_of(trainer) if event["kind"] == "step"]
    schedule = trainer.settings.learning_rate()
    assert rates[3:] == [trainer.settings.lr * schedule(step) for step in range(3, 6)]


@pytest.mark.usefixtures("eager")
def test_a_checkpoint_restores_a_trainer_and_never_a_bad_step(make_trainer: Any, tmp_path: Path) -> None:
    trainer = make_trainer()
    trainer.fit(stop_at=2)
    path = dw.save(trainer, tmp_path / "by-hand")
    other = make_trainer(folder="other")
    dw.load(path).restore(other)
    assert (other.step, other.cursor, other.tokens) == (2, 8, trainer.tokens)
    assert weights_of(other) == weights_of(trainer)
    trainer.last_loss = math.nan
    for save in (dw.save, dw.Trainer.save):
        with pytest.raises(NumericsError, match="nan"):
            save(trainer, tmp_path / "by-hand")


@pytest.mark.usefixtures("eager")
def test_settings_of_a_resumed_run_stand_and_changes_are_noted(make_trainer: Any) -> None:
    make_trainer(optimizer="adamw").fit(stop_at=2)
    changed = make_trainer(
        optimizer="adamw", weight_decay=0.7, beta2=0.5, lr=5e-3, optimizer_options={"amsgrad": False, "maximize": True}
    )
    assert changed.step == 2
    group = changed.optimizer.param_groups[0]
    assert (group["weight_decay"], group["betas"], group["maximize"]) == (0.7, (0.9, 0.5), True)
    noted = " ".join(changed.notes)
    assert "lr was 0.01, is 0.005; weight_decay was 0.1, is 0.7; beta2 was 0.95, is 0.5" in noted
    assert "maximize was False in the checkpoint and is True" in noted
    assert not any("was" in note for note in make_trainer(optimizer="adamw").notes)
    with pytest.raises(ConfigError, match="the checkpoint is of AdamW and this run has SGD"):
        make_trainer(optimizer="sgd")
    lower = make_trainer(optimizer="adamw_dw", precision="mxfp8")
    assert lower.step == 2 and "another precision policy" in lower.notes[-1]
    assert make_trainer(optimizer="adafactor", folder="another", steps=2).fit().step == 2


@pytest.mark.usefixtures("eager")
def test_data_that_the_model_cannot_read_is_named(make_trainer: Any) -> None:
    for token in (128, -1):
        with pytest.raises(ConfigError, match=f"token {token} of the batch is none of the model's 128"):
            make_trainer(data=torch.full((8, 16), token)).fit()
    nothing = [{"input_ids": torch.arange(16), "labels": torch.full((16,), -100)}]
    with pytest.raises(ConfigError, match="eval_dataloader: no token"):
        make_trainer(eval_dataloader=nothing).evaluate()


def test_a_full_disk_keeps_events_until_it_takes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = EventLog(tmp_path)
    file, written = log._file, []

    class Full:
        room = 30

        def write(self, data: bytes) -> int:
            if not self.room:
                raise OSError(28, "No space left on device")
            taken, self.room = data[: self.room], max(0, self.room - len(data))
            written.append(taken)
            return len(taken)

    log._file = Full()  # type: ignore[assignment]
    for step in range(3):
        log.write("step", step=step)
    assert capsys.readouterr().err.count("No space left") == 1
    log._file = file
    log.write("step", step=3)
    log.close()
    lines = (b"".join(written) + log.path.read_bytes()).decode().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2, 3]


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("ends_by", ["steps", "signal"])
def test_a_run_whose_last_save_fails_ends_with_an_error(
    ends_by: str, make_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = saver.run_job

    def full(job: Any, *how: Any) -> Any:
        if job.step != 2:
            raise OSError(28, "No space left on device")
        return written(job, *how)

    monkeypatch.setattr(saver, "run_job", full)

    class Stop(dw.Callback):
        def on_step(self, trainer: Any, event: Any) -> None:
            if ends_by == "signal" and event["step"] == 3:
                os.kill(os.getpid(), signal.SIGTERM)

    trainer = make_trainer(save_every=2, steps=4, callbacks=[Stop()])
    with pytest.raises(CheckpointError, match=r"ended at step \d, but the checkpoint of step \d failed: .*No space"):
        trainer.fit()
    end = events_of(trainer)[-1]
    assert end["exit"] == 1 and "No space left" in end["error"]
    monkeypatch.setattr(saver, "run_job", written)
    again = make_trainer(steps=4)  # there is room now
    assert again.step == 2 and again.fit().step == 4 and events_of(again)[-1]["exit"] == 0


@pytest.mark.usefixtures("eager")
def test_formats_of_step_ranges_are_in_the_record(tiny_llama: Any, tmp_path: Path) -> None:
    policy = PrecisionPolicy("bf16")
    policy.set_layer_precision("*up_proj", "mxfp8", steps=(2, 4))

    def changes(folder: str, *stops: int | None) -> list[tuple[int, str]]:
        for stop in stops:
            torch._dynamo.reset()
            trainer = dw.Trainer.from_engine(
                dw.compile(tiny_llama(), precision_policy=policy), dataloader="synthetic:128",
                run_dir=tmp_path / folder, seq_len=16, global_batch=2, steps=5, warmup=0, save_every=0, quiet=True,
            )  # fmt: skip
            trainer.fit(stop_at=stop)
        found = [event for event in events_of(trainer) if event["kind"] == "formats"]
        return [(event["step"], event["formats"]["model.layers.0.mlp.up_proj"]) for event in found]

    high, low = "bf16|bf16|bf16", "mxfp8|mxfp8|mxfp8"
    assert changes("whole", None) == [(0, high), (2, low), (4, high)]
    assert changes("parts", 3, None) == [(0, high), (2, low), (3, low), (4, high)]


@pytest.mark.usefixtures("eager")
def test_a_damaged_checkpoint_is_passed_over_and_noted(make_trainer: Any) -> None:
    make_trainer(save_every=2, async_save=False).fit(stop_at=4)
    files = [
        make_trainer().run_dir / "checkpoints" / f"step-0000000{step}" / "model-00000.safetensors" for step in (4, 2)
    ]
    damaged = bytearray(files[0].read_bytes())
    damaged[-1] ^= 1
    files[0].write_bytes(damaged)
    trainer = make_trainer()
    assert trainer.step == 2 and "step-00000004" in trainer.notes[-1] and "was changed" in trainer.notes[-1]
    assert trainer.fit().step == 6
    assert dw.load(trainer.run_dir).verify()
    with pytest.raises(CheckpointError, match=r"step-00000004/model-00000\.safetensors was changed"):
        make_trainer(resume=files[0].parent, folder="other")
