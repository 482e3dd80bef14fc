"""What a model repeats: a Block of ops stored once, and the Layers that are instances of it. Pure, no torch."""

from dataclasses import dataclass

from deepwell.graph.ops import Attention, Op, TopK


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A repeated part of the model, stored once."""

    ops: tuple[Op, ...]

    @property
    def label(self) -> str:
        """What it is made of, e.g. "attention(window 128) + experts(128, top 4)"."""
        words: list[str] = []
        for op in self.ops:
            if isinstance(op, Attention):
                words.append(f"attention(window {op.window})" if op.window else "attention")
            elif isinstance(op, TopK):
                words.append(f"experts({op.experts}, top {op.top_k})")
        for role in ("mixer", "shared_experts", "mlp"):
            if any(op.role == role for op in self.ops):
                words.append(role.replace("_", " "))
        return " + ".join(dict.fromkeys(words)) or "other"

    @property
    def num_params(self) -> int:
        return sum(op.num_params for op in self.ops)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One instance of a block: where it stands in the module tree and which block it is."""

    path: str
    block: int
