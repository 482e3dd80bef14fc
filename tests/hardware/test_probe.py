"""probe() of this machine through a stand-in for NVML: what it reads, and what it says when it cannot."""

import json
import re
import sys
from pathlib import Path

import pytest

from deepwell.hardware import nvml
from deepwell.hardware.model import Hardware
from deepwell.hardware.nvml import largest_group
from deepwell.hardware.probe import probe


@pytest.fixture
def look(tmp_path: Path, fake_nvml):
    """Probe with a stand-in NVML, an empty file system and an empty environment."""

    def call(environ=None, **changes) -> Hardware:
        environ = {"DEEPWELL_CACHE_DIR": str(tmp_path / "cache"), **(environ or {})}
        return probe(nvml=fake_nvml(**changes), root=tmp_path, environ=environ)

    return call


def test_a_node_of_eight_is_read_whole(look):
    hw = look()
    gpu = hw.gpus[3]
    assert (hw.num_gpus, hw.nvlink_domain, hw.fabric.nvswitch, hw.notes) == (8, 8, True, ())
    assert (gpu.name, gpu.machine, gpu.index, gpu.uuid) == ("NVIDIA H200", "H200", 3, "GPU-3aaaaaaa-0000")
    assert (gpu.compute_capability, gpu.num_sms, gpu.memory_bytes) == ((9, 0), 132, 143_771 * 2**20)
    assert (gpu.sm_clock_mhz, gpu.max_sm_clock_mhz, gpu.power_limit_w) == (345, 1980, 700.0)
    assert (gpu.driver, gpu.cuda_driver, gpu.mig_enabled) == ("580.65.06", "13.0", False)
    assert gpu.peak_tflops("bf16").value == 989 and gpu.figure("copy_gb_per_s").tier == "table"
    assert gpu.figure("memory_bytes").source == "NVML"
    assert (hw.fabric.nvlink_gb_per_s, hw.fabric.pcie_gen, hw.fabric.pcie_gb_per_s) == (450, 5, 63.0)
    assert hw.fabric.figure("allreduce_gb_per_s").tier == "table"
    assert hw.fabric.link(0, 7) == "NV18" and hw.fabric.link(2, 2) == "X"
    assert "GPU7  NV18" in str(hw)
    assert Hardware.from_json(hw.to_json()) == hw


def test_nvml_is_shut_down_again(tmp_path, fake_nvml):
    nvml = fake_nvml()
    probe(nvml=nvml, root=tmp_path, environ={"DEEPWELL_CACHE_DIR": str(tmp_path)})
    assert nvml.was_shut_down


def test_names_may_come_as_bytes(look):
    # Older bindings return bytes, with the C string's end.
    assert look(name=b"NVIDIA H200\0").gpus[0].name == "NVIDIA H200"


def test_gpus_without_nvlink_show_their_pcie_path(look):
    hw = look(nvlinks=0, name="NVIDIA L40S", cc=(8, 9), cores=142 * 128, memory=46068 * 2**20)
    assert (hw.nvlink_domain, hw.fabric.nvswitch, hw.fabric.nvlink_gb_per_s) == (1, False, None)
    assert hw.fabric.link(0, 1) == "NODE" and hw.fabric.link(0, 4) == "SYS"
    assert hw.group_gb_per_s(8).value == 63


def test_bridged_pairs_form_domains_of_two(look):
    # Links 0-3 of each GPU end in its neighbour: 0-1, 2-3, ...
    peers = {(gpu, link): gpu ^ 1 for gpu in range(8) for link in range(4)}
    hw = look(nvlinks=4, peers=peers)
    assert (hw.nvlink_domain, hw.fabric.nvswitch) == (2, False)
    assert hw.fabric.link(0, 1) == "NV4" and hw.fabric.link(1, 2) == "NODE"
    assert hw.fabric.nvlink_gb_per_s == 100


def test_groups_grow_through_common_members():
    assert largest_group(5, [(0, 1), (3, 4), (1, 2)]) == 3
    assert largest_group(0, []) == 1


