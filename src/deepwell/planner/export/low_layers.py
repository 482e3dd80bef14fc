"""The low format of a plan and the layers that have it, for engines that know one format and bf16 at the ends. Pure."""

from dataclasses import dataclass

from deepwell.errors import UnsupportedError
from deepwell.planner.plan_values import PlanValues


@dataclass(frozen=True, slots=True, kw_only=True)
class LowLayers:
    """The low format of a plan and the run of layers that have it; those before and behind stay in bf16."""

    format: str  # "bf16" where no layer is low
    first: int
    last: int
    num_layers: int

    @property
    def at_start(self) -> int:
        return self.first

    @property
    def at_end(self) -> int:
        return self.num_layers - 1 - self.last

    @property
    def has_bf16_ends(self) -> bool:
        return self.format != "bf16" and bool(self.at_start or self.at_end)


def low_layers(plan: PlanValues) -> LowLayers:
    """Which layers leave bf16. Raises UnsupportedError where they are no single run of one format."""
    formats: dict[int, set[str]] = {}
    for variant in plan.workload.variants():
        low = {each[0] for _, each in variant.formats} - {"bf16"}
        if variant.formats:
            formats |= dict.fromkeys(variant.layers, low)
    count = plan.workload.ir.num_layers
    names = {name for low in formats.values() for name in low}
    if not names:
        return LowLayers(format="bf16", first=0, last=count - 1, num_layers=count)
    layers = sorted(layer for layer, low in formats.items() if low)
    first, last = layers[0], layers[-1]
    kept = [layer for layer in range(first, last + 1) if layer in formats and not formats[layer]]
    if kept or len(names) > 1:
        what = f"layer {kept[0]} stays in bf16 between lower ones" if kept else f"layers in {', '.join(sorted(names))}"
        raise UnsupportedError(f"precision: {what}; other engines get one format and bf16 at the ends alone")
    return LowLayers(format=names.pop(), first=first, last=last, num_layers=count)
