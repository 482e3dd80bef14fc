"""`dw.load_engine`: an engine from a file, without the code of whoever trained it."""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deepwell.artifacts.export.container import TENSORS, Container
from deepwell.artifacts.export.graph.model import Call, GraphModel, Part
from deepwell.artifacts.export.hf_model import build_hf, set_generation
from deepwell.artifacts.export.manifest import ExportedTensor, Manifest, read_manifest
from deepwell.artifacts.export.plain_json import Refuse, read_json
from deepwell.artifacts.export.same_engine import rebuilt
from deepwell.artifacts.export.tensor_file import read_tensors
from deepwell.artifacts.export.weights import expected, unpack
from deepwell.engine.engine import Engine
from deepwell.errors import ConfigError, UnsupportedError
from deepwell.graph.ir import IR
from deepwell.planner.plan import Plan
from deepwell.precision.policy import PrecisionPolicy


def load_engine(path: str | os.PathLike[str], device: torch.device | str | None = None) -> Engine:
    """The engine that `dw.export` wrote, in evaluation mode, on `device` (where it was exported, if that is here).

    On the same kind of device it computes what the exported engine did, bit for bit. Every member is compared with its
    hash first; nothing in the file is run or imported. Raises CheckpointError where the file is damaged,
    foreign or newer, and ConfigError on a wrong argument.
    """
    container = Container(Path(path))
    manifest = read_manifest(container)
    container.check_hashes(manifest.members)
    where = _device(device, manifest.device)
    refuse = container.refuse
    model = _model(container, manifest, where)
    try:
        ir = IR.from_dict(read_json(bytes(container.member("ir.json")), "ir.json", refuse)).attach(model)
        policy = PrecisionPolicy.from_dict(read_json(bytes(container.member("policy.json")), "policy.json", refuse))
        plan = None
        if "plan.json" in container.members:
            plan = Plan.from_dict(read_json(bytes(container.member("plan.json")), "plan.json", refuse))
    except ConfigError as error:
        refuse(str(error))
    _check_ir(ir, model, refuse)
    try:
        engine = rebuilt(ir, policy, manifest.pins, manifest.options, step=manifest.step, is_cuda=where.type == "cuda")
    except ConfigError as error:
        refuse(f"its formats do not fit its model: {error}")
    engine.deepwell.plan = plan
    return engine.eval()


def _device(asked: torch.device | str | None, exported: str) -> torch.device:
    if asked is None:
        asked = "cuda" if exported.startswith("sm_") and torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(asked)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device is {asked!r}; it takes 'cpu' or 'cuda'") from error
    if found.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"device is {found}; an engine runs on CUDA GPUs and on the CPU")
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is 'cuda', and no GPU is here; load it with device='cpu'")
    return found


def _model(container: Container, manifest: Manifest, device: torch.device) -> nn.Module:
    refuse = container.refuse
    stored = read_tensors(container.member(TENSORS), refuse)
    form = read_json(bytes(container.member("model.json")), "model.json", refuse)
    tensors = _restored(manifest, stored, device, refuse)
    if form.get("form") == "graph":
        return build_graph(form, manifest.kinds, tensors, device, refuse)
    if form.get("form") != "transformers":
        refuse(f"its model has the form {str(form.get('form'))[:60]!r}, which is not known")
    model = build_hf(form, refuse)
    _fill(model, manifest, tensors, refuse)
    if "generation.json" in container.members:
        data = read_json(bytes(container.member("generation.json")), "generation.json", refuse)
        set_generation(model, data, refuse)
    return model.eval()


def _restored(manifest: Manifest, stored: dict[str, Tensor], device: torch.device, refuse: Refuse) -> dict[str, Tensor]:
    """Every tensor of the model by each of its names."""
    found: dict[str, Tensor] = {}
    used: set[str] = set()
    for name, entry in manifest.tensors.items():
        parts = {part: stored[key] for part, key in _keys(name, entry, stored) if key in stored}
        used |= {key for _, key in _keys(name, entry, stored)}
        wanted = expected(entry.form, entry.shape) if entry.form else {"": (entry.dtype, entry.shape)}
        for part, (dtype, shape) in wanted.items():
            got = parts.get(part)
            label = f"{name}:{part}" if part else name
            if got is None:
                refuse(f"tensor {label} is missing")
            if got.dtype != dtype or tuple(got.shape) != shape:
                refuse(f"tensor {label} is {got.dtype} {tuple(got.shape)}; its manifest says {dtype} {shape}")
        _check_kept(name, entry, parts, refuse)
        here = {part: tensor.to(device) for part, tensor in parts.items()}
        value = here[""] if entry.form is None else unpack(here, entry.form, entry.shape, entry.dtype)
        if entry.form is None and device.type == "cpu":
            value = value.clone()  # off the mapped file: a model outlives the file it came from
        is_parameter = entry.kind == "parameter"
        found[name] = nn.Parameter(value, requires_grad=entry.requires_grad) if is_parameter else value
    extra = sorted(set(stored) - used)
    if extra:
        refuse(f"tensor {extra[0]} is not in its manifest")
    return found | {name: found[target] for name, target in manifest.tied.items()}