def test_an_unknown_gpu_gets_derived_speeds_and_a_note(look):
    hw = look(name="NVIDIA H999", memory=100 * 2**30, bus_width=5120, memory_clock=2619, cores=66 * 128)
    gpu = hw.gpus[0]
    assert gpu.machine is None and any("NVIDIA H999" in note for note in hw.notes)
    assert gpu.memory_gb_per_s == pytest.approx(2619e6 * 640 * 2 / 1e9)
    assert gpu.figure("memory_gb_per_s").source.startswith("derived: 2619 MHz x 5120 bit")
    peak = gpu.peak_tflops("bf16")
    # Half the SMs of an H100.
    assert peak.source == "derived: H100's peak x 66 / 132 SMs" and peak.value == 494.5


def test_an_unknown_gpu_of_an_unknown_architecture_has_no_peaks(look):
    hw = look(name="NVIDIA Z1", cc=(14, 0))
    assert hw.gpus[0].peaks == () and hw.gpus[0].supports("bf16") and not hw.supports("nvfp4")
    assert "NVIDIA Z1" in str(hw)


def test_a_gpu_in_mig_mode_promises_no_speeds(look, fake_nvml, monkeypatch):
    monkeypatch.setattr(fake_nvml, "_nvmlDeviceGetMigMode", lambda self, handle: [1, 1])
    hw = look()
    assert hw.gpus[0].mig_enabled and hw.gpus[0].peaks == () and any("MIG mode" in note for note in hw.notes)
    assert "MIG" in str(hw)


# Calls that virtual GPUs, MIG slices and containers refuse, and the field that is then not known.
REFUSALS = {
    "nvmlDeviceGetName": "name",
    "nvmlDeviceGetUUID": "uuid",
    "nvmlDeviceGetMemoryInfo": "memory_bytes",
    "nvmlDeviceGetCudaComputeCapability": "compute_capability",
    "nvmlDeviceGetClockInfo": "sm_clock_mhz",
    "nvmlDeviceGetMaxClockInfo": "max_sm_clock_mhz",
    "nvmlDeviceGetEnforcedPowerLimit": "power_limit_w",
    "nvmlDeviceGetPciInfo": "pci_bus_id",
    "nvmlSystemGetDriverVersion": "driver",
    "nvmlSystemGetCudaDriverVersion_v2": "cuda_driver",
}


@pytest.mark.parametrize("error", ["NVMLError_NotSupported", "NVMLError_NoPermission"])
@pytest.mark.parametrize(("function", "field"), REFUSALS.items())
def test_each_refused_call_leaves_a_gap_and_a_note(look, fake_nvml, function, field, error):
    hw = look(refuse={function: getattr(fake_nvml, error)("refused by the test")})
    assert hw.num_gpus == 8
    value = getattr(hw.gpus[0], field)
    assert value is None or value == "unknown NVIDIA GPU"
    assert any("refused by the test" in note for note in hw.notes)
    assert isinstance(str(hw), str) and Hardware.from_json(hw.to_json()) == hw


def test_one_note_covers_all_gpus_that_refuse_the_same(look, fake_nvml):
    hw = look(refuse={"nvmlDeviceGetEnforcedPowerLimit": fake_nvml.NVMLError_NotSupported("no")})
    assert [note for note in hw.notes if "power limit" in note] == [
        "power limit of GPU 0, 1, 2, 3, 4, 5, 6, 7 is not known: NVML answered: no"
    ]


def test_all_calls_refused_is_still_an_answer(look, fake_nvml):
    names = [name[1:] for name in vars(fake_nvml) if name.startswith("_nvmlDeviceGet")]
    kept = ("nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex")
    hw = look(refuse={name: fake_nvml.NVMLError_NoPermission("denied") for name in names if name not in kept})
    assert hw.num_gpus == 8 and hw.memory_bytes is None and hw.native_formats == ()
    assert not hw.supports("bf16") and "not known" in hw.gpus[0].why_not("bf16")


def test_a_gpu_without_mig_is_no_reason_for_a_note(look, fake_nvml):
    hw = look(refuse={"nvmlDeviceGetMigMode": fake_nvml.NVMLError_NotSupported("no MIG")})
    assert hw.gpus[0].mig_enabled is False and hw.notes == ()


