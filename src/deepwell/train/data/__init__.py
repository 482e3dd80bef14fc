"""Data for training: token files, a loader with one global cursor, and what turns text and datasets into both.

Names are loaded on first use: preparing token files needs no torch.
"""

import importlib
from typing import Any

_NAMES = {
    "Loader": "deepwell.train.data.loader",
    "check_same_data": "deepwell.train.data.loader",
    "IndexedLoader": "deepwell.train.data.loader",
    "StreamLoader": "deepwell.train.data.streams",
    "make_loader": "deepwell.train.data.make",
    "make_held_out_loader": "deepwell.train.data.make",
    "Samples": "deepwell.train.data.samples",
    "count_items": "deepwell.train.feed",
    "TokenSamples": "deepwell.train.data.windows",
    "SyntheticSamples": "deepwell.train.data.synthetic",
    "TokenFolder": "deepwell.train.data.token_files",
    "prepare_tokens": "deepwell.train.data.prepare",
    "TextDocuments": "deepwell.train.data.documents",
    "describe": "deepwell.train.data.token_files",
}
__all__ = list(_NAMES)


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; names: {', '.join(_NAMES)}")
    return getattr(importlib.import_module(_NAMES[name]), name)
