"""Local shapes and seconds of blocks: what the ranks do together is what the IR says; kernels obey the machine."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepwell.errors import ConfigError
from deepwell.graph.configs import published_config
from deepwell.graph.ir import IR
from deepwell.hardware.names import named_hardware
from deepwell.planner.efficiency import (
    DeviceSpeed,
    GpuConstants,
    attention_s,
    constants_key,
    device,
    gemm_s,
    gpu_constants,
)
from deepwell.planner.shard import LocalAttention, LocalBlock, RankSizes, local_block
from deepwell.planner.workload import Workload

MODELS = ("llama3-8b", "llama3-70b", "mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3", "gpt2")


@pytest.fixture(scope="module")
def irs() -> dict[str, IR]:
    configs = {name: published_config(name) for name in MODELS}
    configs["gpt2"]["vocab_size"] = 50304  # padded as trainers do, so that every split is even
    return {name: IR.from_config(config, dtype="bf16") for name, config in configs.items()}


def blocks_of(ir: IR, sizes: RankSizes) -> list[tuple[LocalBlock, int]]:
    """Every block on one rank with how often it occurs: layers, then stem and tail."""
    work = Workload(ir=ir, seq_len=sizes.seq_len, global_batch=1)
    found = [(local_block(ir.blocks[v.block].ops, v.formats, sizes), len(v.layers)) for v in work.variants()]
    return [*found, (local_block(ir.stem, (), sizes), 1), (local_block(ir.tail, (), sizes), 1)]


# Powers of two that divide the heads, experts and widths of every model here.
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("tp", "cp", "ep", "etp"), [(1, 1, 1, 1), (4, 1, 1, 1), (1, 2, 4, 1), (2, 2, 8, 1), (4, 1, 2, 4)]
)
def test_ranks_together_compute_the_flops_of_the_ir(
    irs: dict[str, IR], model: str, tp: int, cp: int, ep: int, etp: int
) -> None:
    ir, seq = irs[model], 2048
    sizes = RankSizes(micro_batch=2, seq_len=seq, tp=tp, cp=cp, ep=ep, etp=etp, sequence_parallel=tp > 1)
    flops = 0.0
    for block, count in blocks_of(ir, sizes):
        gemms = sum(g.flops for g in block.gemms)
        attention = sum(a.flops for a in block.attention)
        flops += count * (gemms + attention + block.matmul_flops)
    # Attention over cp ranks needs the whole sequence; the IR is asked for the same one.
    assert flops * tp * cp == pytest.approx(ir.flops(2, seq), rel=1e-6)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("tp", "ep", "etp"), [(1, 1, 1), (2, 1, 1), (1, 8, 1), (2, 4, 2)])
def test_ranks_together_hold_the_parameters_of_the_ir(
    irs: dict[str, IR], model: str, tp: int, ep: int, etp: int
) -> None:
    ir = irs[model]
    sizes = RankSizes(micro_batch=1, seq_len=1024, tp=tp, ep=ep, etp=etp)
    blocks = blocks_of(ir, sizes)
    dense = sum(block.dense_params * count for block, count in blocks)
    expert = sum(block.expert_params * count for block, count in blocks)
    assert expert * ep * etp + dense * tp >= ir.num_params * (1 - 1e-9)  # norms and routers are repeated on tp ranks
    repeated = (tp - 1) * sum(
        op.num_params * times
        for ops, times in ir.parts()
        for op in ops
        if op.kind == "norm" or op.role == "router" or op.part in ("q_a", "kv_a")
    )
    assert expert * ep * etp + dense * tp == pytest.approx(ir.num_params + repeated, rel=1e-6)


def test_key_heads_fewer_than_ranks_are_repeated(irs: dict[str, IR]) -> None:
    # Llama-3 8B has 8 key heads: 16 ranks hold one each, twice.
    sizes = RankSizes(micro_batch=1, seq_len=1024, tp=16)
    block = blocks_of(irs["llama3-8b"], sizes)[0][0]
    assert {g.part: g.n for g in block.gemms if g.part in ("k", "v")} == {"k": 128, "v": 128}
    assert block.attention[0].kv_heads == 1


def test_busy_experts_compute_more_rows(irs: dict[str, IR]) -> None:
    even = blocks_of(irs["qwen3-30b-a3b"], RankSizes(micro_batch=1, seq_len=1024, ep=8))[0][0]
    busy = blocks_of(irs["qwen3-30b-a3b"], RankSizes(micro_batch=1, seq_len=1024, ep=8, expert_load=1.5))[0][0]
    rows = [sum(g.m * g.groups for g in b.gemms if g.role == "experts") for b in (even, busy)]
    assert rows[1] == pytest.approx(1.5 * rows[0])


@pytest.fixture(scope="module")
def h200() -> DeviceSpeed:
    return device(named_hardware("H200").gpus[0])


# Measured on one H200 (hardware/machines/h200.json); a power-limited card moves by several percent from run to run.
@pytest.mark.parametrize("fmt", ["bf16", "fp8"])
def test_large_gemms_come_within_a_fifth_of_the_measured_ones(h200: DeviceSpeed, fmt: str) -> None:
    gpu = named_hardware("H200").gpus[0]
    curve = next(c for c in gpu.curves if c.format == {"bf16": "bf16", "fp8": "fp8_tensor"}[fmt])
    for point in curve.points:
        if point.k < 1024:
            continue  # the shallow shape is held by the next test
        seconds = gemm_s(h200, fmt, point.m, point.n, point.k)
        speed = 2 * point.m * point.n * point.k / seconds / 1e12
        assert speed == pytest.approx(point.tflops, rel=0.2), point


def test_shallow_and_small_gemms_are_less_efficient(h200: DeviceSpeed) -> None:
    def efficiency(m: int, n: int, k: int) -> float:
        return 2 * m * n * k / gemm_s(h200, "bf16", m, n, k) / h200.rate("bf16")

    assert efficiency(16384, 3072, 768) < efficiency(16384, 3072, 8192)  # prologue and epilogue of short products
    assert efficiency(256, 4096, 4096) < efficiency(8192, 4096, 4096)  # too few tiles for the SMs
    assert efficiency(129, 4096, 4096) < efficiency(128, 4096, 4096)  # a ragged tile is computed whole


def test_one_row_is_bound_by_reading_the_weight(h200: DeviceSpeed) -> None:
    seconds = gemm_s(h200, "bf16", 1, 16384, 16384)
    assert seconds >= 2 * 16384 * 16384 / h200.bytes_per_s


@settings(max_examples=60, deadline=None)
@given(
    m=st.integers(1, 40_000), n=st.integers(1, 40_000), k=st.integers(1, 40_000), groups=st.integers(1, 64),
    fmt=st.sampled_from(["bf16", "fp8"]),
)  # fmt: skip
def test_a_gemm_never_beats_the_machine(m: int, n: int, k: int, groups: int, fmt: str) -> None:
    dev = device(named_hardware("H100").gpus[0])
    seconds = gemm_s(dev, fmt, m, n, k, groups)
    assert seconds >= 2.0 * m * n * k * groups / dev.rate(fmt)
    assert seconds >= 2 * groups * m * n / dev.bytes_per_s
    assert gemm_s(dev, fmt, m, n, k + 512, groups) >= seconds


def test_attention_kernels_rank_as_published() -> None:
    a100 = device(named_hardware("A100-80").gpus[0])
    att = LocalAttention(
        batch=1, heads=32, kv_heads=32, qk_dim=128, v_dim=128, q_len=2048, kv_len=2048, pairs=2048 * 2049 / 2,
        causal=True,
    )  # fmt: skip
    total = {kernel: sum(attention_s(a100, att, kernel)) for kernel in ("flash2", "flash1", "fused_softmax", "unfused")}
    assert list(total) == sorted(total, key=lambda kernel: total[kernel])


def test_unfused_attention_pays_for_the_whole_square_at_length() -> None:
    dev = device(named_hardware("A100-80").gpus[0])

    def ratio(length: int) -> float:
        att = LocalAttention(
            batch=1, heads=8, kv_heads=8, qk_dim=128, v_dim=128, q_len=length, kv_len=length,
            pairs=length * (length + 1) / 2, causal=True,
        )  # fmt: skip
        return sum(attention_s(dev, att, "unfused")) / sum(attention_s(dev, att, "flash2"))

    assert ratio(8192) > 2.5


def test_every_gpu_has_at_most_ten_constants_and_says_what_they_were_fitted_on() -> None:
    for name in ("A100-80", "H100", "H200", "H800", "B200", "B300", "GB200", "GB300"):
        key = constants_key(named_hardware(name).gpus[0])
        assert isinstance(gpu_constants(key), GpuConstants)
    assert len(GpuConstants.__dataclass_fields__) <= 10


def test_a_gpu_without_a_known_peak_is_refused_by_name() -> None:
    gpu = replace(named_hardware("H100").gpus[0], peaks=(), name="mystery")
    with pytest.raises(ConfigError, match="mystery"):
        device(gpu)
