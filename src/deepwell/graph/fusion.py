"""Where ops can be fused: sites found from the IR's ops and edges alone, each block's once. Pure, no torch.

A site says what could become one kernel (or one GEMM), not that anything did: the kernels' registry decides that by
measuring. Projections that a model stores fused already (GPT-2's `c_attn`) are no site, for nothing is left to do.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from deepwell.graph.blocks import Block, Layer
from deepwell.graph.ops import BLOCK_INPUT, GEMM_KINDS, Activation, Add, Attention, Linear, Loss, Norm, Op


@dataclass(frozen=True, slots=True, kw_only=True)
class FusionSite:
    """Ops that one kernel could do. `block` is None in stem and tail, where the ops carry full paths.

    An `@in` among the ops is the last op of the stage before: the sum at the end of one layer and the norm at the
    start of the next are one site, which belongs to the next.
    """

    kind: str
    ops: tuple[str, ...]
    block: int | None
    count: int  # how many layers have it

    def __str__(self) -> str:
        place = "" if self.block is None else f" in block {self.block}"
        return f"{self.kind}{place} ({self.count}x): {' + '.join(self.ops)}"


def fusion_sites(
    stem: tuple[Op, ...], blocks: Sequence[Block], layers: Sequence[Layer], tail: tuple[Op, ...]
) -> tuple[FusionSite, ...]:
    """Every site of the model in execution order: stem, then each block once, then tail."""
    sites = list(_sites_of(stem, block=None, count=1, count_after_sum=0))
    # What each layer receives, and last the tail.
    before = [stem, *(blocks[layer.block].ops for layer in layers)]
    for index, block in enumerate(blocks):
        received = [ops for layer, ops in zip(layers, before, strict=False) if layer.block == index]
        after_sum = sum(map(_ends_in_sum, received))
        sites += _sites_of(block.ops, block=index, count=len(received), count_after_sum=after_sum)
    sites += _sites_of(tail, block=None, count=1, count_after_sum=int(_ends_in_sum(before[-1])))
    return tuple(sites)


def _ends_in_sum(ops: tuple[Op, ...]) -> bool:
    return bool(ops) and isinstance(ops[-1], Add)


def _sites_of(ops: tuple[Op, ...], *, block: int | None, count: int, count_after_sum: int) -> Iterator[FusionSite]:
    """The sites of one group of ops; `count_after_sum` of its instances receive a residual sum as `@in`."""
    by_name = {op.name: op for op in ops}
    readers: dict[str, list[Op]] = {}
    for op in ops:
        for edge in op.inputs:
            readers.setdefault(edge, []).append(op)

    def site(kind: str, *members: str, times: int = count) -> FusionSite:
        return FusionSite(kind=kind, ops=members, block=block, count=times)

    for edge in dict.fromkeys(edge for op in ops for edge in op.inputs):
        # `@earlier` may be several different values, so its readers share nothing that is known.
        shared = [op for op in readers[edge] if isinstance(op, Linear) and op.inputs == (edge,) and edge != "@earlier"]
        projections = [op.name for op in shared if op.role == "attention" and op.part != "o"]
        if len(projections) > 1:
            yield site("qkv", *projections)
    for op in ops:
        producers = [by_name[edge] for edge in op.inputs if edge in by_name]
        if isinstance(op, Norm):
            if producers and isinstance(producers[0], Add):
                yield site("residual_norm", producers[0].name, op.name)
            elif op.inputs == (BLOCK_INPUT,) and count_after_sum:
                yield site("residual_norm", BLOCK_INPUT, op.name, times=count_after_sum)
            linears = [reader.name for reader in readers.get(op.name, ()) if reader.kind in GEMM_KINDS]
            if linears:
                yield site("norm_linear", op.name, *linears)
        elif isinstance(op, Activation):
            yield from _activation_sites(op, producers, site)
        elif isinstance(op, Attention):
            yield site("softmax_attention", op.name)
        elif isinstance(op, Loss) and producers and isinstance(producers[-1], Linear):
            yield site("head_cross_entropy", producers[-1].name, op.name)


def _activation_sites(op: Activation, producers: list[Op], site: Callable[..., FusionSite]) -> Iterator[FusionSite]:
    if not producers or any(p.kind not in GEMM_KINDS for p in producers):
        return
    names = [p.name for p in producers]
    if not op.gated:
        kind = "linear_gelu" if op.function.startswith("gelu") else "linear_activation"
        yield site(kind, *names, op.name)
        return
    if len(producers) == 2 and producers[0].inputs == producers[1].inputs:
        yield site("gate_up", *names)
    yield site("linear_swiglu", *names, op.name)
