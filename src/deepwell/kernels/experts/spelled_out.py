"""A switch: experts run as grouped products in plain torch, one by one, for who sees and reads single products.

Capture reads them from the graph; samples of training and the check for fragile GEMMs see them as they run.
"""

from collections.abc import Iterator
from contextlib import contextmanager

# A global, since Dynamo guards on one and knows no context variables.
_is_on = [False]


@contextmanager
def spelled_out() -> Iterator[None]:
    """While it is on, `experts_mlp` is its reference."""
    before, _is_on[0] = _is_on[0], True
    try:
        yield
    finally:
        _is_on[0] = before


def is_spelled_out() -> bool:
    """Whether the switch is on."""
    return _is_on[0]
