"""Hugging Face families with random weights as models of the race: `hf:NAME[:layers]`.

NAME is one of the widths in `widths.json` (the real model's sizes, fewer layers), a local config.json or the folder
that holds one, or a model type of transformers, which then has the defaults of its config class. Nothing is downloaded.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deepwell.errors import ConfigError
from deepwell.hardware.codec import packaged_json

PREFIX = "hf:"
# Batch and length of a family that is not in the table.
_BATCH, _SEQ_LEN = 2, 4096
# Names of the number of layers in a config.json, first come first served.
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


# Sizes of real models without dropout, as models of today are trained and so that losses can be compared; the layers
# that the race keeps of each, and the batch of one step.
WIDTHS: dict[str, dict[str, Any]] = packaged_json("deepwell.bench", "widths.json")


@dataclass(frozen=True, kw_only=True)
class StepModel(ABC):
    """What the race asks of any model: its size, its memory, and random tokens for one step."""

    name: str
    batch: int
    seq_len: int

    @property
    @abstractmethod
    def vocab(self) -> int: ...

    @abstractmethod
    def on_meta(self) -> Any:
        """The model without memory."""

    @property
    def tokens(self) -> int:
        return self.batch * self.seq_len

    @cached_property
    def num_params(self) -> int:
        return sum(parameter.numel() for parameter in self.on_meta().parameters())

    def resident_bytes(self) -> int:
        """bf16 weights and two bf16 moments: what stays between steps."""
        return 6 * self.num_params

    def example(self, device: str) -> tuple[Tensor, Tensor]:
        """Random tokens and the tokens after them."""
        generator = torch.Generator().manual_seed(0)
        data = torch.randint(0, self.vocab, (self.batch, self.seq_len + 1), generator=generator).to(device)
        return data[:, :-1].contiguous(), data[:, 1:].contiguous()


@dataclass(frozen=True, kw_only=True)
class FamilyModel(StepModel):
    settings: Any  # transformers' config

    @property
    def vocab(self) -> int:
        found: int = self.settings.get_text_config().vocab_size
        return found

    @cached_property
    def head(self) -> str:
        net = self.on_meta()
        output = net.get_output_embeddings()
        return next((path for path, module in net.named_modules() if module is output), "lm_head")

    def with_layers_checkpointed(self, count: int) -> FamilyModel:
        """Itself for a count of 0. Raises ConfigError for any other."""
        if count:
            raise ConfigError(f"--checkpoint-layers: {self.name} is Hugging Face's own model; leave it out")
        return self

    def small(self, seq_len: int) -> FamilyModel:
        """The same model on one short sequence and without dropout, whose random numbers nobody shares."""
        settings = deepcopy(self.settings)
        for key, value in vars(settings).items():
            if isinstance(value, float) and ("dropout" in key or key.endswith("pdrop")):
                setattr(settings, key, 0.0)
        return replace(self, settings=settings, batch=1, seq_len=min(seq_len, self.seq_len))

    def on_meta(self) -> Any:
        return self._build("meta")

    def build(self, device: str) -> nn.Module:
        """The model in bf16 on the device, the same weights for everybody who builds it."""
        torch.manual_seed(0)
        net: nn.Module = self._build(device)
        return net

    def _build(self, device: str) -> Any:
        transformers = need_transformers()
        with torch.device(device):
            try:
                return transformers.AutoModelForCausalLM.from_config(self.settings, dtype=torch.bfloat16)
            except ValueError as error:
                kind = self.settings.model_type
                raise ConfigError(f"--model {self.name}: {kind} is no causal language model: {error}") from error

    def capture_inputs(self, example: tuple[Tensor, Tensor]) -> Any:
        return {"input_ids": example[0], "labels": example[0]}

    def loss_of(self, step_fn: Callable[..., Any], example: tuple[Tensor, Tensor]) -> Tensor:
        loss: Tensor = step_fn(input_ids=example[0], labels=example[0]).loss
        return loss


def family_model(name: str, *, batch: int | None = None, seq_len: int | None = None) -> FamilyModel:
    """The model that `hf:NAME[:layers]` means. Raises ConfigError where it means none."""
    wanted, layers = name.removeprefix(PREFIX), None
    head, colon, tail = wanted.rpartition(":")
    if colon and tail.isdigit():
        wanted, layers = head, int(tail)
    if layers == 0 or not wanted:
        raise ConfigError(f"--model is {name!r}; it is hf:NAME or hf:NAME:layers, such as hf:llama3-8b:4")
    for option, value in (("--batch", batch), ("--seq-len", seq_len)):
        if value is not None and value < 1:
            raise ConfigError(f"{option} is {value}; it is at least 1")
    width = WIDTHS.get(wanted.lower())
    if width is not None:
        # Positions up to the row's length at least, where the width does not say how many.
        key = "n_positions" if width["model_type"] == "gpt2" else "max_position_embeddings"
        sizes = {key: max(width["seq_len"], 1024), **width["settings"]}
        settings = _settings(width["model_type"], sizes, layers or width["layers"])
        batch, seq_len = batch or width["batch"], seq_len or width["seq_len"]
    elif Path(wanted).exists():
        settings = _from_file(Path(wanted), layers)
        wanted = Path(wanted).parent.name if Path(wanted).is_file() else Path(wanted).name
    else:
        settings = _settings(wanted, {}, layers)
    settings.use_cache = False
    limit = getattr(settings.get_text_config(), "max_position_embeddings", None) or _SEQ_LEN
    shown = f"{PREFIX}{wanted}" + (f":{layers}" if layers else "")
    return FamilyModel(name=shown, settings=settings, batch=batch or _BATCH, seq_len=seq_len or min(_SEQ_LEN, limit))


def _settings(model_type: str, values: Mapping[str, Any], layers: int | None) -> Any:
    """The config of a model type. Sizes by layer follow from the number of layers, so it is there from the start."""
    transformers = need_transformers()
    if model_type not in transformers.CONFIG_MAPPING:
        raise ConfigError(
            f"--model hf:{model_type} is no built-in width ({', '.join(WIDTHS)}), no file and no model type of "
            f"transformers {transformers.__version__}"
        )
    kind = transformers.CONFIG_MAPPING[model_type]
    number = {} if layers is None else {kind.attribute_map.get("num_hidden_layers", "num_hidden_layers"): layers}
    return kind(**values, **number)


def _from_file(path: Path, layers: int | None) -> Any:
    path = path / "config.json" if path.is_dir() else path
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        model_type = data.pop("model_type")
    except (OSError, json.JSONDecodeError, KeyError, AttributeError) as error:
        raise ConfigError(f"--model: {path} is no config.json with a model_type: {error}") from error
    if layers is not None:
        key = next((key for key in _LAYERS if key in data), _LAYERS[0])
        whole = data.pop(key, None)
        # What is listed for each layer is cut along with them.
        data = {k: v[:layers] if isinstance(v, list) and len(v) == whole else v for k, v in data.items()}
    for unused in ("architectures", "transformers_version", "dtype", "torch_dtype", "auto_map"):
        data.pop(unused, None)
    return _settings(model_type, data, layers)


def need_transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ConfigError("the Hugging Face models need transformers: pip install transformers") from error
    return transformers
