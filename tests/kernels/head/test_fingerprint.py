"""A fingerprint of a weight is another one after every change of one number, and of many."""

import pytest
import torch

from deepwell.formats.metrics import assert_bitwise_equal
from deepwell.kernels.head.fingerprint import fingerprint, fingerprint_ref


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_a_fingerprint_shows_every_change_of_one_number(everywhere, dtype) -> None:
    weight = torch.randn(67, 131, device=everywhere).to(dtype)  # more than one row of words, the last ragged
    before = fingerprint(weight)
    assert_bitwise_equal(before, fingerprint_ref(weight))
    assert_bitwise_equal(before, fingerprint(weight.T.contiguous().T))
    for place in ((0, 0), (66, 130), (33, 7)):
        weight[place] *= -1
        assert not torch.equal(fingerprint(weight), before)
        weight[place] *= -1
    assert_bitwise_equal(before, fingerprint(weight))
    assert fingerprint(weight[:0]).tolist() == [0, 0]
