"""Whether a resumed run reads the data that it read before."""

from collections.abc import Mapping
from typing import Any

from deepwell.errors import ConfigError

# Where one of these differs, the cursor points at other samples.
_DECIDE = (
    "kind", "seq_len", "samples", "seed", "shuffle", "order", "sha256", "tokens", "documents", "vocab",
    "tokenizer_sha256", "tokenizer", "pattern",
)  # fmt: skip
# These may differ without meaning anything, or on purpose.
_WARN = ("type", "dataset", "first_sample", "document_mask")


def check_same_data(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Compare two loaders' fingerprints: warnings where the data may be other, ConfigError where it is.

    A path may differ: data that was moved is the same data.
    """
    if not saved:
        return ["data: the checkpoint does not say what data the run read; it is taken to be the same"]
    differ = [_said(name, saved, now) for name in _DECIDE if saved.get(name) != now.get(name)]
    if differ:
        raise ConfigError(
            f"data: the run was saved with other data ({'; '.join(differ)}), so its cursor means other samples: give "
            "the same data and settings, or start a new run"
        )
    return [f"data: {_said(name, saved, now)}" for name in _WARN if saved.get(name) != now.get(name)]


def _said(name: str, saved: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    return f"{name} was {_short(saved.get(name))}, is {_short(now.get(name))}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 20 else f"{text[:16]}..."
