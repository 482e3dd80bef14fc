"""A Hugging Face folder of an engine's model: config.json, model.safetensors and generation_config.json."""

import hashlib
import shutil
from pathlib import Path
from typing import Any

from torch import nn

from deepwell.artifacts.export.artifact import Artifact
from deepwell.artifacts.export.manifest import count_formats
from deepwell.engine.engine import Engine
from deepwell.errors import ConfigError, UnsupportedError


def export_hf(engine: Engine, target: Path) -> Artifact:
    """Write what `from_pretrained` reads: the weights themselves, in their own dtype, nothing quantized."""
    model = engine.deepwell.model
    if not callable(getattr(model, "save_pretrained", None)) or not hasattr(model, "config"):
        raise UnsupportedError(
            f"format 'hf' is for Hugging Face models, this is a {type(model).__name__}; format='engine' takes any model"
        )
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        what = "a folder with files in it" if target.is_dir() else "a file"
        raise ConfigError(f"path: {target} is {what}; name a new folder")
    partial = target.with_name(f".{target.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        model.save_pretrained(partial, safe_serialization=True)
        if target.exists():
            target.rmdir()
        partial.replace(target)
    except OSError as error:
        raise ConfigError(f"path: cannot write {target}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return _artifact(engine, model, target)


def _artifact(engine: Engine, model: nn.Module, target: Path) -> Artifact:
    held = [(str(p.dtype).removeprefix("torch."), p.numel(), p.nbytes) for p in model.parameters()]
    files = [file for file in target.rglob("*") if file.is_file()]
    return Artifact(
        path=str(target),
        format="hf",
        bytes=sum(file.stat().st_size for file in files),
        sha256=hashlib.sha256((target / "config.json").read_bytes()).hexdigest(),
        model=about(engine, {"form": "transformers", "class": type(model).__name__}),
        formats=count_formats(held),
    )


def about(engine: Engine, form: dict[str, Any]) -> dict[str, Any]:
    """What an artifact says of its model."""
    ir, parameters = engine.deepwell.ir, engine.deepwell.model.parameters()
    return {
        "name": ir.name, "form": form["form"], "class": form.get("class", ""),
        "parameters": sum(p.numel() for p in parameters), "layers": ir.num_layers, "dtype": ir.dtype,
    }  # fmt: skip
