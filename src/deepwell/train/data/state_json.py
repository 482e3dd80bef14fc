"""The state of somebody's data loader as JSON: tensors and bytes too, and never a pickle."""

import base64
from typing import Any

import numpy as np
import torch

from deepwell.errors import ConfigError

_MARK = "__deepwell__"


def encode_state(value: Any) -> Any:
    """JSON of a state_dict. Raises ConfigError where something in it has no form in JSON."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [encode_state(item) for item in value]
    if isinstance(value, tuple):
        return {_MARK: "tuple", "items": [encode_state(item) for item in value]}
    if isinstance(value, dict):
        return {_MARK: "dict", "items": [[encode_state(key), encode_state(item)] for key, item in value.items()]}
    if isinstance(value, bytes):
        return {_MARK: "bytes", "data": base64.b64encode(value).decode()}
    kind, data = "array", value
    if isinstance(value, torch.Tensor) and not value.is_floating_point():
        kind, data = "tensor", value.detach().cpu().numpy()
    if isinstance(data, np.ndarray) and (kind == "tensor" or data.dtype.kind in "iufb"):
        text = base64.b64encode(data.tobytes()).decode()
        return {_MARK: kind, "type": str(data.dtype), "shape": list(data.shape), "data": text}
    raise ConfigError(f"data: its state_dict holds a {type(value).__name__}, which JSON cannot keep")


def decode_state(value: Any) -> Any:
    """What `encode_state` was given."""
    if isinstance(value, list):
        return [decode_state(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value[_MARK]
    if kind == "tuple":
        return tuple(decode_state(item) for item in value["items"])
    if kind == "dict":
        return {decode_state(key): decode_state(item) for key, item in value["items"]}
    data = base64.b64decode(value["data"])
    if kind == "bytes":
        return data
    array = np.frombuffer(data, dtype=np.dtype(value["type"])).reshape(value["shape"]).copy()
    return torch.from_numpy(array) if kind == "tensor" else array
