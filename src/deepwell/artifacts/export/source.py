"""A model to export from a folder: a Hugging Face folder, or a checkpoint of a Hugging Face model."""

import json
from pathlib import Path
from typing import Any, NoReturn

from torch import nn

from deepwell.artifacts.checkpoint.public import Checkpoint, load
from deepwell.artifacts.export.hf_model import build_hf, model_class
from deepwell.errors import CheckpointError, ConfigError
from deepwell.planner.plan import Plan
from deepwell.precision.policy import PrecisionPolicy


def model_from(path: Path) -> tuple[nn.Module, PrecisionPolicy | None, Plan | None]:
    """(the model in evaluation mode, its policy, its plan). Raises ConfigError or CheckpointError."""
    if not path.is_dir():
        raise ConfigError(f"{path} is no folder; pass a Hugging Face folder or a checkpoint")
    if (path / "config.json").is_file() and not (path / "state.json").is_file():
        return _from_hugging_face(path), None, None
    checkpoint = load(path)
    name, config = _facts(checkpoint)

    def refuse(reason: str) -> NoReturn:
        raise CheckpointError(f"{checkpoint.path}: {reason}")

    model = build_hf({"class": name, "config": config, "attention": {}, "experts": {}}, refuse)
    weights = checkpoint.weights()
    for name, parameter in model.named_parameters():
        if name in weights:
            parameter.data = parameter.data.to(weights[name].dtype)
    checkpoint.restore(model)
    return model.eval(), checkpoint.policy, checkpoint.plan


def _facts(checkpoint: Checkpoint) -> tuple[str, dict[str, Any]]:
    """(class, config) of the Hugging Face model that a checkpoint holds."""
    found = checkpoint.meta.get("model")
    facts = found if isinstance(found, dict) else {}
    name, config = facts.get("class"), facts.get("config")
    if (checkpoint.path / "config.json").is_file():
        config = _read(checkpoint.path / "config.json")
        name = _architecture(config) or name
    if not isinstance(config, dict) or not isinstance(name, str):
        raise ConfigError(
            f"{checkpoint.path} holds the weights of {facts.get('class', 'a model')}, not its code: build the model, "
            f"dw.load({str(checkpoint.path)!r}).restore(model), dw.compile(model) and dw.export the engine"
        )
    return name, {key: value for key, value in config.items() if key not in ("auto_map", "quantization_config")}


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


def _architecture(config: Any) -> str:
    names = config.get("architectures") if isinstance(config, dict) else None
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""


def _from_hugging_face(path: Path) -> nn.Module:
    import transformers

    name = _architecture(_read(path / "config.json"))
    found: Any = model_class(name)
    if found is None:
        raise ConfigError(
            f"{path}: its config.json names {name or 'no class'} under architectures, which transformers "
            f"{transformers.__version__} does not have; code from the folder is never run"
        )
    try:
        model: nn.Module = found.from_pretrained(path, local_files_only=True, use_safetensors=True, dtype="auto")
    except (OSError, ValueError, TypeError, KeyError, RuntimeError, AttributeError, ImportError) as error:
        raise ConfigError(f"{path}: transformers cannot load it: {str(error).splitlines()[0]}") from error
    return model.eval()
