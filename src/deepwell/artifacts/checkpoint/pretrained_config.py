"""A Hugging Face model's configuration as the files that from_pretrained reads."""

import json
from typing import Any

from torch import nn


def config_files(model: nn.Module) -> dict[str, bytes]:
    """config.json and generation_config.json of a model that has them, by name; empty for any other model."""
    config, generation = (_as_dict(getattr(model, name, None)) for name in ("config", "generation_config"))
    if config is None or "model_type" not in config:
        return {}
    config["architectures"] = [type(model_of(model)).__name__.removeprefix("FSDP")]
    dtypes = {str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.is_floating_point()}
    if len(dtypes) == 1:
        config["dtype"] = dtypes.pop()
    files = {"config.json": config} | ({"generation_config.json": generation} if generation is not None else {})
    return {name: (json.dumps(value, indent=2, sort_keys=True) + "\n").encode() for name, value in files.items()}


def model_of(model: nn.Module) -> nn.Module:
    """The model behind an engine; any other module is itself."""
    found: nn.Module = getattr(model.__dict__.get("deepwell"), "model", model)
    return found


def _as_dict(config: Any) -> dict[str, Any] | None:
    """A configuration as JSON, through its own writer, which knows what of it can be written."""
    to_json = getattr(config, "to_json_string", None)
    if to_json is None:
        return None
    value = json.loads(to_json())
    return value if isinstance(value, dict) else None
