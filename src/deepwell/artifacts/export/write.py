"""`dw.export`: an engine as one file that loads without its user's code, or as a Hugging Face folder."""

import os
import platform
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from deepwell import __version__
from deepwell.artifacts.export import forms
from deepwell.artifacts.export.container import TENSORS, Writer
from deepwell.artifacts.export.graph.form import capture_call
from deepwell.artifacts.export.graph.model import build_graph
from deepwell.artifacts.export.hf_model import generation_of, hf_form
from deepwell.artifacts.export.manifest import (
    KIND,
    SCHEMA,
    Artifact,
    ExportedTensor,
    count_formats,
    inspect,
    tensors_of,
)
from deepwell.artifacts.export.same_engine import options_of, pins_of, rebuilt
from deepwell.artifacts.plain_json import json_text
from deepwell.artifacts.tensor_file import EXPORTED, tensor_pieces
from deepwell.engine.engine import Engine
from deepwell.errors import ConfigError, DeepwellError, UnsupportedError
from deepwell.files import hash_file, whole_file
from deepwell.graph.example_inputs import ExampleInputs

FORMATS = ("engine", "hf")


def export(
    engine: Engine,
    path: str | os.PathLike[str],
    *,
    format: str = "engine",  # noqa: A002 - the word users know
    example_inputs: Any = None,
) -> Artifact:
    """Write the engine to `path`: one file ("engine"), or a folder that `from_pretrained` reads ("hf").

    In a file, weights whose forward runs in a low-precision format are stored as its codes and scales, others in their
    own dtype; `dw.load_engine` runs it without the user's code. `example_inputs` is one batch as the model takes it (a
    dict of keyword arguments, a tuple or a tensor), guessed where it can be: with it the file is checked before it is
    written, and models that are not transformers' own become a graph of that call. Raises ConfigError on a wrong
    argument and UnsupportedError where a model has no form without code.
    """
    if not isinstance(engine, Engine):
        raise ConfigError(f"engine is a {type(engine).__name__}; pass what dw.compile(...) returned")
    check_format(format)
    target = Path(path)
    if format == "hf":
        return _export_hf(engine, target)
    if target.is_dir():
        raise ConfigError(f"path: {target} is a folder; an engine is one file, e.g. {target / 'model.engine'}")
    if not target.parent.is_dir():
        raise ConfigError(f"path: the folder {target.parent} is not there; make it first")
    check_whole(engine.deepwell.model)
    with forms.without_regions(engine.deepwell.model):
        return _export(engine, target, example_inputs)


def check_format(name: str) -> None:
    """Raise ConfigError where there is no such format of an export."""
    if name not in FORMATS:
        raise ConfigError(f"format is {name!r}; it takes {' or '.join(FORMATS)}")


def _export(engine: Engine, target: Path, example_inputs: Any) -> Artifact:
    own = engine.deepwell
    calls = forms.runnable(own.model, forms.example_calls(own.model, example_inputs))
    form, constants, notes = model_form(own.model, calls)
    options, pins = options_of(engine), pins_of(engine)
    reference = rebuilt(own.ir, own.policy, pins, options, step=own.step, is_cuda=own.device_type == "cuda")
    choice = forms.choose_forms(reference, calls if reads_head(reference) else calls[:1])
    tensors, entries, tied = collect(own.model, choice, constants)
    members = {"model.json": form, "ir.json": own.ir.to_dict(), "policy.json": own.policy.to_dict()}
    if own.plan is not None:
        members["plan.json"] = own.plan.to_dict()
    generation = generation_of(own.model) if form["form"] == "transformers" else None
    if generation is not None:
        members["generation.json"] = generation
    texts = {name: json_text(data) for name, data in members.items()}
    manifest = {
        "kind": KIND,
        "schema": SCHEMA,
        "model": _about(engine, form),
        "versions": _versions(),
        "device": own.device_name,
        "step": own.step,
        "options": options,
        "pins": pins,
        "tensors": {name: entry.to_dict() for name, entry in entries.items()},
        "tied": tied,
        "checked": choice.is_checked,
        "notes": notes + _notes(engine, choice),
    }
    try:
        with whole_file(target, synced=True) as partial, partial.open("wb") as file:
            writer = Writer(file)
            writer.add(TENSORS, *tensor_pieces(tensors))
            for name, text in texts.items():
                writer.add(name, len(text), [text])
            writer.finish(json_text({**manifest, "members": writer.hashes}))
    except OSError as error:
        raise ConfigError(f"path: cannot write {target}: {error.strerror or error}") from error
    return inspect(target)


def reads_head(engine: Engine) -> bool:
    """Whether the head has a format: with targets it is multiplied by another op, which must agree as well."""
    return any(
        site.op.role == "head" and site.path in engine.deepwell.bound.schemes for site in engine.deepwell.ir.sites()
    )


def check_whole(model: nn.Module) -> None:
    """Raise UnsupportedError where parameters are shards, or have no values."""
    for _, name, tensor in tensors_of(model):
        if type(tensor).__name__ == "DTensor" or tensor.is_meta:
            what = "a shard of a distributed tensor" if not tensor.is_meta else "on the meta device"
            raise UnsupportedError(f"{name} is {what}; export the whole model: dw.save it and export the checkpoint")
        if tensor.dtype not in EXPORTED.values():
            raise UnsupportedError(f"{name} is {tensor.dtype}, which a safetensors file cannot hold")


