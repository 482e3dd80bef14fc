"""A row's claims hold for the kernels that an H200 ran, and fail for those of another row.

The names come from `benchmarks/results`, where every step keeps what the profiler saw.
"""

import json
import time
from pathlib import Path

import pytest

from deepwell.bench.ran import Claim, Kernel, engine_claims, idle_us, peer_claims, problems, shares, watch

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
ROWS = {row["name"]: row for row in json.loads((RESULTS / "step-8b-4l-h200-2026-11-15.json").read_text())["rows"]}
FP8 = "fp8_row|fp8_row|fp8_row"
LINEARS = [f"layers.{layer}.{name}" for layer in range(4) for name in "qkvogud"]


def kernels(variant: str) -> list[Kernel]:
    return [Kernel(name=name, count=count, ms=ms) for name, count, ms in ROWS[variant]["kernels"]]


def claims(variant: str, *, head: bool = False) -> list[Claim]:
    schemes = dict.fromkeys([*LINEARS, *(["head"] if head else [])], FP8)
    return engine_claims(schemes, ROWS[variant]["passes"], "head")


def test_what_fp8_claims_is_what_ran() -> None:
    assert problems(claims("fp8"), kernels("fp8")) == []
    assert problems(claims("fp8_head", head=True), kernels("fp8_head")) == []


def test_torch_compile_ran_no_fp8_and_may_not_claim_it() -> None:
    assert problems(peer_claims(uses_fp8=False), kernels("torch")) == []
    assert problems(peer_claims(uses_fp8=True), kernels("torch")) == ["linears in FP8: 0 of at least 1 kernels ran"]


def test_fp8_claimed_over_bf16_kernels_fails_for_every_pass_that_fired() -> None:
    # The very mistake the check is for: the engine says FP8, the profiler saw torch.compile's kernels.
    found = problems(claims("fp8"), kernels("torch"))
    assert {text.split(":")[0] for text in found} >= {
        "linears in FP8",
        "pass rms_norm",
        "pass swiglu",
        "pass cross_entropy",
    }


def test_half_of_the_linears_is_too_few() -> None:
    half = [Kernel(name=k.name, count=k.count // 2, ms=k.ms) for k in kernels("fp8")]
    assert any("linears in FP8: 24 of at least 36" in text for text in problems(claims("fp8"), half))


def test_bf16_alone_may_run_no_fp8_gemm() -> None:
    bf16 = engine_claims({}, {"rms_norm": 9}, "head")
    assert any("everything in bf16" in text for text in problems(bf16, kernels("fp8")))


@pytest.mark.parametrize("variant", list(ROWS))
def test_the_shares_are_the_whole_and_gemms_are_the_largest(variant: str) -> None:
    found = shares(kernels(variant))
    assert sum(found.values()) == pytest.approx(sum(k.ms for k in kernels(variant)), abs=0.01)
    is_fp8 = variant.startswith(("fp8", "torchao"))
    assert found["attention"] > 30 and found["adamw"] > 6
    assert found["fp8 gemm" if is_fp8 else "bf16 gemm"] > 59
    assert (found["fp8 gemm"] == 0) != is_fp8


@pytest.mark.parametrize(
    ("spans", "idle"),
    [
        ([], 0),
        ([(5.0, 9.0)], 0),
        ([(0.0, 4.0), (4.0, 6.0)], 0),
        ([(7.0, 8.0), (0.0, 4.0)], 3),
        ([(0.0, 10.0), (1.0, 2.0), (9.0, 12.0), (15.0, 16.0)], 3),  # two streams: what runs beside another hides it
    ],
)
def test_a_gpu_is_idle_where_none_of_its_kernels_runs(spans: list[tuple[float, float]], idle: float) -> None:
    assert idle_us(spans) == idle


@pytest.mark.gpu
def test_a_host_that_sleeps_leaves_the_gpu_idle_and_every_step_is_counted_once() -> None:
    import torch

    a = torch.randn(4096, 4096, device="cuda")

    def step() -> None:
        torch.mm(a, a)
        torch.cuda.synchronize()
        time.sleep(0.02)
        torch.mm(a, a)

    step()
    found, idle_ms = watch(step, steps=3)
    assert found[0].count == 2 and found[0].ms > 0.1
    assert 20 < idle_ms < 40
