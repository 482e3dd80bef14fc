"""Gradients that outlive a replay of CUDA graphs, so that they may be accumulated over several calls.

A recorded backward writes gradients to the same memory each time, and autograd makes a parameter's first gradient that
very memory. Before a call that would write there again they are copied once; what follows is added to the copy.
"""

from collections.abc import Callable, Iterable

from torch import nn


class KeptGrads:
    """Gradients of these parameters, kept from one call to the next. Costs nothing where they were set to None."""

    def __init__(self, parameters: Callable[[], Iterable[nn.Parameter]]) -> None:
        self._parameters = parameters
        self._copies: dict[int, int] = {}  # parameter -> address of the copy that is its gradient

    def keep(self) -> int:
        """Copy gradients that lie where the next backward would write; returns how many."""
        copied = 0
        for parameter in self._parameters():
            grad = parameter.grad
            if grad is None:
                self._copies.pop(id(parameter), None)
            elif self._copies.get(id(parameter)) != grad.data_ptr():
                parameter.grad = grad.clone()
                self._copies[id(parameter)] = parameter.grad.data_ptr()
                copied += 1
        return copied
