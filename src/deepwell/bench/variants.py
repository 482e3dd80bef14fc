"""Configurations of Deepwell in the race, by name: a recipe or policy file and words for the options.

default                                                                   dw.compile(model) without an option
bf16   fp8   fp8_tensor   fp8_1x128   mxfp8   nvfp4   policy.json         the formats
fp8_head   fp8_wbf16   fp8_tensor_e5m2   mxfp8_emulated                   which GEMMs, gradients, exact emulation
fp8_cg   fp8_keep   fp8_nolce   fp8_exact   fp8_rowscales   policy.json:cg_nolce    how the engine compiles
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from deepwell.engine.binding import Bound, Target, bind
from deepwell.engine.compile import compile as compile_engine
from deepwell.engine.compile import device_of, use_inductor
from deepwell.engine.engine import Engine
from deepwell.engine.passes.work import BackendOptions
from deepwell.errors import ConfigError, UnsupportedError
from deepwell.graph.capture import capture
from deepwell.graph.ir import IR
from deepwell.precision.policy import PrecisionPolicy
from deepwell.precision.recipes import RECIPES

_SCALINGS = ("row", "tensor", "1x128")
WORDS = {
    "head": "the head in the same format",
    "headgrads": "the head's gradients in the same format, its forward in bf16",
    "wbf16": "weight gradients in bf16",
    "e5m2": "gradients in E5M2, with one scale per tensor",
    "emulated": "operands rounded exactly, products in fp32, on any device",
    "cg": "CUDA graphs",
    "re": "FP8 copies recomputed in the backward",
    "hidden": "FP8 copies of hidden values recomputed in the backward, others kept",
    "keep": "FP8 copies kept for the backward",
    "cached": "FP8 weights kept from call to call",
    "rowscales": "FP8 products with the scales of their rows, which are not left to their readers",
    "nolce": "head and loss apart, all logits in memory",
    "exact": "FP8 products by rows all summed in fp32, not the wgrads alone",
}

DEFAULT = "default"
_RECOMPUTE = ("re", "hidden", "keep")
# Words that set an option of the engine.
_OPTIONS: dict[str, tuple[str, Any]] = {
    "nolce": ("fuse_head", False), "rowscales": ("row_factors", False), "cg": ("cuda_graphs", True),
    "re": ("recompute", "copies"), "hidden": ("recompute", "hidden"), "keep": ("recompute", "nothing"),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to run a model: `base` is a recipe's name or a policy file, `words` are keys of WORDS."""

    name: str
    base: str
    scaling: str | None = None
    words: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, name: str) -> Variant:
        """The variant that a name means. Raises ConfigError where it means none."""
        if name == DEFAULT:
            return cls(name=name, base=name)
        head, colon, tail = name.partition(":")
        if head.endswith(".json"):
            if not Path(head).is_file():
                raise ConfigError(f"variant {name!r}: there is no policy file {head}")
            words, base = [word for word in tail.split("_") if word], head
            # Without the folder: results name no path of one machine.
            name = Path(head).stem + (f":{tail}" if tail else "")
        else:
            base, *words = name.split("_")
            if base not in RECIPES or colon:
                raise ConfigError(
                    f"variant {name!r} is not known: it is {DEFAULT} or begins with {', '.join(RECIPES)} or FILE.json"
                )
        scaling = next((word for word in words if word in _SCALINGS), None)
        rest = [word for word in words if word != scaling]
        unknown = [word for word in rest if word not in WORDS]
        if unknown or len(set(rest)) != len(rest):
            known = ", ".join((*_SCALINGS, *WORDS))
            raise ConfigError(f"variant {name!r}: {' '.join(unknown) or 'a word twice'}; words are {known}")
        if len(set(_RECOMPUTE) & set(rest)) > 1:
            raise ConfigError(f"variant {name!r}: {', '.join(_RECOMPUTE)} exclude each other")
        if scaling and base != "fp8":
            raise ConfigError(f"variant {name!r}: {scaling} is a scaling of fp8, not of {base}")
        if "e5m2" in rest and scaling != "tensor":
            raise ConfigError(f"variant {name!r}: e5m2 goes with tensor scales, as in fp8_tensor_e5m2")
        return cls(name=name, base=base, scaling=scaling, words=frozenset(rest))

    def without(self, *words: str) -> Variant:
        """The same variant without some of its words."""
        return replace(self, words=self.words - set(words))

    def policy(self) -> PrecisionPolicy:
        """What the variant says of formats, as an open policy. Raises ConfigError for "default", which says nothing."""
        if self.base == DEFAULT:
            raise ConfigError(f"variant {self.name!r} is dw.compile(model) as it is and has no policy; name a recipe")
        if self.base.endswith(".json"):
            policy = PrecisionPolicy.from_json(Path(self.base).read_text(encoding="utf-8"))
        elif self.base == "fp8":
            policy = PrecisionPolicy.recipe("fp8", forward_bf16_from=None, ends=None, **self._fp8())
        else:
            policy = PrecisionPolicy.recipe(self.base)
        if {"head", "headgrads"} & self.words:
            options = self._fp8() if self.base == "fp8" else {}
            how = "mxfp8" if self.base.endswith(".json") else self.base
            gemms = None if "head" in self.words else ("dgrad", "wgrad")
            policy.set_layer_precision("head", how, gemms=gemms, **options)
        if "wbf16" in self.words:
            policy.set_default("bf16", gemms="wgrad")
        return policy

    def _fp8(self) -> dict[str, str]:
        """Options of FP8: rows unless the name says otherwise; E4M3 with any scaling, so that names compare alike."""
        scaling = self.scaling or "row"
        gradients = {"gradients": "e5m2" if "e5m2" in self.words else "e4m3"}
        return {"scaling": scaling, **(gradients if scaling == "tensor" else {})}

    def engine(self, model: nn.Module, example_inputs: Any) -> Engine:
        """The model's engine. Raises UnsupportedError where the scaling that the name says is not what would run."""
        if self.base == DEFAULT:
            return compile_engine(model)
        return self.engine_of(capture(model, example_inputs))

    def engine_of(self, ir: IR) -> Engine:
        """The engine of a captured model; see `engine`."""
        policy = self.policy()
        if "emulated" in self.words:
            engine = _emulated(ir, policy)
        else:
            engine = compile_engine(ir, precision_policy=policy, cache_weights="cached" in self.words)
        if self.scaling:
            _check_scaling(self, engine.deepwell.bound)
        # Read when the first call compiles; what no word speaks of stays as the engine has it.
        options = engine.deepwell.options
        for word in self.words & _OPTIONS.keys():
            setattr(options, *_OPTIONS[word])
        if "exact" in self.words:
            options.schemes = {path: _in_fp32(scheme) for path, scheme in options.schemes.items()}
        return engine


