"""Collectives by size and place: inside NVLink, across nodes, alone."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepwell.hardware.names import named_hardware
from deepwell.planner.comm import Network, all_reduce_s, all_to_all_s, gather_s, send_s
from deepwell.planner.efficiency import GpuConstants

MB = 1e6


@pytest.fixture(scope="module")
def h100s() -> Network:
    return Network.of(named_hardware("16x8xH100"), GpuConstants(nvlink=0.8, network=0.8, latency_us=10))


def test_a_group_of_one_costs_nothing(h100s: Network) -> None:
    assert gather_s(h100s, MB, 1) == all_reduce_s(h100s, MB, 1) == all_to_all_s(h100s, MB, 1) == 0.0


def test_a_ring_moves_all_but_its_own_share(h100s: Network) -> None:
    # 8 ranks inside NVLink: 7/8 of the buffer at 0.8 * 450 GB/s, plus latency.
    seconds = gather_s(h100s, 1000 * MB, 8)
    assert seconds == pytest.approx(1e9 * 7 / 8 / (0.8 * 450e9), rel=0.02)
    assert all_reduce_s(h100s, 1000 * MB, 8) == pytest.approx(2 * seconds)


def test_strided_groups_bring_one_nic_each_and_whole_nodes_all_of_theirs(h100s: Network) -> None:
    # Tensor parallelism of 8 leaves one rank per node in a data-parallel group: one NIC.
    assert h100s.ring(16, 8) == pytest.approx(0.8 * 50e9)
    # Without it 8 ranks of every node ring through 8 NICs, which is more than NVLink takes.
    assert h100s.ring(128, 1) == pytest.approx(min(0.8 * 450e9, 8 * 0.8 * 50e9))


def test_an_nvl72_rack_keeps_groups_inside_that_leave_an_hgx_board() -> None:
    constants = GpuConstants()
    rack, boards = (Network.of(named_hardware(name), constants) for name in ("16x4xGB200", "8x8xB200"))
    assert rack.local(64) == 64
    assert boards.local(64) < 64
    assert all_to_all_s(rack, 100 * MB, 64) < all_to_all_s(boards, 100 * MB, 64)


def test_one_copy_per_node_is_cheaper_than_one_per_expert(h100s: Network) -> None:
    assert all_to_all_s(h100s, 100 * MB, 64, 1, per_node=0.4) < all_to_all_s(h100s, 100 * MB, 64)


def test_a_message_inside_the_domain_is_faster(h100s: Network) -> None:
    assert send_s(h100s, 100 * MB, 1) < send_s(h100s, 100 * MB, 8)
    assert send_s(h100s, 0, 1) == 0.0


@settings(max_examples=60, deadline=None)
@given(
    size=st.sampled_from([2, 4, 8, 16, 32]), stride=st.sampled_from([1, 2, 4]), nbytes=st.floats(1.0, 1e10),
    better=st.floats(1.0, 4.0),
)  # fmt: skip
def test_more_bandwidth_is_never_slower_and_more_bytes_never_faster(
    size: int, stride: int, nbytes: float, better: float
) -> None:
    hw = named_hardware("16x8xH100")
    slow = Network.of(hw, GpuConstants(nvlink=0.2, network=0.2))
    for fast in (
        Network.of(hw, GpuConstants(nvlink=0.2 * better, network=0.2)),
        Network.of(hw, GpuConstants(nvlink=0.2, network=0.2 * better)),
    ):
        for collective in (gather_s, all_reduce_s, all_to_all_s):
            assert collective(fast, nbytes, size, stride) <= collective(slow, nbytes, size, stride)
    assert gather_s(slow, 2 * nbytes, size, stride) >= gather_s(slow, nbytes, size, stride)