def model_form(model: nn.Module, calls: list[ExampleInputs]) -> tuple[dict[str, Any], dict[str, Tensor], list[str]]:
    """(the model without code, constant tensors of its graphs, notes)."""
    form = hf_form(model)
    if isinstance(form, dict):
        return form, {}, []
    graphs: list[dict[str, Any]] = []
    constants: dict[str, Tensor] = {}
    failed: DeepwellError | None = None
    with forms.evaluating(model):
        for call in calls:
            try:
                graph, held = capture_call(model, call)
            except UnsupportedError as error:
                failed = error
                continue
            renamed = {name: f"{name}.{len(graphs)}" for name in held}
            graph["tensors"] = [renamed.get(name, name) for name in graph["tensors"]]
            graphs.append(graph)
            constants |= {renamed[name]: tensor for name, tensor in held.items()}
    if not graphs:
        assert failed is not None
        raise failed
    why = "" if form == "it is no Hugging Face model" else f" ({form})"
    notes = [f"the model is a graph of the calls that were captured{why}: it has forward, and no methods of its own"]
    written = {"form": "graph", "graphs": graphs}
    _check_graphs(model, written, constants, calls)
    return written, constants, notes


def _check_graphs(
    model: nn.Module, form: dict[str, Any], constants: dict[str, Tensor], calls: list[ExampleInputs]
) -> None:
    """Raise UnsupportedError where the graph, read again, does not compute what the model does, bit for bit."""
    held = [*tensors_of(model), *(("constant", *item) for item in constants.items())]
    kinds = {name: kind for kind, name, _ in held}
    device = next((tensor.device for _, _, tensor in held), torch.device("cpu"))

    def fail(reason: str) -> Any:
        raise UnsupportedError(f"{type(model).__name__} has no form without its code: {reason}")

    again = build_graph(form, kinds, {name: tensor for _, name, tensor in held}, device, fail)
    with forms.evaluating(model):
        for call in calls[: len(form["graphs"])]:
            if not forms.same_tree(forms.run_call(model, call), forms.run_call(again, call)):
                fail("its graph does not compute what it does")


def collect(
    model: nn.Module, choice: forms.PackedWeights, constants: dict[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, ExportedTensor], dict[str, str]]:
    """(what goes into the tensor file, each tensor's entry, tied names)."""
    tensors: dict[str, Tensor] = {}
    entries: dict[str, ExportedTensor] = {}
    tied: dict[str, str] = {}
    seen: dict[int, str] = {}
    for kind, name, tensor in (*tensors_of(model), *(("constant", *item) for item in constants.items())):
        if id(tensor) in seen:
            tied[name] = seen[id(tensor)]
            continue
        seen[id(tensor)] = name
        packed = choice.packed.get(name)
        entries[name] = ExportedTensor(
            kind=kind,
            dtype=tensor.dtype,
            shape=tuple(tensor.shape),
            form=packed.form if packed else None,
            requires_grad=tensor.requires_grad,
            reason="" if packed else choice.reasons.get(name, ""),
        )
        parts = {f"{name}:{part}": value for part, value in packed.parts.items()} if packed else {name: tensor.detach()}
        tensors |= parts
    return tensors, entries, tied


def _notes(engine: Engine, choice: forms.PackedWeights) -> list[str]:
    notes = []
    by_reason: dict[str, list[str]] = {}
    for name, reason in choice.reasons.items():
        by_reason.setdefault(reason, []).append(name)
    for reason, names in by_reason.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        notes.append(f"stored whole, because {reason}: {names[0]}{more}")
    if engine.deepwell.options.registry is not None:
        notes.append("kernels of a registry are not in the file: the loaded engine runs Deepwell's own")
    return notes


def _versions() -> dict[str, str]:
    transformers = sys.modules.get("transformers")
    found = {"deepwell": __version__, "torch": torch.__version__, "python": platform.python_version()}
    return found | ({"transformers": transformers.__version__} if transformers is not None else {})


# ---- folders ----


def _export_hf(engine: Engine, target: Path) -> Artifact:
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
        partial.replace(target)
    except (OSError, SafetensorError) as error:  # of the latter a disk that is full
        raise ConfigError(f"path: cannot write {target}: {getattr(error, 'strerror', None) or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Artifact(
        path=str(target),
        format="hf",
        bytes=sum(file.stat().st_size for file in target.rglob("*") if file.is_file()),
        sha256=hash_file(target / "config.json"),
        model=_about(engine, {"form": "transformers", "class": type(model).__name__}),
        formats=count_formats((str(p.dtype).removeprefix("torch."), p.numel(), p.nbytes) for p in model.parameters()),
    )


def _about(engine: Engine, form: dict[str, Any]) -> dict[str, Any]:
    """What an artifact says of its model."""
    ir, parameters = engine.deepwell.ir, engine.deepwell.model.parameters()
    return {
        "name": ir.name, "form": form["form"], "class": form.get("class", ""),
        "parameters": sum(p.numel() for p in parameters), "layers": ir.num_layers, "dtype": ir.dtype,
    }  # fmt: skip
