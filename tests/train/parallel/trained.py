"""What the tests of the trainer on several ranks run in each process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from cases import make_model
from transformers import LlamaConfig, LlamaForCausalLM

import deepwell as dw

VOCAB = 128


@dataclass(frozen=True, kw_only=True)
class TrainerCase:
    """One call of `fit`: on which layout, in which folder, up to which step."""

    folder: str
    layout: Mapping[str, Any] = field(default_factory=dict)
    model: str = ""  # of `cases.make_model`; else a small Llama with fewer key heads
    precision: str = "bf16"
    optimizer: str = "adamw_dw"
    stop_at: int | None = None
    is_eager: bool = False  # what the trainer does is asked, not what is compiled
    options: Mapping[str, Any] = field(default_factory=dict)


def fit(case: TrainerCase) -> dict[str, Any]:
    """The events of a run, and where it resumed."""
    with torch.compiler.set_stance("force_eager" if case.is_eager else "default"):
        return _fit(case)


def _fit(case: TrainerCase) -> dict[str, Any]:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": 64, "use_cache": False,
    }  # fmt: skip
    model = make_model(case.model) if case.model else LlamaForCausalLM(LlamaConfig(**sizes))
    engine = dw.compile(model, precision=case.precision)
    trainer = dw.Trainer.from_engine(
        engine, optimizer=case.optimizer, dataloader=f"synthetic:{VOCAB}", run_dir=case.folder, quiet=True, steps=6,
        seq_len=32, global_batch=8, micro_batch=2, lr=1e-2, warmup=0, save_every=0, layout=case.layout or None,
        **case.options,
    )  # fmt: skip
    began = trainer.step
    trainer.fit(stop_at=case.stop_at)
    trainer.close()
    text = (Path(case.folder) / "events.jsonl").read_text()
    events = [json.loads(line) for line in text.splitlines()]
    return {"began": began, "events": events, "samples": trainer.watch.num_samples}
