"""The host: /proc and /sys as files of the test's own."""

from pathlib import Path

import pytest

from deepwell.hardware.amx import bf16_fault
from deepwell.hardware.host import cpu_device, read_host, read_nics

XEON = """processor\t: {i}
model name\t: Test Xeon
cpu MHz\t\t: 2000.000
physical id\t: {socket}
core id\t\t: {core}
flags\t\t: fpu avx2 fma avx512f avx512_bf16 amx_tile amx_bf16 movbe
"""


def _write(root: Path, path: str, text: str) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.fixture
def xeon(tmp_path: Path) -> Path:
    # Two sockets of two cores with two threads each.
    blocks = [XEON.format(i=i, socket=i // 4, core=i // 2 % 2) for i in range(8)]
    _write(tmp_path, "proc/cpuinfo", "\n".join(blocks))
    _write(tmp_path, "proc/meminfo", "MemTotal:       1048576 kB\nMemFree: 1 kB\n")
    return tmp_path


def test_cores_threads_and_sockets_are_distinguished(xeon):
    host = read_host(xeon)
    assert (host.cpu, host.num_threads, host.num_cores, host.num_sockets) == ("Test Xeon", 8, 4, 2)
    assert host.memory_bytes == 2**30
    assert host.instruction_sets == ("avx2", "fma", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16")


def test_a_container_limit_counts_as_the_memory(xeon):
    _write(xeon, "sys/fs/cgroup/memory.max", "536870912\n")
    assert read_host(xeon).memory_bytes == 2**29
    _write(xeon, "sys/fs/cgroup/memory.max", "max\n")
    assert read_host(xeon).memory_bytes == 2**30


def test_the_cpu_can_be_planned_for(xeon):
    gpu = cpu_device(read_host(xeon))
    assert gpu.kind == "cpu" and gpu.memory_bytes == 2**30 and gpu.num_sms >= 1
    assert gpu.native_formats == ("fp32", "bf16")
    peak = gpu.peak_tflops("fp32")
    assert peak.value == pytest.approx(gpu.num_sms * 2e9 * 16 * 2 / 1e12) and peak.source.startswith("derived")
    assert gpu.memory_gb_per_s and gpu.figure("memory_gb_per_s").source.startswith("derived")
    assert "emulation" in gpu.why_not("mxfp8")


def test_arm_flags_are_read_too(tmp_path):
    _write(tmp_path, "proc/cpuinfo", "processor\t: 0\nFeatures\t: fp asimd sve2 bf16 i8mm\n")
    assert read_host(tmp_path).instruction_sets == ("asimd", "sve2", "bf16", "i8mm")


def test_a_system_without_proc_still_answers(tmp_path):
    # macOS has neither /proc nor /sys.
    host = read_host(tmp_path)
    assert host.num_cores and host.os
    assert cpu_device(host).kind == "cpu"


def test_only_real_ports_are_listed(tmp_path):
    for name, speed, state in (("eth0", "100000", "up"), ("eth1", "-1", "down")):
        _write(tmp_path, f"sys/class/net/{name}/speed", speed)
        _write(tmp_path, f"sys/class/net/{name}/operstate", state)
        _write(tmp_path, f"sys/class/net/{name}/device/numa_node", "-1" if name == "eth1" else "1")
    _write(tmp_path, "sys/class/net/docker0/speed", "10000")  # a bridge: no device behind it
    nics = read_nics(tmp_path)
    assert [(nic.name, nic.gb_per_s, nic.state, nic.numa_node) for nic in nics] == [
        ("eth0", 12.5, "up", 1),
        ("eth1", None, "down", None),
    ]


# A child that dies of SIGILL, one that fails, one that works: the three answers of a CPU that announces AMX.
@pytest.mark.parametrize(
    ("script", "piece"),
    [("kill -ILL $$", "ONEDNN_MAX_CPU_ISA"), ("echo broken >&2; exit 3", "broken"), ("exit 0", "")],
)
def test_a_trapping_amx_is_found_without_dying(script, piece):
    fault = bf16_fault(("amx_tile",), command=("sh", "-c", script))
    assert piece in fault and bool(fault) == bool(piece)


def test_without_amx_nothing_is_started():
    assert bf16_fault(("avx2",), command=("sh", "-c", "exit 1")) == ""
