"""Trainer and accelerate with an engine, where docs/ecosystem.md shows less: exact resume, and two real processes."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import deepwell as dw

pytest.importorskip("accelerate")
pytest.importorskip("datasets")
transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 64}
TOKENS = torch.randint(0, 64, (16, 12), generator=torch.Generator().manual_seed(0))


def make_trainer(folder, steps, model):
    from datasets import Dataset

    data = Dataset.from_dict({"input_ids": TOKENS.tolist(), "labels": TOKENS.tolist()})
    arguments = transformers.TrainingArguments(
        str(folder),
        max_steps=4,
        save_steps=2,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        logging_steps=1,
        report_to=[],
        label_names=["labels"],
        use_cpu=True,
        seed=3,
    )
    made = transformers.Trainer(model, arguments, train_dataset=data, eval_dataset=data)
    if steps < 4:
        made.add_callback(_StopAt(steps))
    return made


class _StopAt(transformers.TrainerCallback):
    def __init__(self, steps):
        self.steps = steps

    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = state.global_step >= self.steps
        control.should_save = control.should_save or control.should_training_stop


def new_model():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


@pytest.mark.slow
def test_a_resumed_trainer_ends_where_an_uninterrupted_one_does(tmp_path):
    whole = make_trainer(tmp_path / "whole", 4, dw.compile(new_model(), precision="bf16"))
    whole.train()
    eager = make_trainer(tmp_path / "eager", 4, new_model())
    eager.train()
    make_trainer(tmp_path / "parts", 2, dw.compile(new_model(), precision="bf16")).train()
    torch.manual_seed(9)  # other weights: the checkpoint's count
    resumed = make_trainer(
        tmp_path / "parts", 4, dw.compile(transformers.LlamaForCausalLM(new_model().config), precision="bf16")
    )
    resumed.train(resume_from_checkpoint=True)
    wanted = whole.model.state_dict()
    assert wanted.keys() == eager.model.state_dict().keys()
    for name, value in resumed.model.state_dict().items():
        assert torch.equal(value, wanted[name]), name
        torch.testing.assert_close(value, eager.model.state_dict()[name], rtol=2e-3, atol=2e-4)
    assert resumed.evaluate()["eval_loss"] == pytest.approx(eager.evaluate()["eval_loss"], rel=1e-3)


SCRIPT = """
import sys
import torch, transformers
from accelerate import Accelerator
import deepwell as dw

torch.set_num_threads(1)
torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
engine = dw.compile(transformers.LlamaForCausalLM(transformers.LlamaConfig(**{sizes})), precision="bf16")
optimizer = dw.AdamWDW(engine.parameters(), lr=1e-2, moments="fp32")
engine, optimizer = accelerator.prepare(engine, optimizer)
tokens = torch.tensor({tokens}).chunk(accelerator.num_processes)[accelerator.process_index]
for _ in range(3):
    accelerator.backward(engine(input_ids=tokens, labels=tokens).loss)
    optimizer.step()
    optimizer.zero_grad()
if accelerator.is_main_process:
    torch.save(accelerator.unwrap_model(engine).state_dict(), sys.argv[1])
accelerator.end_training()
"""


def run_processes(count, folder):
    script = folder / "script.py"
    script.write_text(SCRIPT.format(sizes=SIZES, tokens=TOKENS.tolist()))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    source = str(Path(dw.__file__).parents[1])
    shared = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    if count > 1:
        shared |= {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    running = []
    try:
        for rank in range(count):
            env = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} if count > 1 else shared
            command = [sys.executable, str(script), str(folder / f"{count}.pt")]
            running.append(subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True))
        for process in running:
            _, errors = process.communicate(timeout=300)
            assert process.returncode == 0, errors[-3000:]
    finally:
        for process in running:
            process.kill()
            process.wait()
    return torch.load(folder / f"{count}.pt", weights_only=True)


@pytest.mark.slow
def test_accelerate_trains_alike_in_one_process_and_in_two(tmp_path):
    alone, both = run_processes(1, tmp_path), run_processes(2, tmp_path)
    before = new_model().state_dict()
    assert alone.keys() == both.keys() == before.keys()
    for name, value in both.items():
        torch.testing.assert_close(value, alone[name], rtol=2e-3, atol=2e-4)
        assert not torch.equal(value, before[name]), name
