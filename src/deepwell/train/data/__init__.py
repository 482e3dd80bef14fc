"""Data for training: token files, a loader with one global cursor, and what turns text and datasets into both.

Names are loaded on first use: preparing token files needs no torch.
"""

import importlib
from typing import TYPE_CHECKING

_NAMES = {
    "Loader": "deepwell.train.data.loader",
    "IndexedLoader": "deepwell.train.data.loader",
    "StreamLoader": "deepwell.train.data.streams",
    "make_loader": "deepwell.train.data.make",
    "make_held_out_loader": "deepwell.train.data.make",
    "check_same_data": "deepwell.train.data.fingerprints",
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

if TYPE_CHECKING:
    from deepwell.train.data.documents import TextDocuments as TextDocuments
    from deepwell.train.data.fingerprints import check_same_data as check_same_data
    from deepwell.train.data.loader import IndexedLoader as IndexedLoader
    from deepwell.train.data.loader import Loader as Loader
    from deepwell.train.data.make import make_held_out_loader as make_held_out_loader
    from deepwell.train.data.make import make_loader as make_loader
    from deepwell.train.data.prepare import prepare_tokens as prepare_tokens
    from deepwell.train.data.samples import Samples as Samples
    from deepwell.train.data.streams import StreamLoader as StreamLoader
    from deepwell.train.data.synthetic import SyntheticSamples as SyntheticSamples
    from deepwell.train.data.token_files import TokenFolder as TokenFolder
    from deepwell.train.data.token_files import describe as describe
    from deepwell.train.data.windows import TokenSamples as TokenSamples
    from deepwell.train.feed import count_items as count_items


def __getattr__(name: str) -> object:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; names: {', '.join(_NAMES)}")
    return getattr(importlib.import_module(_NAMES[name]), name)
