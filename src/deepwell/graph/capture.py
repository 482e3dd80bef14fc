"""`dw.capture`: any nn.Module to the IR, through the traced graph where there is one, else by walking the modules."""

from __future__ import annotations

from typing import Any

from torch import nn

from deepwell.errors import CaptureError, ConfigError
from deepwell.graph.ir import IR
from deepwell.graph.lift import lift
from deepwell.graph.static import static_walk
from deepwell.graph.trace import TraceError, trace


def capture(model: nn.Module, example_inputs: Any = None) -> IR:
    """The IR of a live model, on any device, the meta device included.

    `example_inputs` is a tensor, a tuple of arguments or a dict of keyword arguments; Hugging Face models and modules
    that begin with a layer of known width need none. Where the forward cannot be traced, the module tree is read
    instead: `ir.source` is then "static" and `ir.notes` say why. Raises ConfigError if `model` is no nn.Module and
    CaptureError, naming the module, where neither way can read it.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is a {type(model).__name__}; dw.capture takes a torch.nn.Module")
    model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper: the model inside is the one to read
    try:
        traced = trace(model, example_inputs)
    except TraceError as error:
        return static_walk(model, example_inputs, reasons=tuple(str(attempt) for attempt in error.attempts))
    except CaptureError as error:
        return static_walk(model, example_inputs, reasons=(str(error),))
    return lift(model, traced)
