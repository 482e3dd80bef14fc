"""The named recipes, as rules. Pure, no torch.

bf16    Everything in bf16: the baseline.
fp8     One scale per tensor, E4M3 forward and E5M2 gradients, the hybrid that every FP8 GPU runs; `scaling="row"` or
        "1x128" is E4M3 everywhere.
mxfp8   Every linear layer, E4M3 everywhere (arXiv 2506.08027; E5M2 gradients diverged on an 8B model).
nvfp4   Every linear layer but those of the first 2 and the last 15% of blocks, which stay bf16 (arXiv 2509.25149:
        the first 2 and last 8 of 62). bf16 and not mxfp8, because that is what the published runs trained with;
        `ends="mxfp8"` trades that for speed. Stochastic rounding on gradients, Hadamard on wgrad operands and 16x16
        weights are the format's defaults. `forward_bf16_from=step` runs the forward in bf16 from there on: started
        before the learning rate decays it took the loss gap from about 1.5% to 0.5% (ibid., appendix D).

In all of them head, router, embeddings, norms and softmax attention stay in high precision; that is built into the
order of precedence (`rules`) and needs no rule here.
"""

import difflib
from collections.abc import Mapping

from deepwell.errors import ConfigError
from deepwell.precision.gemm_format import precision
from deepwell.precision.rules import Rule, make_rule

RECIPES = ("bf16", "fp8", "mxfp8", "nvfp4")


def recipe_rules(
    name: str, *, forward_bf16_from: int | None, ends: str | None, options: Mapping[str, bool | str]
) -> tuple[Rule, ...]:
    """The rules of a recipe. Raises ConfigError where there is no such recipe or an option is not its own."""
    wanted = name.strip().lower() if isinstance(name, str) else name
    wanted = "nvfp4" if wanted == "fp4" else wanted
    if wanted not in RECIPES:
        near = difflib.get_close_matches(str(wanted), RECIPES, n=2)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise ConfigError(
            f"recipe {name!r} is not known; {hint}recipes: {', '.join(RECIPES)}; "
            "for another format build a PrecisionPolicy and set_default"
        )
    origin = f"recipe {wanted}"
    rules = [make_rule(None, precision(wanted, options), origin=origin)]
    if wanted != "nvfp4":
        for argument, value in (("forward_bf16_from", forward_bf16_from), ("ends", ends)):
            if value is not None:
                raise ConfigError(f"{argument} is {value!r}, but recipe {wanted} has no such option; nvfp4 has")
        return tuple(rules)
    at_ends = precision(ends or "bf16")
    rules += [make_rule(pattern, at_ends, origin=origin) for pattern in ("first 2 blocks", "last 15% blocks")]
    if forward_bf16_from is not None:
        rules.append(make_rule(None, precision("bf16"), "fwd", (forward_bf16_from, None), origin))
        if at_ends.is_low:
            # Positions win over the default, so the ends need the switch said for themselves.
            rules += [
                make_rule(pattern, precision("bf16"), "fwd", (forward_bf16_from, None), origin)
                for pattern in ("first 2 blocks", "last 15% blocks")
            ]
    return tuple(rules)