def _keys(name: str, entry: ExportedTensor, stored: Mapping[str, Tensor]) -> list[tuple[str, str]]:
    if entry.form is None:
        return [("", name)]
    kept = [part for part in ("kept_at", "kept") if f"{name}:{part}" in stored]
    return [(part, f"{name}:{part}") for part in (*expected(entry.form, entry.shape), *kept)]


def _check_kept(name: str, entry: ExportedTensor, parts: Mapping[str, Tensor], refuse: Refuse) -> None:
    at, kept = parts.get("kept_at"), parts.get("kept")
    if at is None and kept is None:
        return
    count = math.prod(entry.shape)
    is_sound = (
        at is not None and kept is not None and at.dtype in (torch.int32, torch.int64) and at.dim() == kept.dim() == 1
        and len(at) == len(kept) <= count and kept.dtype == entry.dtype
    )  # fmt: skip
    if not is_sound or (at is not None and len(at) and (int(at.min()) < 0 or int(at.max()) >= count)):
        refuse(f"the numbers kept beside the codes of {name} do not fit it")


def _fill(model: nn.Module, manifest: Manifest, tensors: Mapping[str, Tensor], refuse: Refuse) -> None:
    """Put the tensors into a built model; its names and shapes must be those of the file."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    kept = set(model.state_dict(keep_vars=True))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    kinds = manifest.kinds
    wanted = set(parameters) | {name for name in buffers if name in kept}
    given = {name for name, kind in kinds.items() if kind in ("parameter", "buffer")}
    versions = manifest.versions.get("transformers", "?")
    for name in sorted(wanted - given):
        refuse(f"the model has {name} and the file does not (it was written with transformers {versions})")
    for name in sorted(given - wanted):
        refuse(f"the file has {name} and the model does not (it was written with transformers {versions})")
    for name, tensor in tensors.items():
        own = parameters.get(name) if kinds[name] == "parameter" else buffers.get(name)
        if own is None:
            if kinds[name] == "temporary":
                continue  # another version of transformers makes other ones, and makes its own here
            refuse(f"{name} is a {kinds[name]} in the file and none in the model")
        if own.shape != tensor.shape:
            refuse(f"{name} has shape {tuple(tensor.shape)} in the file and {tuple(own.shape)} in the model")
        path, _, leaf = name.rpartition(".")
        owner = model.get_submodule(path)
        (owner._parameters if kinds[name] == "parameter" else owner._buffers)[leaf] = tensor  # type: ignore[assignment]


def build_graph(
    form: Mapping[str, Any],
    kinds: Mapping[str, str],
    tensors: Mapping[str, Tensor],
    device: torch.device,
    refuse: Refuse,
) -> GraphModel:
    """The model behind graphs in a file, its tensors registered under their own names."""
    graphs = form.get("graphs")
    if not isinstance(graphs, list) or not graphs or len(graphs) > 16:
        refuse("its model has no graph")
    calls = [Call(graph, device, refuse) for graph in graphs]
    model = GraphModel(calls)
    for name in sorted({name for call in calls for name in call.tensors} - set(tensors)):
        refuse(f"tensor {name} is missing")
    for name, tensor in tensors.items():
        *path, leaf = name.split(".")
        owner: nn.Module = model
        for part in path:
            if part in owner._parameters or part in owner._buffers:
                refuse(f"tensor {name} lies inside another tensor")
            if part not in owner._modules:
                _check_free(owner, part, name, refuse)
                owner._modules[part] = Part()
            child = owner._modules[part]
            assert child is not None
            owner = child
        _check_free(owner, leaf, name, refuse)
        if kinds[name] == "parameter":
            owner.register_parameter(leaf, tensor)  # type: ignore[arg-type]
        else:
            owner.register_buffer(leaf, tensor, persistent=kinds[name] == "buffer")
    model.hold([name for call in calls for name in call.tensors])
    return model.eval()


def _check_free(owner: nn.Module, leaf: str, name: str, refuse: Refuse) -> None:
    if hasattr(owner, leaf):
        refuse(f"tensor {name} has a name that is taken")


def _check_ir(ir: IR, model: nn.Module, refuse: Refuse) -> None:
    """Every parameter that the IR speaks of must be there, in its shape."""
    have = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
    for site in ir.sites():
        prefix = site.path.removesuffix(site.op.name)
        for param in site.op.params:
            shape = have.get(param.name, have.get(prefix + param.name, have.get(f"{site.path}.{param.name}")))
            if shape is not None and shape != tuple(param.shape):
                refuse(f"its IR has {param.name} of shape {tuple(param.shape)}, the model {shape}")
