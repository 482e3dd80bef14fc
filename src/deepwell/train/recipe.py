"""A recipe: one TOML file that says which model is trained on what, how, and where the run's files go.

    recipe = Recipe.read(Path("recipes/tiny.toml"), overrides=["train.steps=20"])
    trainer = recipe.trainer(); trainer.fit()

Sections: [model], [precision], [data], [train] (see TrainSettings), [optimizer], [plan] (constraints of the planner),
[layout], [guard], [run]. docs/training.md describes them. An unknown section or key is an error that names the nearest.
"""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepwell.errors import ConfigError
from deepwell.precision.policy import PrecisionPolicy
from deepwell.train.settings import TrainSettings

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SECTIONS = ("model", "precision", "data", "train", "optimizer", "plan", "layout", "guard", "run")
_KEYS = {
    "model": ("name", "config", "pretrained", "type", "dtype", "layers", "seed", "set"),
    "precision": ("recipe", "policy", "fallback", "options"),
    "data": ("train", "eval", "document_mask"),
    "optimizer": ("name", "options"),
    "run": ("dir", "elastic", "resume", "device", "recompute", "cuda_graphs"),
}
# Of keys that nobody further on checks: what they take.
_TYPES: dict[str, type | tuple[type, ...]] = {
    "model.layers": int, "model.seed": int, "model.set": dict, "data.train": (str, list), "data.eval": (str, list),
    "data.document_mask": bool, "run.elastic": bool, "run.dir": str, "run.device": str,
}  # fmt: skip
_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A recipe's sections as they stand in the file, overrides applied; `path` is where it was read.

    `notes` say what else was changed, for the run to print.
    """

    path: Path
    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @classmethod
    def read(cls, path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
        """Of a TOML file; `overrides` are "section.key=value". Raises ConfigError naming the key."""
        path = Path(path)
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"recipe: cannot read {path}: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"recipe: {path} is not TOML: {error}") from error
        train = data.get("train")
        steps = train.get("steps", TrainSettings().steps) if isinstance(train, dict) else None
        keys = [_override(data, text) for text in overrides]
        for name, section in data.items():
            _check(name, section, path)
        is_shortened = "train.steps" in keys and "train.warmup" not in keys
        notes = _shorten_warmup(data["train"], steps) if is_shortened else ()
        return cls(path=path, sections=data, notes=notes)

    def section(self, name: str) -> dict[str, Any]:
        return dict(self.sections.get(name, {}))

    @property
    def settings(self) -> TrainSettings:
        return TrainSettings.from_dict(self.section("train"))

    # ---- what it describes ----

    def model_config(self) -> Any:
        """What the planner takes: the name of a published model, or the dict of a config."""
        model = self.section("model")
        given = [key for key in ("name", "config", "pretrained", "type") if key in model]
        if len(given) != 1:
            raise ConfigError(f"{self.path}: [model] needs one of name, config, pretrained and type, got {given}")
        if "name" in model:
            from deepwell.graph.configs import published_config, published_name

            config = dict(published_config(published_name(model["name"])))
        elif "type" in model:
            config = {"model_type": model["type"]}
        else:
            folder = self._path(model[given[0]])
            config = _read_json(folder / "config.json" if folder.is_dir() else folder)
        config |= model.get("set", {})
        if "layers" in model:
            config["num_hidden_layers"] = model["layers"]
        return config

    def build_model(self, device: str) -> Any:
        """The model with its weights: those of `pretrained`, else random ones of `seed`."""
        import torch

        try:
            import transformers
            from huggingface_hub.errors import StrictDataclassError
        except ImportError as error:
            raise ConfigError("[model] builds Hugging Face models: pip install 'deepwell[hf]'") from error
        model = self.section("model")
        word = model.get("dtype", "bf16" if device == "cuda" else "fp32")
        if word not in _DTYPES:
            raise ConfigError(f"{self.path}: [model] dtype is {word!r}; it takes {', '.join(_DTYPES)}")
        dtype = getattr(torch, _DTYPES[word])
        config = self.model_config()
        if config.get("model_type") not in transformers.CONFIG_MAPPING:
            raise ConfigError(f"{self.path}: [model] {config.get('model_type')!r} is no model type of transformers")
        self._check_set(transformers.CONFIG_MAPPING[config["model_type"]])
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            torch.manual_seed(model.get("seed", 0))
            try:
                settings = transformers.AutoConfig.for_model(**config)
                with torch.device(device):
                    net = transformers.AutoModelForCausalLM.from_config(settings, dtype=dtype)
            except (TypeError, ValueError, KeyError, StrictDataclassError) as error:
                raise ConfigError(f"{self.path}: [model] cannot be built: {error}") from error
        if "pretrained" in model:
            from deepwell.artifacts.checkpoint import load_pretrained

            load_pretrained(net, self._path(model["pretrained"]))
        net.config.use_cache = False
        return net

    def _check_set(self, kind: Any) -> None:
        """Raise ConfigError for a misspelt key of [model.set]: transformers would take it and use its default."""
        known = [*kind().to_dict(), *kind.attribute_map]
        for key in self.section("model").get("set", {}):
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.85)
            if near and key not in known:
                raise ConfigError(f"{self.path}: [model.set] has no {key}; did you mean {near[0]}?")

    def policy(self) -> Any:
        """The precision policy, or the recipe's name of one."""
        section = self.section("precision")
        if "policy" in section:
            return PrecisionPolicy.from_dict(_read_json(self._path(section["policy"])))
        return PrecisionPolicy.recipe(section.get("recipe", "mxfp8"), **section.get("options", {}))

    def make_plan(self, world: int) -> Any:
        """The plan: [layout] as it stands, or what the planner finds under [plan]; None where neither is there."""
        plan, layout, settings = self.section("plan"), self.section("layout"), self.settings
        if not plan and not layout:
            return None
        from deepwell.graph.ir import IR
        from deepwell.planner.search.autoplan import autoplan

        if settings.seq_len is None or settings.global_batch is None:
            raise ConfigError(f"{self.path}: a plan needs seq_len and global_batch in [train]")
        hw, optimizer = plan.pop("hw", None), plan.pop("optimizer", "adamw")
        config = self.model_config()
        fixed = {"gpus": world} if world > 1 and hw is None else {}
        return autoplan(
            IR.from_config(config), hw, seq_len=settings.seq_len, global_batch=settings.global_batch,
            precision=self.policy(), optimizer=optimizer, progress=False, **{**fixed, **plan, **layout},
        )  # fmt: skip

    def trainer(self, **changes: Any) -> Any:
        """Build, capture, plan, compile, and make the trainer. `changes` are arguments of `Trainer.from_engine`."""
        import os

        import torch

        from deepwell.engine.compile import compile as compile_engine
        from deepwell.graph.capture import capture
        from deepwell.train.trainer import Trainer

        run = self.section("run")
        device = run.get("device") or ("cuda" if torch.cuda.is_available() else "cpu")
        if device != "cpu" and not (device == "cuda" and torch.cuda.is_available()):
            raise ConfigError(f"{self.path}: [run] device is {device!r}; it takes cpu, or cuda where a GPU is")
        if device == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        model = self.build_model(device)
        plan = self.make_plan(int(os.environ.get("WORLD_SIZE", "1")))
        options = {name: run[name] for name in ("recompute", "cuda_graphs") if name in run}
        engine = compile_engine(
            capture(model), plan=plan, precision_policy=None if plan is not None else self.policy(),
            fallback=self.section("precision").get("fallback", "safe"), **options,
        )  # fmt: skip
        data, optimizer = self.section("data"), self.section("optimizer")
        if "train" not in data:
            raise ConfigError(f'{self.path}: [data] needs train: a folder of tokens, or "synthetic"')
        arguments: dict[str, Any] = {
            "optimizer": optimizer.get("name", "adamw_dw"),
            "optimizer_options": optimizer.get("options"),
            "dataloader": self._data("train", model),
            "eval_dataloader": None if "eval" not in data else self._data("eval", model),
            "elastic": run.get("elastic", True),
            "run_dir": run.get("dir", f"runs/{self.path.stem}"),
            "resume": run.get("resume", "auto"),
            "settings": self.settings,
            "guard": self.section("guard") or None,
        }
        trainer = Trainer.from_engine(engine, **{**arguments, **changes})
        trainer.notes += self.notes
        return trainer

    def _data(self, key: str, model: Any) -> Any:
        section = self.section("data")
        given = section[key]
        if isinstance(given, str) and given.split(":", maxsplit=1)[0] == "synthetic":
            return given if ":" in given else f"synthetic:{model.config.vocab_size}"
        found = self._path(given) if isinstance(given, str) else [self._path(path) for path in given]
        if "document_mask" not in section:
            return found
        from deepwell.train.data.make import make_loader

        settings = self.settings
        mask = section["document_mask"]
        return make_loader(found, seq_len=settings.seq_len, seed=settings.seed, document_mask=mask)

    def _path(self, given: str) -> Path:
        """A path of the recipe: as seen from where the command runs, else from the recipe's folder."""
        path = Path(given).expanduser()
        return path if path.exists() or path.is_absolute() else self.path.parent / path


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"recipe: cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"recipe: {path} is not JSON: {error}") from error


