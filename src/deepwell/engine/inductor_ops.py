"""Tell Inductor of our ops before it meets them.

An op that Inductor does not know becomes a fallback when it is first met, with the same result, but torch 2.11 then
prints the op with everything that leads to its inputs, whether anybody reads the log or not. Our ops read one another
along the whole depth of a model, both ways of every fork: four layers take hours to print.
"""

import torch
from torch._inductor.lowering import lowerings, make_fallback, tag_to_layout_constraint
from torch._library.utils import get_layout_constraint_tag

from deepwell.kernels import library


def register_fallbacks() -> None:
    """Make every op of the library a fallback, with the layout that Inductor would choose itself."""
    prefix = f"{library.NAMESPACE}::"
    for name in torch._C._dispatch_get_all_op_names():
        if not name.startswith(prefix):
            continue
        op = getattr(getattr(torch.ops, library.NAMESPACE), name.removeprefix(prefix).partition(".")[0]).default
        if op not in lowerings:
            constraint = tag_to_layout_constraint(get_layout_constraint_tag(op, with_default=True))
            make_fallback(op, layout_constraint=constraint, warn=False)