def test_an_nvml_that_lacks_a_function_is_tolerated(look, fake_nvml, monkeypatch):
    # nvidia-ml-py of some years ago.
    monkeypatch.delattr(fake_nvml, "_nvmlDeviceGetNumGpuCores")
    hw = look()
    assert hw.gpus[0].num_sms == 132  # from the table: the name is known
    assert any("does not have the call" in note for note in hw.notes)


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        ("NVMLError_LibraryNotFound", "no NVIDIA driver"),
        ("NVMLError_DriverNotLoaded", "modprobe"),
        ("NVMLError_NoPermission", "/dev/nvidia"),
        ("NVMLError", "nvidia-smi"),
    ],
)
def test_without_nvml_the_cpu_is_the_device(look, fake_nvml, error, advice):
    hw = look(refuse={"nvmlInit": getattr(fake_nvml, error)("cannot")})
    assert (hw.kind, hw.num_gpus, hw.gpus[0].kind) == ("cpu", 1, "cpu")
    assert any(advice in note for note in hw.notes)
    assert not hw.gpus[0].is_blackwell and hw.supports("fp32") and not hw.supports("mxfp8")


def test_a_driver_with_no_gpu_gives_the_cpu(look):
    hw = look(count=0)
    assert hw.kind == "cpu" and any("no GPU" in note for note in hw.notes)


# As CUDA reads it: indices, UUIDs or their beginnings; the list ends at the first that does not exist.
@pytest.mark.parametrize(
    ("value", "indices"),
    [("2,0", [2, 0]), ("GPU-5aa,1", [5, 1]), ("0,9,1", [0]), ("3,3", [3]), (" 1 , 2 ", [1, 2])],
)
def test_cuda_visible_devices_is_honoured(look, value, indices):
    hw = look(environ={"CUDA_VISIBLE_DEVICES": value})
    assert [gpu.index for gpu in hw.gpus] == indices
    assert any("CUDA_VISIBLE_DEVICES" in note for note in hw.notes)


@pytest.mark.parametrize("value", ["", "-1", "MIG-1234"])
def test_cuda_visible_devices_can_hide_everything(look, value):
    assert look(environ={"CUDA_VISIBLE_DEVICES": value}).kind == "cpu"


def test_numa_nodes_and_infiniband_are_read_from_sys(look, tmp_path):
    for i in range(8):
        folder = tmp_path / f"sys/bus/pci/devices/0000:{i + 16:02x}:00.0"
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{i // 4}\n")
    for i in range(8):
        port = tmp_path / f"sys/class/infiniband/mlx5_{i}/ports/1"
        port.mkdir(parents=True)
        (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
        (port / "state").write_text("4: ACTIVE\n")
    hw = look()
    assert [gpu.numa_node for gpu in hw.gpus] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert len(hw.fabric.nics) == 8 and hw.fabric.nic_gb_per_s == 50
    assert hw.fabric.figure("nic_gb_per_s").source.startswith("derived: mlx5_0:1")


def test_the_real_machine_can_be_probed():
    hw = probe()
    assert hw.num_gpus >= 1 and hw.host is not None
    assert Hardware.from_json(hw.to_json()) == hw
    assert json.loads(hw.to_json())["schema"] == 1


def test_the_stand_in_speaks_the_language_of_the_real_nvml(fake_nvml):
    # Else the tests above could pass on names that pynvml does not have.
    pynvml = pytest.importorskip("pynvml")
    source = Path(nvml.__file__).read_text(encoding="utf-8") + Path(sys.modules[probe.__module__].__file__).read_text(
        encoding="utf-8"
    )
    functions = set(re.findall(r"\bnvml(?:Device|System|Init|Shutdown)\w*", source))
    assert len(functions) > 20
    assert [name for name in sorted(functions) if not hasattr(pynvml, name)] == []
    assert [name for name in vars(fake_nvml) if name.startswith("_nvml") and not hasattr(pynvml, name[1:])] == []
    levels = ("INTERNAL", "SINGLE", "MULTIPLE", "HOSTBRIDGE", "NODE", "SYSTEM")
    assert [getattr(pynvml, f"NVML_TOPOLOGY_{level}") for level in levels] == [0, 10, 20, 30, 40, 50]