def _in_fp32(scheme: str) -> str:
    return "|".join("fp8_row,sums=fp32" if part == "fp8_row" else part for part in scheme.split("|"))


def parse_variants(names: str) -> tuple[Variant, ...]:
    """Variants from a comma-separated list."""
    return tuple(Variant.parse(name.strip()) for name in names.split(",") if name.strip())


def _emulated(ir: IR, policy: PrecisionPolicy) -> Engine:
    """An engine whose low-precision GEMMs round operands exactly, also where the device has its own."""
    policy.freeze()
    model = ir.require_module()
    resolution = policy.resolve(ir)
    bound = bind(ir, resolution, Target(kind="emulation"))
    options = BackendOptions(
        schemes=bound.schemes,
        use_inductor=use_inductor(None, device_of(list(model.parameters()))),
        parameters=lambda: model.named_parameters(remove_duplicate=False),
    )
    return Engine(ir, replace(bound, notes=resolution.notes), policy, options=options, device="emulation")


def _check_scaling(variant: Variant, bound: Bound) -> None:
    for row in bound.bindings:
        if row.binding == "substitute":
            raise UnsupportedError(f"{variant.name}: {row.path} {row.gemm} would run as {row.scheme}: {row.reason}")


def runs_as(engine: Engine) -> dict[str, int]:
    """How many GEMMs run in which way, e.g. {"fp8 as fp8_row (native)": 84, "bf16": 3}; as far as is known by now."""
    found: dict[str, int] = {}
    for row in engine.deepwell.report().bindings:
        low = row.scheme != "bf16"
        label = f"{row.format} as {row.scheme} ({row.binding})" if low or row.binding != "native" else "bf16"
        found[label] = found.get(label, 0) + 1
    return found
