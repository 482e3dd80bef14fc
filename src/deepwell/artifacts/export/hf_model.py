"""A Hugging Face model without code: the class's name in transformers, its config, and how attention and experts run.

A name from a file is looked up in transformers' own namespace and must be a model class that transformers defines.
Nothing is fetched: no remote code, no kernels from a hub.
"""

import re
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from deepwell.artifacts.plain_json import Refuse, fits

# What transformers has itself; other implementations are fetched from a hub.
_OWN = {
    "attention": (None, "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"),
    "experts": (None, "eager", "batched_mm", "grouped_mm"),
}
_FIELDS = {"attention": "_attn_implementation", "experts": "_experts_implementation"}
# Fields of a config that say where it came from, or that would make transformers fetch or import something.
_LEFT_OUT = ("_name_or_path", "auto_map", "transformers_version", "custom_pipelines", "base_model_tp_plan")


def hf_form(model: Any) -> dict[str, Any] | str:
    """The form of a Hugging Face model, or the reason why it has none."""
    transformers: Any = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return "it is no Hugging Face model"
    own: Any = type(model)
    name = own.__name__
    if model_class(name) is not own:
        return f"{name} is no class of transformers itself"
    if getattr(model.config, "quantization_config", None) is not None:
        return "transformers quantized it already"
    changed = next((path for path, m in model.named_modules() if _is_changed(m)), None)
    if changed is not None:
        return f"{changed or name} has hooks or a forward of its own"
    parts = _parts(model.config)
    runs = {what: {path: getattr(part, name, None) for path, part in parts.items()} for what, name in _FIELDS.items()}
    form = {"form": "transformers", "class": name, "config": _plain(model.config.to_dict()), **runs}
    for what, known in _OWN.items():
        for how in runs[what].values():
            if how not in known:
                return f"it runs {how!r}, which is not in transformers itself"

    def fail(reason: str) -> Any:
        raise RuntimeError(reason)

    try:
        with torch.device("meta"):
            same = build_hf(form, fail)
    except (RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError) as error:
        return f"its config does not build it again: {str(error)[:200]}"
    if [(n, type(m)) for n, m in same.named_modules()] != [(n, type(m)) for n, m in model.named_modules()]:
        return "its modules are not those of its config"
    shapes = [{n: t.shape for n, t in m.named_parameters(remove_duplicate=False)} for m in (same, model)]
    return form if shapes[0] == shapes[1] else "its parameters are not those of its config"


def _is_changed(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)


def model_class(name: str) -> type | None:
    """The model class of that name that transformers itself defines, None where there is none."""
    import transformers

    if not re.fullmatch(r"[A-Z][A-Za-z0-9_]{1,100}", name):
        return None
    found = getattr(transformers, name, None)
    is_model = isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)
    return found if is_model and found.__module__.startswith("transformers.models.") else None


def _plain(config: Any) -> Any:
    if isinstance(config, dict):
        return {str(key): _plain(value) for key, value in config.items() if key not in _LEFT_OUT}
    if isinstance(config, (list, tuple)):
        return [_plain(value) for value in config]
    return str(config).removeprefix("torch.") if isinstance(config, torch.dtype) else config


def _parts(config: Any) -> dict[str, Any]:
    """A config and those inside it, by path."""
    found = {"": config}
    for name in getattr(config, "sub_configs", None) or {}:
        inner = getattr(config, name, None)
        if inner is not None:
            found |= {f"{name}.{path}".rstrip("."): part for path, part in _parts(inner).items()}
    return found


def build_hf(form: dict[str, Any], refuse: Refuse) -> nn.Module:
    """The model of a form with no weights yet. `refuse` raises where the form is not one that this may build."""
    try:
        import transformers
    except ImportError:
        refuse("its model is a Hugging Face model: install transformers to load it")
    name, config = form.get("class"), form.get("config")
    found = model_class(name) if isinstance(name, str) else None
    if found is None:
        refuse(f"its model class is {str(name)[:80]!r}, which transformers {transformers.__version__} does not have")
    runs = {what: form.get(what) for what in _OWN}
    if not isinstance(config, dict) or not all(isinstance(one, dict) for one in runs.values()):
        refuse("the config of its model is damaged")
    if any(key in config for key in ("auto_map", "quantization_config")):
        refuse("the config of its model asks for code from elsewhere")
    if not all(fits(runs[what], {str: own}) for what, own in _OWN.items()):
        refuse("its model asks for implementations that are not in transformers itself")
    try:
        made = found.config_class.from_dict(_plain(config))  # type: ignore[attr-defined]
        for path, part in _parts(made).items():
            for what, field in _FIELDS.items():
                if form[what].get(path) is not None:
                    setattr(part, f"{field}_internal", form[what][path])
        with _NoInit():
            model = found(made)
    except (ValueError, TypeError, AttributeError, KeyError, ImportError, RuntimeError, OSError) as error:
        refuse(f"transformers {transformers.__version__} cannot build {name} from its config: {str(error)[:300]}")
    assert isinstance(model, nn.Module)
    return model.eval()


class _NoInit(TorchFunctionMode):
    """Weights come from the file: the numbers that they would be drawn as are never made."""

    _DRAWS = (Tensor.normal_, Tensor.uniform_, Tensor.random_, Tensor.bernoulli_, Tensor.exponential_, Tensor.erfinv_)

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self._DRAWS or getattr(func, "__module__", "") == "torch.nn.init":
            return args[0] if args else next(iter(kwargs.values()))
        return func(*args, **kwargs)


def generation_of(model: nn.Module) -> dict[str, Any] | None:
    """The generation config of a model that has one, as JSON values."""
    config = getattr(model, "generation_config", None)
    if config is None or not callable(getattr(config, "to_dict", None)):
        return None
    found = _plain(config.to_dict())
    return found if isinstance(found, dict) else None


def set_generation(model: Any, data: dict[str, Any], refuse: Refuse) -> None:
    """Give a model the generation config of its file."""
    import transformers

    try:
        model.generation_config = transformers.GenerationConfig.from_dict(data)
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        refuse(f"its generation config is damaged: {str(error)[:200]}")
