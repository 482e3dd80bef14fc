"""Writes the ops of a decoder from the fields of its config: what every family of configs uses. Pure, no torch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deepwell.errors import ConfigError
from deepwell.graph import ops as kinds
from deepwell.graph.blocks import Block, Layer
from deepwell.graph.ops import TOKENS, Extent, Op, Param


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The sizes of a layer's experts and what they compute."""

    count: int
    top_k: int
    width: int  # of the rows that they read and write
    inner: int
    function: str
    gated: bool = False  # gate and up in one product before the activation, or up alone
    bias: bool = False
    transposed: bool = False  # weights stored [k, n]


@dataclass(slots=True)
class ConfigWriter:
    """Collects the ops of one block in execution order."""

    dtype: str
    ops: list[Op] = field(default_factory=list)

    def op(self, kind: Callable[..., Op], name: str, role: str, *inputs: str, **fields: Any) -> str:
        """Add an op. Its producers stand in the order they run, without repeats: one spelling for one set of edges."""
        position = {op.name: i for i, op in enumerate(self.ops)}
        ordered = tuple(sorted(dict.fromkeys(inputs), key=lambda edge: position.get(edge, -1)))
        self.ops.append(kind(name=name, role=role, inputs=ordered, dtype=self.dtype, **fields))
        return name

    def param(self, name: str, *shape: int, tied_to: str | None = None) -> Param:
        return Param(name=name, shape=shape, dtype=self.dtype, tied_to=tied_to)

    def norm(self, name: str, source: str, width: int, *, per_token: int = 1, norm: str = "rms") -> str:
        params = [self.param(f"{name}.weight", width)]
        if norm == "layer":
            params.append(self.param(f"{name}.bias", width))
        rows = TOKENS.times(per_token)
        return self.op(kinds.Norm, name, "norm", source, params=tuple(params), norm=norm, width=width, rows=rows)

    def linear(
        self, name: str, place: str, source: str, k: int, n: int, *, bias: bool = False, conv1d: bool = False
    ) -> str:
        role, _, part = place.partition(".")
        params = [self.param(f"{name}.weight", *((k, n) if conv1d else (n, k)))]
        if bias:
            params.append(self.param(f"{name}.bias", n))
        return self.op(kinds.Linear, name, role, source, part=part, params=tuple(params), k=k, n=n, bias=bias)

    def add(self, name: str, role: str, *sources: str, width: int) -> str:
        return self.op(kinds.Add, name, role, *sources, width=width)

    def embedding(self, name: str, vocab: int, width: int, rows: Extent = TOKENS) -> str:
        params = (self.param(f"{name}.weight", vocab, width),)
        return self.op(kinds.Embedding, name, "embedding", params=params, vocab=vocab, width=width, rows=rows)

    def activation(self, path: str, role: str, *sources: str, **fields: Any) -> str:
        return self.op(kinds.Activation, f"{path}.act", role, *sources, **fields)

    def top_k(self, router: str, experts: int, top_k: int, scoring: str) -> str:
        sizes = {"experts": experts, "top_k": top_k, "scoring": scoring}
        return self.op(kinds.TopK, f"{router}.topk", "router", router, **sizes)

    def experts(self, path: str, source: str, chosen: str, asked: Experts) -> str:
        """Dispatch, the experts' two products with their activation, and combine."""
        rows = TOKENS.times(asked.top_k)

        def grouped(part: str, source: str, k: int, n: int) -> str:
            name = f"{path}.{part}_proj"
            params = [self.param(name, asked.count, *((k, n) if asked.transposed else (n, k)))]
            if asked.bias:
                params.append(self.param(f"{name}_bias", asked.count, n))
            return self.op(
                kinds.GroupedLinear, name, "experts", source, part=part, params=tuple(params),
                rows=rows, experts=asked.count, k=k, n=n, bias=asked.bias,
            )  # fmt: skip

        placed = self.op(kinds.Dispatch, f"{path}.dispatch", "experts", source, chosen, rows=rows, width=asked.width)
        part, n = ("gate_up", 2 * asked.inner) if asked.gated else ("up", asked.inner)
        up = grouped(part, placed, asked.width, n)
        how = {"function": asked.function, "width": asked.inner, "gated": asked.gated}
        down = grouped("down", self.activation(path, "experts", up, rows=rows, **how), asked.inner, asked.width)
        sizes = {"top_k": asked.top_k, "width": asked.width}
        return self.op(kinds.Combine, f"{path}.combine", "experts", chosen, down, **sizes)


def need(config: Mapping[str, Any], *names: str) -> int:
    for name in names:
        if config.get(name) is not None:
            value = config[name]
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"config field {name} is {value!r}; it must be a whole number of at least 1")
            return value
    raise ConfigError(f"config of model_type {config.get('model_type')!r} lacks {' / '.join(names)}")


def head_and_loss(w: ConfigWriter, source: str, hidden: int, vocab: int, tied_to: str | None) -> None:
    params = (w.param("lm_head.weight", vocab, hidden, tied_to=tied_to),)
    head = w.op(kinds.Linear, "lm_head", "head", source, k=hidden, n=vocab, params=params)
    w.op(kinds.Loss, "loss", "loss", head, vocab=vocab)


def model_fields(
    config: Mapping[str, Any],
    stem: ConfigWriter,
    tail: ConfigWriter,
    path: str,
    layers: Sequence[Any],
    write: Callable[[ConfigWriter, Any], None],
) -> dict[str, Any]:
    """The fields of an IR with layers at `path`; equal entries of `layers` are one block, which `write` fills."""
    names = config.get("architectures")
    distinct = list(dict.fromkeys(layers))
    blocks = [ConfigWriter(stem.dtype) for _ in distinct]
    for block, kind in zip(blocks, distinct, strict=True):
        write(block, kind)
    return {
        "name": names[0] if names else str(config.get("model_type") or "decoder"),
        "dtype": stem.dtype,
        "stem": tuple(stem.ops),
        "blocks": tuple(Block(ops=tuple(block.ops)) for block in blocks),
        "layers": tuple(Layer(path=f"{path}.{i}", block=distinct.index(kind)) for i, kind in enumerate(layers)),
        "tail": tuple(tail.ops),
    }
