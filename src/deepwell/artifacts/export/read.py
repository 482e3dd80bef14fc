"""`dw.load_engine`: an engine from a file, without the code of whoever trained it."""

import math
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from deepwell.artifacts.export.container import TENSORS, Container
from deepwell.artifacts.export.graph.model import build_graph
from deepwell.artifacts.export.hf_model import build_hf, set_generation
from deepwell.artifacts.export.manifest import ExportedTensor, Manifest, read_manifest, tensors_of
from deepwell.artifacts.export.same_engine import rebuilt
from deepwell.artifacts.export.weights import unpack
from deepwell.artifacts.plain_json import Refuse
from deepwell.artifacts.tensor_file import read_tensors
from deepwell.engine.engine import Engine
from deepwell.errors import ConfigError, UnsupportedError
from deepwell.graph.ir import IR
from deepwell.planner.plan import Plan
from deepwell.precision.policy import PrecisionPolicy

_KEPT = ("kept_at", "kept")  # the parts of a weight that are not always there


def load_engine(path: str | os.PathLike[str], device: torch.device | str | None = None) -> Engine:
    """The engine that `dw.export` wrote, in evaluation mode, on `device` (where it was exported, if that is here).

    On the same kind of device it computes what the exported engine did, bit for bit. Every member is compared with its
    hash first; nothing in the file is run or imported. Raises CheckpointError where the file is damaged,
    foreign or newer, and ConfigError on a wrong argument.
    """
    container = Container(Path(path))
    refuse, manifest = container.refuse, read_manifest(container)
    facts = manifest.data
    where = _device(device, facts["device"])
    model = _model(container, manifest, where)
    try:
        ir = IR.from_dict(container.json("ir.json")).attach(model)
        policy = PrecisionPolicy.from_dict(container.json("policy.json"))
        plan = Plan.from_dict(container.json("plan.json")) if "plan.json" in container.members else None
    except ConfigError as error:
        refuse(str(error))
    _check_ir(ir, model, refuse)
    try:
        engine = rebuilt(ir, policy, facts["pins"], facts["options"], step=facts["step"], is_cuda=where.type == "cuda")
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
    form = container.json("model.json")
    tensors = _restored(manifest, stored, device, refuse)
    if form.get("form") == "graph":
        return build_graph(form, manifest.kinds, tensors, device, refuse)
    if form.get("form") != "transformers":
        refuse(f"its model has the form {str(form.get('form'))[:60]!r}, which is not known")
    model = build_hf(form, refuse)
    _fill(model, manifest, tensors, refuse)
    if "generation.json" in container.members:
        set_generation(model, container.json("generation.json"), refuse)
    return model.eval()


def _restored(manifest: Manifest, stored: dict[str, Tensor], device: torch.device, refuse: Refuse) -> dict[str, Tensor]:
    """Every tensor of the model by each of its names; `stored` is used up."""
    found: dict[str, Tensor] = {}
    for name, entry in manifest.tensors.items():
        parts: dict[str, Tensor] = {}
        for part, (dtype, shape) in entry.parts.items():
            label = f"{name}:{part}" if part else name
            if label not in stored:
                refuse(f"tensor {label} is missing")
            got = parts[part] = stored.pop(label)
            if got.dtype != dtype or tuple(got.shape) != shape:
                refuse(f"tensor {label} is {got.dtype} {tuple(got.shape)}; its manifest says {dtype} {shape}")
        if entry.form is not None:
            parts |= {part: stored.pop(f"{name}:{part}") for part in _KEPT if f"{name}:{part}" in stored}
            if not _fits_kept(entry, parts):
                refuse(f"the numbers kept beside the codes of {name} do not fit it")
        here = {part: tensor.to(device) for part, tensor in parts.items()}
        if entry.form is not None:
            value = unpack(here, entry.form, entry.shape, entry.dtype)
        else:  # off the mapped file: a model outlives the file it came from
            value = here[""].clone() if device.type == "cpu" else here[""]
        is_parameter = entry.kind == "parameter"
        found[name] = nn.Parameter(value, requires_grad=entry.requires_grad) if is_parameter else value
    if stored:
        refuse(f"tensor {min(stored)} is not in its manifest")
    return found | {name: found[target] for name, target in manifest.data["tied"].items()}


def _fits_kept(entry: ExportedTensor, parts: Mapping[str, Tensor]) -> bool:
    if not set(_KEPT) & set(parts):
        return True
    if not set(_KEPT) <= set(parts):
        return False
    at, kept = parts["kept_at"], parts["kept"]
    return (
        at.dtype in (torch.int32, torch.int64) and at.dim() == kept.dim() == 1 and kept.dtype == entry.dtype
        and len(at) == len(kept) and bool(((at >= 0) & (at < math.prod(entry.shape))).all())
    )  # fmt: skip


def _fill(model: nn.Module, manifest: Manifest, tensors: Mapping[str, Tensor], refuse: Refuse) -> None:
    """Put the tensors into a built model; its names and shapes must be those of the file."""
    own = {name: (kind, tensor) for kind, name, tensor in tensors_of(model)}
    kinds = manifest.kinds
    wanted = {name for name, (kind, _) in own.items() if kind != "temporary"}
    given = {name for name, kind in kinds.items() if kind in ("parameter", "buffer")}
    versions = manifest.data["versions"].get("transformers", "?")
    for name in sorted(wanted - given):
        refuse(f"the model has {name} and the file does not (it was written with transformers {versions})")
    for name in sorted(given - wanted):
        refuse(f"the file has {name} and the model does not (it was written with transformers {versions})")
    for name, tensor in tensors.items():
        is_parameter = kinds[name] == "parameter"
        if name not in own or is_parameter != (own[name][0] == "parameter"):
            if kinds[name] == "temporary":
                continue  # another version of transformers makes other ones, and makes its own here
            refuse(f"{name} is a {kinds[name]} in the file and none in the model")
        if own[name][1].shape != tensor.shape:
            refuse(f"{name} has shape {tuple(tensor.shape)} in the file and {tuple(own[name][1].shape)} in the model")
        path, _, leaf = name.rpartition(".")
        owner = model.get_submodule(path)
        (owner._parameters if is_parameter else owner._buffers)[leaf] = tensor  # type: ignore[assignment]


def _check_ir(ir: IR, model: nn.Module, refuse: Refuse) -> None:
    """Every parameter that the IR speaks of must be there, in its shape."""
    have = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
    for site in ir.sites():
        prefix = site.path.removesuffix(site.op.name)
        for param in site.op.params:
            shape = have.get(param.name, have.get(prefix + param.name, have.get(f"{site.path}.{param.name}")))
            if shape is not None and shape != tuple(param.shape):
                refuse(f"its IR has {param.name} of shape {tuple(param.shape)}, the model {shape}")
