"""The IR: a model as ops with edges, its repeated blocks stored once, its costs open in batch and sequence length.

    stem  ->  layers[0] -> layers[1] -> ...  ->  tail        every layer is an instance of one of `blocks`

Pure: no torch. `capture` builds an IR from a live module, `IR.from_config` from a Hugging Face config; for the same
model they are equal. Names inside a block are relative to the layer ("self_attn.q_proj"), names in stem and tail are
full module paths. An input edge is an op's name in the same block, `@in` (the hidden state handed over by the stage
before) or `@earlier` (anything older).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, get_type_hints

from deepwell.errors import ConfigError
from deepwell.graph.blocks import Block, Layer
from deepwell.graph.configs import config_fields
from deepwell.graph.fusion import FusionSite, fusion_sites
from deepwell.graph.op_json import op_from_dict, op_to_dict
from deepwell.graph.ops import DTYPE_BYTES, GEMM_KINDS, GroupedLinear, InputSizes, Op, TopK
from deepwell.graph.table import OpGroup, fusion_summary, layers_label, op_table, short_count, wrapped
from deepwell.hardware.codec import JsonValue, check_schema, decode_value, encode

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """An op at its place in the model. `layer` counts from 0 and is None in stem and tail."""

    path: str
    op: Op
    layer: int | None
    block: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class IR(JsonValue):
    """A captured model. Frozen, printable, JSON; equal IRs describe the same computation."""

    name: str = field(compare=False)
    dtype: str
    stem: tuple[Op, ...]
    blocks: tuple[Block, ...]
    layers: tuple[Layer, ...]
    tail: tuple[Op, ...]
    max_positions: int | None = None
    source: str = field(default="graph", compare=False)  # "graph", "static" or "config"
    notes: tuple[str, ...] = field(default=(), compare=False)
    # The live module and its traced graph: opaque handles that JSON drops.
    module: Any = field(default=None, compare=False, repr=False)
    graph: Any = field(default=None, compare=False, repr=False)

    # ---- walking ----

    def sites(self) -> Iterator[Site]:
        """Every op of every layer in execution order, with its full path."""
        for op in self.stem:
            yield Site(path=op.name, op=op, layer=None, block=None)
        for index, layer in enumerate(self.layers):
            for op in self.blocks[layer.block].ops:
                yield Site(path=f"{layer.path}.{op.name}", op=op, layer=index, block=layer.block)
        for op in self.tail:
            yield Site(path=op.name, op=op, layer=None, block=None)

    def parts(self) -> Iterator[tuple[tuple[Op, ...], int]]:
        """Each distinct group of ops with how often it occurs: stem, blocks, tail. Costs are sums over this."""
        yield self.stem, 1
        for index, block in enumerate(self.blocks):
            yield block.ops, self.count(index)
        yield self.tail, 1

    def count(self, block: int) -> int:
        return sum(1 for layer in self.layers if layer.block == block)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    # ---- figures ----

    @property
    def num_params(self) -> int:
        """Parameters, tied weights counted once."""
        return sum(op.num_params * times for ops, times in self.parts() for op in ops)

    @property
    def active_params(self) -> int:
        """Parameters that one token meets: of the experts only its top-k share."""
        return sum(_active(op, ops) * times for ops, times in self.parts() for op in ops)

    @property
    def param_bytes(self) -> int:
        return sum(
            p.nbytes * times for ops, times in self.parts() for op in ops for p in op.params if p.tied_to is None
        )

    @property
    def num_experts(self) -> int:
        """Experts of the widest MoE layer, 0 for a dense model."""
        return max((op.experts for ops, _ in self.parts() for op in ops if isinstance(op, GroupedLinear)), default=0)

    def workload(
        self, batch: int = 1, seq_len: int = 2048, tokens_per_expert: int | tuple[int, ...] | None = None
    ) -> InputSizes:
        """Sizes to ask for costs with; a single `tokens_per_expert` stands for every expert."""
        if isinstance(tokens_per_expert, int):
            tokens_per_expert = (tokens_per_expert,) * self.num_experts
        if tokens_per_expert is not None and not self.num_experts:
            raise ConfigError(f"tokens_per_expert is given but {self.name} has no experts")
        return InputSizes(
            batch=batch,
            seq_len=seq_len,
            tokens_per_expert=None if tokens_per_expert is None else tuple(tokens_per_expert),
        )

    def flops(self, batch: int = 1, seq_len: int = 2048, tokens_per_expert: int | tuple[int, ...] | None = None) -> int:
        """Contraction flops of one forward."""
        work = self.workload(batch, seq_len, tokens_per_expert)
        return sum(op.flops(work) * times for ops, times in self.parts() for op in ops)

    def train_flops(
        self, batch: int = 1, seq_len: int = 2048, tokens_per_expert: int | tuple[int, ...] | None = None
    ) -> int:
        """Contraction flops of forward and backward, without recomputation."""
        work = self.workload(batch, seq_len, tokens_per_expert)
        return sum(op.train_flops(work) * times for ops, times in self.parts() for op in ops)

    def flops_per_token(self, seq_len: int) -> float:
        """Forward contraction flops per token of a sequence of this length."""
        return self.flops(1, seq_len) / seq_len

    def bytes_moved(
        self, batch: int = 1, seq_len: int = 2048, tokens_per_expert: int | tuple[int, ...] | None = None
    ) -> int:
        """Bytes of one unfused forward: every op reads its inputs and weights once and writes its output once."""
        work = self.workload(batch, seq_len, tokens_per_expert)
        return sum(op.bytes_moved(work) * times for ops, times in self.parts() for op in ops)

    # ---- the live module ----

    def require_module(self) -> Any:
        """The captured nn.Module; a ConfigError where this IR came from a file or a config."""
        if self.module is None:
            origin = "a config" if self.source == "config" else "JSON"
            raise ConfigError(
                f"this IR of {self.name} holds no live module (it came from {origin}); "
                "call dw.capture(model) in this process, or ir.attach(model)"
            )
        return self.module

    def attach(self, module: Any) -> IR:
        """The same IR with a live module, e.g. after reading it from JSON."""
        return replace(self, module=module)

    def with_roles(self, roles: Mapping[str, tuple[str, str]]) -> IR:
        """The same IR with (role, part) of GEMMs by path, itself where it has them already.

        Layers of one block are alike: what holds for a linear of one holds for all.
        """

        def changed(op: Op, *places: str) -> Op:
            named = [f"{place}.{op.name}" if place else op.name for place in places]
            found = next((roles[path] for path in named if path in roles), (op.role, op.part))
            is_other = op.kind in GEMM_KINDS and found != (op.role, op.part)
            return replace(op, role=found[0], part=found[1]) if is_other else op

        places = [[layer.path for layer in self.layers if layer.block == i] for i in range(len(self.blocks))]
        new = replace(
            self,
            stem=tuple(changed(op, "") for op in self.stem),
            blocks=tuple(
                Block(ops=tuple(changed(op, *paths) for op in block.ops))
                for block, paths in zip(self.blocks, places, strict=True)
            ),
            tail=tuple(changed(op, "") for op in self.tail),
        )
        return self if new == self else new

    # ---- JSON ----

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "name": self.name,
            "dtype": self.dtype,
            "source": self.source,
            "notes": list(self.notes),
            "max_positions": self.max_positions,
            "stem": [op_to_dict(op) for op in self.stem],
            "blocks": [{"ops": [op_to_dict(op) for op in block.ops]} for block in self.blocks],
            "layers": encode(self.layers),
            "tail": [op_to_dict(op) for op in self.tail],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> IR:
        check_schema(data, SCHEMA, "IR")
        hints = get_type_hints(cls)
        plain = ("name", "dtype", "source", "notes", "max_positions", "layers")
        try:
            ir = cls(
                **{name: decode_value(hints[name], data[name], f"IR.{name}") for name in plain},
                stem=tuple(map(op_from_dict, data["stem"])),
                blocks=tuple(Block(ops=tuple(map(op_from_dict, block["ops"]))) for block in data["blocks"]),
                tail=tuple(map(op_from_dict, data["tail"])),
            )
        except (KeyError, TypeError) as error:
            raise ConfigError(f"not an IR: {type(error).__name__}: {error}") from error
        ir.check()
        return ir

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, dtype: str | None = None) -> IR:
        """The IR of a Hugging Face config (the dict of its config.json), without torch or the model itself.

        `dtype` ("bf16", "fp32") overrides the config's own.
        """
        return cls(source="config", **config_fields(config, dtype))

    def check(self) -> None:
        """Our own invariants: edges name ops that come before, layers name blocks, dtypes are known."""
        if self.dtype not in DTYPE_BYTES:
            raise ConfigError(f"IR dtype {self.dtype!r} is unknown; known: {', '.join(DTYPE_BYTES)}")
        if self.max_positions is not None and self.max_positions < 1:
            raise ConfigError(f"IR: max_positions is {self.max_positions}; it must be at least 1 or null")
        for layer in self.layers:
            if not 0 <= layer.block < len(self.blocks):
                raise ConfigError(f"layer {layer.path} names block {layer.block}; there are {len(self.blocks)}")
        for group in (self.stem, *(block.ops for block in self.blocks), self.tail):
            seen = {op.name for op in group}
            if len(seen) != len(group):
                twice = sorted({op.name for op in group if [o.name for o in group].count(op.name) > 1})
                raise ConfigError(f"op names occur twice in one block: {', '.join(twice)}")
            known: set[str] = set()
            for op in group:
                missing = [edge for edge in op.inputs if not edge.startswith("@") and edge not in known]
                if missing:
                    raise ConfigError(f"op {op.name} reads {missing[0]}, which does not come before it in its block")
                known.add(op.name)

    # ---- views ----

    def fusion_sites(self) -> tuple[FusionSite, ...]:
        """Where ops can be fused, each block's sites once with the number of layers that have them."""
        return fusion_sites(self.stem, self.blocks, self.layers, self.tail)

    def __str__(self) -> str:
        """Every distinct block once with the layers it stands for; forward flops per token of a sequence."""
        seq_len = min(4096, self.max_positions or 4096)
        lines = [*_header(self, seq_len), "", *op_table(_groups(self), seq_len, self.flops(1, seq_len))]
        ops: dict[int | None, tuple[Op, ...]] = {None: self.stem + self.tail}
        ops |= {index: block.ops for index, block in enumerate(self.blocks)}
        lines += ["", *fusion_summary(self.fusion_sites(), ops)]
        if self.notes:
            lines += ["", "notes", *(f"  - {note}" for note in self.notes)]
        return wrapped(lines)


