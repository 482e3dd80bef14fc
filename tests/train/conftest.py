"""Tiny models and data for the trainer's tests."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import deepwell as dw

VOCAB = 128


def _tiny_llama(seed: int = 0, **changes: Any) -> Any:
    """A Hugging Face Llama of two layers in fp32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": 128, "use_cache": False,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **changes}))


@pytest.fixture
def tiny_llama() -> Callable[..., Any]:
    return _tiny_llama


@pytest.fixture
def eager() -> Iterator[None]:
    """Steps run as the model is written: of a test that asks what is done with an engine, not what it compiles."""
    with torch.compiler.set_stance("force_eager"):
        yield


@cache
def _captured(**changes: Any) -> dw.IR:
    return dw.capture(_tiny_llama(**changes))


@pytest.fixture
def make_trainer(tmp_path: Path) -> Callable[..., dw.Trainer]:
    """A trainer of a tiny Llama on synthetic tokens; `changes` are of its config, others `Trainer.from_engine`'s."""

    def make(
        precision: str = "bf16", folder: str = "run", data: Any = None, changes: Any = None, **options: Any
    ) -> dw.Trainer:
        torch._dynamo.reset()
        ir = _captured(**(changes or {})).attach(_tiny_llama(**(changes or {})))
        engine = dw.compile(ir, precision=precision)
        settings = {
            "seq_len": 16, "global_batch": 4, "micro_batch": 2, "steps": 6, "lr": 1e-2, "warmup": 2, "save_every": 0,
            "quiet": True, "run_dir": tmp_path / folder,
        }  # fmt: skip
        data = f"synthetic:{VOCAB}" if data is None else data
        return dw.Trainer.from_engine(engine, dataloader=data, **{**settings, **options})

    return make
