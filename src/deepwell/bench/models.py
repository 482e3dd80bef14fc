"""The models of the race, by name: Llama shapes as a plain decoder or as Hugging Face builds them, with their batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from deepwell.bench.families import PREFIX, WIDTHS, FamilyModel, StepModel, family_model, need_transformers
from deepwell.bench.llama import Llama, LlamaConfig
from deepwell.errors import ConfigError

_8B = LlamaConfig(width=4096, num_heads=32, num_kv_heads=8, hidden=14336, num_layers=4, vocab=128256)
_1B = LlamaConfig(width=2048, num_heads=32, num_kv_heads=8, hidden=8192, num_layers=16, vocab=128256)
_768 = LlamaConfig(width=768, num_heads=12, num_kv_heads=12, hidden=3072, num_layers=12, vocab=50304)
_TINY = LlamaConfig(width=64, num_heads=4, num_kv_heads=2, hidden=192, num_layers=2, vocab=512, max_positions=256)


@dataclass(frozen=True, kw_only=True)
class RaceModel(StepModel):
    config: LlamaConfig
    is_huggingface: bool = False

    @property
    def vocab(self) -> int:
        return self.config.vocab

    @property
    def head(self) -> str:
        return "lm_head" if self.is_huggingface else "head"

    def small(self, seq_len: int) -> RaceModel:
        """The same model on one short sequence."""
        return replace(self, batch=1, seq_len=min(seq_len, self.seq_len))

    def on_meta(self) -> nn.Module:
        # Hugging Face's has parameters of the same shapes.
        with torch.device("meta"):
            return Llama(self.config)

    def with_layers_checkpointed(self, count: int) -> RaceModel:
        """The same model whose first layers keep only their input. Raises ConfigError for Hugging Face's."""
        if count and self.is_huggingface:
            raise ConfigError(f"--checkpoint-layers: {self.name} is Hugging Face's own model; leave it out")
        if not 0 <= count <= self.config.num_layers:
            raise ConfigError(f"--checkpoint-layers is {count}; {self.name} has {self.config.num_layers} layers")
        return replace(self, config=replace(self.config, checkpointed_layers=count))

    def build(self, device: str) -> nn.Module:
        """The model in bf16 on the device, the same weights for everybody who builds it."""
        torch.manual_seed(0)
        with torch.device(device):
            if self.is_huggingface:
                return _huggingface(self.config)
            # Made in bf16: in fp32 first, the largest would need twice its memory for a moment.
            before = torch.get_default_dtype()
            torch.set_default_dtype(torch.bfloat16)
            try:
                return Llama(self.config).init_weights().bfloat16()
            finally:
                torch.set_default_dtype(before)

    def capture_inputs(self, example: tuple[Tensor, Tensor]) -> Any:
        return {"input_ids": example[0], "labels": example[0]} if self.is_huggingface else example

    def loss_of(self, step_fn: Callable[..., Any], example: tuple[Tensor, Tensor]) -> Tensor:
        if self.is_huggingface:
            loss: Tensor = step_fn(input_ids=example[0], labels=example[0]).loss
            return loss
        return step_fn(*example)


def _huggingface(config: LlamaConfig) -> Any:
    transformers = need_transformers()
    settings = transformers.LlamaConfig(
        hidden_size=config.width,
        intermediate_size=config.hidden,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        vocab_size=config.vocab,
        max_position_embeddings=config.max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=False,
        use_cache=False,
    )
    return transformers.AutoModelForCausalLM.from_config(settings, dtype=torch.bfloat16)


MODELS = {
    model.name: model
    for model in (
        RaceModel(name="8b-4l", config=_8B, batch=2, seq_len=8192),
        RaceModel(name="hf-8b-4l", config=_8B, batch=2, seq_len=8192, is_huggingface=True),
        RaceModel(name="1b-16l", config=_1B, batch=2, seq_len=8192),
        RaceModel(name="768-12l", config=_768, batch=32, seq_len=1024),
        RaceModel(name="llama3-8b", config=replace(_8B, num_layers=32), batch=2, seq_len=8192),
        RaceModel(name="tiny", config=_TINY, batch=2, seq_len=64),
        RaceModel(name="hf-tiny", config=_TINY, batch=2, seq_len=64, is_huggingface=True),
    )
}


def race_model(name: str, *, batch: int | None = None, seq_len: int | None = None) -> RaceModel | FamilyModel:
    """The model of that name, on a batch of its own unless one is given. Raises ConfigError where there is none."""
    if name.startswith(PREFIX):
        return family_model(name, batch=batch, seq_len=seq_len)
    if name not in MODELS:
        families = f"{PREFIX}NAME[:layers], such as {', '.join(PREFIX + width for width in list(WIDTHS)[:3])}"
        raise ConfigError(f"--model is {name!r}; the race has {', '.join(MODELS)} and {families}")
    model = MODELS[name]
    return replace(model, batch=batch or model.batch, seq_len=seq_len or model.seq_len)
