"""The kernel catalog: data that parses, choices that fit the device and waste little."""

import pytest

from deepwell.hardware.probe import probe
from deepwell.planner.catalog import KernelConfig, catalog, choose_kernel
from deepwell.planner.shard import LocalGemm


def gemm(m: int, n: int, k: int, fmt: str = "mxfp8", groups: int = 1, role: str = "mlp") -> LocalGemm:
    return LocalGemm(
        name="mlp.up_proj", role=role, part="up", m=m, n=n, k=k, groups=groups, formats=(fmt, fmt, fmt),
        quantizes_input=True,
    )  # fmt: skip


def test_every_configuration_has_a_source_and_a_sensible_tile() -> None:
    names = [c.name for c in catalog()]
    assert len(set(names)) == len(names)
    for config in catalog():
        assert config.source
        assert config.op in ("gemm", "grouped_gemm")
        assert all(size % 16 == 0 for size in config.tile)


def test_waste_is_counted_in_tiles_and_waves() -> None:
    config = KernelConfig(
        name="x", op="gemm", formats=("bf16",), capability=(9,), tile=(128, 128, 64), alignment=8, source="test"
    )
    assert config.useful(128, 128, 1, num_sms=1) == 1.0
    assert config.useful(129, 128, 1, num_sms=1) == pytest.approx(129 / 256)  # a second, nearly empty tile
    assert config.useful(128, 128, 1, num_sms=4) == 0.25  # three SMs wait


def test_few_rows_get_a_small_tile_and_many_a_large_one() -> None:
    gpu = probe("B200").gpus[0]
    few, many = choose_kernel(gemm(128, 4096, 4096), gpu), choose_kernel(gemm(65536, 8192, 8192), gpu)
    assert few.tile[0] * few.tile[1] < many.tile[0] * many.tile[1]


def test_the_device_decides_what_is_possible() -> None:
    assert choose_kernel(gemm(4096, 4096, 4096), probe("B200").gpus[0]).kernel.startswith("tcgen05")
    assert choose_kernel(gemm(4096, 4096, 4096), probe("H100").gpus[0]).kernel == "hopper-mxfp8-as-fp8"
    grouped = choose_kernel(gemm(512, 2048, 7168, groups=8, role="experts"), probe("B200").gpus[0])
    assert grouped.op == "grouped_gemm"
    assert "no configuration" in choose_kernel(gemm(64, 64, 64, "nvfp4"), probe("A100-80").gpus[0]).note


def test_ragged_dimensions_are_said() -> None:
    assert "k padded" in choose_kernel(gemm(4096, 4096, 4100), probe("B200").gpus[0]).note
