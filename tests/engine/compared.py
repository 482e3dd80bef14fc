"""A function whose graph the passes rewrite, beside the function itself: values, gradients, what passes counted."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, fx

from deepwell.engine.passes import pipeline
from deepwell.engine.passes.work import BackendOptions, Work

Case = tuple[Callable[..., Any], list[Tensor]]


def rewritten(
    function: Callable[..., Any], *, dynamic: bool | None = None
) -> tuple[Callable[..., Any], dict[str, int]]:
    """A function whose graph all passes of Dynamo's level rewrite, and what they counted."""
    options = BackendOptions(fuse_head=True)

    def backend(graph_module: fx.GraphModule, _: Any) -> Callable[..., Any]:
        work = Work(options=options)
        pipeline.run(pipeline.DYNAMO, graph_module.graph, work)
        graph_module.graph.lint()
        graph_module.recompile()
        assert not work.deferred
        return graph_module.forward

    return torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic), options.counts


def outcome(function: Callable[..., Any], inputs: list[Tensor]) -> tuple[list[Tensor], list[Tensor | None]]:
    """Values and gradients of a function; it may write into what it gets."""
    torch.manual_seed(7)
    leaves = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
    out = function(*(x * 1 if x.is_floating_point() and x.requires_grad else x for x in leaves))
    outs = list(out) if isinstance(out, tuple) else [out]
    total = sum((o.float() * torch.linspace(0.5, 1.5, o.numel()).view(o.shape)).sum() for o in outs)
    if isinstance(total, Tensor) and total.requires_grad:
        total.backward()
    return [o.detach() for o in outs], [x.grad for x in leaves]


def check(
    function: Callable[..., Any], inputs: list[Tensor], *, dynamic: bool | None = None, names: Sequence[str] = ()
) -> dict[str, int]:
    """Assert that the rewritten function gives what eager gives. Returns what passes counted.

    `names` say what each value and each gradient belongs to.
    """
    torch._dynamo.reset()
    run, counts = rewritten(function, dynamic=dynamic)
    want, got = outcome(function, inputs), outcome(run, inputs)
    low = any(x.dtype is torch.bfloat16 for x in inputs)
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if low else {"rtol": 1e-4, "atol": 1e-5}
    pairs = zip((*got[0], *got[1]), (*want[0], *want[1]), strict=True)
    for (ours, theirs), name in zip_longest(pairs, names, fillvalue=""):
        assert (ours is None) == (theirs is None), name
        if ours is not None and theirs is not None:
            assert ours.dtype == theirs.dtype, name
            scale = max(1.0, float(theirs.float().abs().max())) if low and theirs.numel() else 1.0
            say = partial("{}: {}".format, name)
            torch.testing.assert_close(
                ours.float() / scale, theirs.float() / scale, equal_nan=True, msg=say, **tolerance
            )
    return {name: count for name, count in counts.items() if count}


def check_all(cases: Mapping[str, Case], dtype: torch.dtype = torch.float32) -> dict[str, int]:
    """The same for many functions, whose float32 inputs have another dtype: one program, since compiling takes long."""
    flat, parts = list[Tensor](), list[tuple[Callable[..., Any], slice]]()
    of_values, of_inputs = list[str](), list[str]()
    for name, (function, inputs) in cases.items():
        own = [x.detach().to(dtype).requires_grad_(x.requires_grad) if x.dtype is torch.float32 else x for x in inputs]
        parts.append((function, slice(len(flat), len(flat) + len(own))))
        flat += own
        of_inputs += [name] * len(own)
        of_values += [name] * len(outcome(function, own)[0])

    def program(*given: Tensor) -> tuple[Tensor, ...]:
        made = [function(*given[part]) for function, part in parts]
        return tuple(item for out in made for item in (out if isinstance(out, tuple) else (out,)))

    return check(program, flat, names=(*of_values, *of_inputs))