def _override(data: dict[str, Any], text: str) -> str:
    """Change one key, and return it."""
    key, found, value = text.partition("=")
    names = key.strip().split(".")
    if not found or len(names) < 2 or not all(names):
        raise ConfigError(f"override {text!r}; write section.key=value, e.g. train.steps=100")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value  # a word without quotes
    where = data
    for name in names[:-1]:
        where = where.setdefault(name, {})
        if not isinstance(where, dict):
            raise ConfigError(f"override {text!r}: {name} is no section")
    where[names[-1]] = parsed
    return ".".join(names)


def _shorten_warmup(train: dict[str, Any], steps_before: Any) -> tuple[str, ...]:
    """Of a run that an override made shorter than its warm-up; a recipe that was wrong by itself stays an error."""
    steps, warmup = train["steps"], train.get("warmup")
    are_numbers = all(isinstance(value, (int, float)) for value in (steps, warmup, steps_before))
    if not are_numbers or not 0 < steps < warmup <= steps_before:
        return ()
    train["warmup"] = steps
    return (f"train.warmup is {steps}, not {warmup}: train.steps={steps} leaves no more steps",)


def _check(name: str, section: Any, path: Path) -> None:
    if name not in SECTIONS:
        near = difflib.get_close_matches(name, SECTIONS, n=1)
        raise ConfigError(
            f"{path}: [{name}] is no section; {'did you mean ' + near[0] if near else ', '.join(SECTIONS)}"
        )
    if not isinstance(section, dict):
        raise ConfigError(f"{path}: {name} is a {type(section).__name__}; it is a section: [{name}]")
    known = _KEYS.get(name, ())
    for key in section if known else ():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(known)}"
            raise ConfigError(f"{path}: [{name}] has no {key}; {hint}")
        kind = _TYPES.get(f"{name}.{key}", object)
        if not isinstance(section[key], kind) or (kind is int and isinstance(section[key], bool)):
            words = " or ".join(one.__name__ for one in (kind if isinstance(kind, tuple) else (kind,)))
            raise ConfigError(f"{path}: [{name}] {key} is {section[key]!r}; it takes a value of type {words}")