def _groups(ir: IR) -> list[OpGroup]:
    groups = [OpGroup(title="stem", ops=ir.stem, count=1)]
    for index, block in enumerate(ir.blocks):
        where = [i for i, layer in enumerate(ir.layers) if layer.block == index]
        if where:
            groups.append(OpGroup(title=f"{layers_label(where)}: {block.label}", ops=block.ops, count=len(where)))
    groups.append(OpGroup(title="tail", ops=ir.tail, count=1))
    return [group for group in groups if group.ops]


def _header(ir: IR, seq_len: int) -> list[str]:
    total, active = ir.num_params, ir.active_params
    size = f"{short_count(total)} parameters ({total:,})"
    if active != total:
        size += f", {short_count(active)} active per token ({active:,})"
    facts = [ir.dtype, f"{ir.num_layers} layers"]
    if ir.num_experts:
        facts.append(f"{ir.num_experts} experts")
    if ir.max_positions:
        facts.append(f"up to {ir.max_positions:,} positions")
    facts.append(f"read from {ir.source}")
    per_token = ir.flops_per_token(seq_len)
    speed = f"{per_token / 1e9:.2f} GFLOP" if per_token >= 1e7 else f"{per_token / 1e3:.1f} kFLOP"
    return [f"{ir.name}: {size}", ", ".join(facts), f"forward {speed}/token at {seq_len:,} tokens"]


def _active(op: Op, siblings: tuple[Op, ...]) -> int:
    if not isinstance(op, GroupedLinear):
        return op.num_params
    top_k = next((o.top_k for o in siblings if isinstance(o, TopK) and o.experts == op.experts), op.experts)
    return op.num_params * top_k // op.experts


__all__ = ["IR", "Block", "InputSizes", "Layer", "Site"]
