"""Seconds of collectives by algorithm, size and where the group's ranks stand. Pure.

    all-gather, reduce-scatter    (n-1)/n * S / bandwidth + latency         S: the whole buffer
    all-reduce                    twice that
    all-to-all                    what leaves the rank, NVLink and network parts apart
    send                          S / bandwidth + latency

A group of `size` ranks, `stride` apart, has `local` ranks in each NVLink domain. Inside one domain NVLink carries it;
across domains every rank of the group brings its own NIC, so a ring gets min(NVLink, local * NIC) per rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from deepwell.hardware.model import Hardware
from deepwell.planner.efficiency import GpuConstants

# Latency of one more doubling of the group across nodes, and of NVLink peers; NCCL's own tuning model has 6.6 to 14 us
# for a ring's base latency (AutoParallel's port of tuning.cc).
_HOP_US = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The fabric in bytes per second and rank, derated by what collectives reach."""

    nvlink: float
    nic: float
    domain: int
    latency_s: float
    gpus: int

    @classmethod
    def of(cls, hw: Hardware, constants: GpuConstants, scale: float = 1.0, network_scale: float = 1.0) -> Network:
        """The scales are the stack's: time over what the fabric's curve says, inside NVLink and across nodes."""
        fabric = hw.fabric
        nvlink = fabric.nvlink_gb_per_s or fabric.pcie_gb_per_s or 10.0
        nic = fabric.nic_gb_per_s or 12.5  # 100 Gb/s where nobody says
        return cls(
            nvlink=nvlink * 1e9 * constants.nvlink / scale,
            nic=nic * 1e9 * constants.network / network_scale,
            domain=max(1, hw.nvlink_domain if fabric.nvlink_gb_per_s else hw.gpus_per_node),
            latency_s=constants.latency_us * 1e-6,
            gpus=hw.num_gpus,
        )

    def local(self, size: int, stride: int = 1) -> int:
        """Ranks of the group that share one NVLink domain."""
        if size * stride <= self.domain or self.gpus <= self.domain:
            return size
        return max(1, min(size, self.domain // stride))

    def ring(self, size: int, stride: int = 1) -> float:
        local = self.local(size, stride)
        return self.nvlink if local >= size else min(self.nvlink, local * self.nic)

    def latency(self, size: int, stride: int = 1) -> float:
        nodes = size / self.local(size, stride)
        return self.latency_s * (1 + 0.1 * math.log2(max(size, 1))) + _HOP_US * 1e-6 * math.log2(max(nodes, 1))


def gather_s(net: Network, nbytes: float, size: int, stride: int = 1) -> float:
    """All-gather to, or reduce-scatter of, `nbytes` on every rank."""
    if size <= 1 or nbytes <= 0:
        return 0.0
    return nbytes * (size - 1) / size / net.ring(size, stride) + net.latency(size, stride)


def all_reduce_s(net: Network, nbytes: float, size: int, stride: int = 1) -> float:
    return 2.0 * gather_s(net, nbytes, size, stride)


def all_to_all_s(net: Network, nbytes: float, size: int, stride: int = 1, per_node: float = 1.0) -> float:
    """Every rank sends `nbytes`, spread evenly over the group. `per_node`: copies that cross the network over all."""
    if size <= 1 or nbytes <= 0:
        return 0.0
    local = net.local(size, stride)
    inside = nbytes * (local - 1) / size / net.nvlink
    across = nbytes * (size - local) / size * per_node / net.nic
    return max(inside, across) + net.latency(size, stride)


def send_s(net: Network, nbytes: float, stride: int) -> float:
    """A message to the rank `stride` further on."""
    if nbytes <= 0:
        return 0.0
    bandwidth = net.nvlink if stride * 2 <= net.domain or net.gpus <= net.domain else net.nic
    return nbytes / bandwidth + net.latency_s
