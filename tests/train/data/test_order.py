"""The order of an epoch is a permutation, another one for each seed and epoch, and the same for ever."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepwell.errors import ConfigError
from deepwell.train.data.order import Order


@settings(max_examples=30, deadline=None)
@given(length=st.integers(1, 3000), seed=st.integers(0, 2**63), epoch=st.integers(0, 10**6))
def test_each_sample_comes_once(length: int, seed: int, epoch: int) -> None:
    found = Order(length, seed, epoch)(np.arange(length))
    assert np.array_equal(np.sort(found), np.arange(length))


@settings(max_examples=30, deadline=None)
@given(
    length=st.integers(2, 2**62),
    seed=st.integers(0, 9),
    places=st.lists(st.integers(0, 2**62), min_size=2, unique=True),
)
def test_huge_epochs_need_no_memory_and_repeat_nothing(length: int, seed: int, places: list[int]) -> None:
    places = sorted({place % length for place in places})
    order = Order(length, seed, 0)
    found = order(places)
    assert len(set(found.tolist())) == len(places)
    assert 0 <= found.min() and found.max() < length
    # One lookup, and a lookup among others, are the same.
    assert [int(order([place])[0]) for place in places] == found.tolist()


def test_the_order_never_changes() -> None:
    # A checkpoint's cursor counts on this: other numbers here are another order for every run that was ever saved.
    assert Order(10, 0, 0)(range(10)).tolist() == GOLDEN[0]
    assert Order(10, 0, 1)(range(10)).tolist() == GOLDEN[1]
    assert Order(10**12, 7, 3)(range(4)).tolist() == GOLDEN[2]


GOLDEN = (
    [4, 8, 3, 2, 1, 5, 7, 6, 0, 9],
    [8, 4, 2, 9, 6, 1, 3, 5, 7, 0],
    [586818567524, 87978113619, 676841797173, 299121914940],
)


def test_seeds_and_epochs_differ_and_first_places_are_even() -> None:
    orders = {tuple(Order(50, seed, epoch)(range(50)).tolist()) for seed in range(10) for epoch in range(10)}
    assert len(orders) == 100
    firsts = np.bincount([int(Order(20, seed, 0)([0])[0]) for seed in range(1000)], minlength=20)
    assert firsts.min() > 22 and firsts.max() < 78  # 50 each, +-4 standard deviations
    # Neighbours do not stay neighbours.
    found = Order(10_000, 0, 0)(np.arange(10_000))
    assert np.mean(np.abs(np.diff(found)) < 100) < 0.04


@pytest.mark.parametrize("length", [0, -1, 2**62 + 1])
def test_a_wrong_length_is_refused(length: int) -> None:
    with pytest.raises(ConfigError, match="2\\^62"):
        Order(length, 0, 0)
    with pytest.raises(ConfigError, match="outside an epoch of 4"):
        Order(4, 0, 0)([4])
