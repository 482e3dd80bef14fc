"""`dw.capture`: any nn.Module to the IR, through the traced graph where there is one, else by walking the modules."""

from typing import Any

from torch import nn

from deepwell.errors import CaptureError, ConfigError
from deepwell.graph.ir import IR
from deepwell.graph.lift import lift
from deepwell.graph.static import check_readable, static_walk
from deepwell.graph.trace import Traced, TraceError, trace


def capture(model: nn.Module, example_inputs: Any = None) -> IR:
    """The IR of a live model, on any device, the meta device included.

    `example_inputs` is a tensor, a tuple of arguments or a dict of keyword arguments; Hugging Face models and modules
    that begin with a layer of known width need none. Where the forward cannot be traced, the module tree is read
    instead: `ir.source` is then "static" and `ir.notes` say why. Raises ConfigError if `model` is no nn.Module and
    CaptureError, naming the module, where neither can read it.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is a {type(model).__name__}; dw.capture takes a torch.nn.Module")
    model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper: the model inside is the one to read
    check_readable(model)
    try:
        traced = trace(model, example_inputs)
    except TraceError as error:
        return static_walk(model, example_inputs, reasons=tuple(str(attempt) for attempt in error.attempts))
    except CaptureError as error:
        return static_walk(model, example_inputs, reasons=(str(error),))
    branches = taken_by_value(model, traced) if traced.specialized else ()
    if branches:
        reasons = (*map(str, traced.attempts), f"the forward decides by values whether {', '.join(branches)} run")
        return static_walk(model, example_inputs, reasons=reasons)
    return lift(model, traced)


def taken_by_value(model: nn.Module, traced: Traced) -> tuple[str, ...]:
    """Linears that a recorded run left out although the module that holds them ran: another example may need them."""
    read = {node.name for node in traced.graph.nodes if node.users}
    used = {name for placeholder in traced.placeholders if placeholder.node in read for name in placeholder.names}
    ran = {path for node in traced.graph.nodes for path in ancestors(str(node.meta.get("module_path", "")))}
    left: list[str] = []
    for path, module in model.named_modules():
        is_linear = isinstance(module, nn.Linear) and f"{path}.weight" not in used
        if is_linear and path.rpartition(".")[0] in ran and path not in ran:
            left.append(path)
    return tuple(left)


def ancestors(path: str) -> list[str]:
    parts = path.split(".") if path else []
    return ["", *(".".join(parts[: i + 1]) for i in range(len(parts)))]
