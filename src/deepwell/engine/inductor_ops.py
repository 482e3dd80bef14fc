"""Tell Inductor of our ops before it meets them.

An op that Inductor does not know becomes a fallback when it is first met, with the same result, but torch 2.11 then
prints the op with everything that leads to its inputs, whether anybody reads the log or not. Our ops read one another
along the whole depth of a model, both ways of every fork: four layers take hours to print. One that is a plain product
is given as such: Inductor may write it in place or with its neighbours.
"""

from typing import Any

import torch
from torch._inductor.lowering import (
    lowerings,
    make_fallback,
    mul,
    register_lowering,
    tag_to_layout_constraint,
    to_dtype,
)
from torch._library.utils import get_layout_constraint_tag

from deepwell.kernels.head.torch_ops import ops
from deepwell.kernels.torch_library import NAMESPACE


def register_ops() -> None:
    """Make every op of Deepwell a fallback, with the layout that Inductor would choose itself, or a product."""
    scale_by = ops.scale_by.default
    if scale_by not in lowerings:
        register_lowering(scale_by, type_promotion_kind=None)(_scale_by)
    prefix = f"{NAMESPACE}::"
    for name in torch._C._dispatch_get_all_op_names():
        if not name.startswith(prefix):
            continue
        op = getattr(ops, name.removeprefix(prefix).partition(".")[0]).default
        if op not in lowerings:
            constraint = tag_to_layout_constraint(get_layout_constraint_tag(op, with_default=True))
            make_fallback(op, layout_constraint=constraint, warn=False)


def _scale_by(x: Any, factor: Any) -> Any:
    """`kernels.head.scale_by_scalar.scale_by_ref` of what Inductor has in the place of tensors."""
    return to_dtype(mul(to_dtype(x, torch.float32), to_dtype(factor, torch.float32)), x.get_dtype())
