"""`engine.generate`: Hugging Face's own generation, its forwards run by the engine.

`generate` is a method of the model and calls the model. While it runs, the model's forward is the engine's, so that
what is generated is what the engine computes, formats included.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepwell.engine.engine import Engine


def generate(engine: Engine, *args: Any, **kwargs: Any) -> Any:
    """The model's `generate` with the engine's forward."""
    model = engine.model
    own = model.forward
    had_own = "forward" in model.__dict__

    @functools.wraps(own)  # generation reads the forward's signature
    def forward(*inputs: Any, **named: Any) -> Any:
        put_back()  # the engine compiles the model's own forward
        try:
            return engine(*inputs, **named)
        finally:
            model.__dict__["forward"] = forward

    def put_back() -> None:
        if had_own:
            model.__dict__["forward"] = own
        else:
            model.__dict__.pop("forward", None)

    model.__dict__["forward"] = forward
    try:
        return model.generate(*args, **kwargs)
    finally:
        put_back()
