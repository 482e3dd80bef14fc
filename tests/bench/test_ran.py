"""A row's claims hold for the kernels that an H200 ran, and fail for those of another row.

The names come from `benchmarks/results`, where every step keeps what the profiler saw.
"""

import json
import re
import time
from pathlib import Path

import pytest

from deepwell.bench.ran import (
    Claim,
    Kernel,
    attention_claims,
    candidate_claims,
    engine_claims,
    idle_us,
    peer_claims,
    problems,
    shares,
    watch,
)
from deepwell.kernels import experts

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
ROWS = {row["name"]: row for row in json.loads((RESULTS / "step-8b-4l-h200-2026-11-15.json").read_text())["rows"]}
_ATTENTION = RESULTS / "attention-h200-2026-11-15.json"
FP8 = "fp8_row|fp8_row|fp8_row"
LINEARS = [f"layers.{layer}.{name}" for layer in range(4) for name in "qkvogud"]


def rows_of(name: str) -> dict[str, dict]:
    return {row["name"]: row for row in json.loads((RESULTS / name).read_text())["rows"]}


def kernels_in(row: dict) -> list[Kernel]:
    return [Kernel(name=name, count=count, ms=ms) for name, count, ms in row["kernels"]]


def kernels(variant: str) -> list[Kernel]:
    return kernels_in(ROWS[variant])


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


def test_products_with_one_scale_are_seen_and_scales_of_rows_are_not_taken_for_them() -> None:
    one = rows_of("step-1b-16l-row-factors-h200-2026-11-16.json")["fp8_cg"]
    rows = rows_of("step-1b-16l-row-scales-h200-2026-11-16.json")["fp8_cg"]
    said = engine_claims(dict.fromkeys(["layers.0.q"], FP8), one["passes"], "head")
    assert any(claim.text == "pass row_factors" for claim in said)
    assert problems(said, kernels_in(one)) == []
    assert [text.split(":")[0] for text in problems(said, kernels_in(rows))] == ["pass row_factors"]


def test_kept_codes_are_seen() -> None:
    rows = rows_of("step-1b-16l-h200-2026-11-16.json")
    passes = rows["fp8_cg_cached"]["passes"]
    assert passes["cached_weights"] == 64
    said = engine_claims(dict.fromkeys(["layers.0.q"], FP8), passes, "head")
    assert problems(said, kernels_in(rows["fp8_cg_cached"])) == []
    assert any("cached_weights" in text for text in problems(said, kernels_in(rows["fp8_cg_head"])))


@pytest.mark.parametrize(("name", "kernel"), [
    ("rope_qkv", "_rope_kernel"),
    ("qk_norm_rope", "_backward_kernel"),
    ("bias_activation", "_bias_activation_backward_kernel"),
    ("fused_experts", "_expert_swiglu_backward_kernel"),
    ("fused_experts", "_grad_codes_kernel"),
    ("top_k", "_top_k_kernel"),
])  # fmt: skip
def test_a_pass_that_fired_asks_for_its_kernel(name: str, kernel: str) -> None:
    said = engine_claims({}, {name: 2}, "head")
    assert problems(said, [Kernel(name=kernel, count=2, ms=1.0)]) == []
    assert len(problems(said, [Kernel(name="triton_poi_fused_0", count=2, ms=1.0)])) == 1


def test_every_kernel_of_a_block_of_experts_answers_its_claim() -> None:
    # These work for single products, before a block or beside it.
    shared = {
        "group_rows": "layout count_choices sum_choices place_choices columns gather spread combine".split(),
        "quantize_weights": ["turn_experts"],
        "row_tiles": ["table"],
        "token_products": ["token_product"],
        "top_k": ["top_k"],
    }
    seen = set()
    for path in sorted(Path(experts.__file__).parent.glob("*.py")):
        names = re.findall(r"^@triton\.jit\ndef _(\w+)_kernel\(", path.read_text(encoding="utf-8"), re.MULTILINE)
        for name in names:
            seen.add(name)
            ran = [Kernel(name=f"_{name}_kernel", count=1, ms=1.0)]
            lacking = problems(engine_claims({}, {"fused_experts": 1}, "head"), ran)
            assert bool(lacking) == (name in shared.get(path.stem, ())), (path.stem, name)
    assert {"hidden_codes", "expert_swiglu_backward"}.union(*shared.values()) <= seen


def test_emulated_formats_claim_no_fp8_and_native_ones_a_kernel_of_theirs() -> None:
    emulated = engine_claims({"layers.0.q": "emulate:mxfp8|emulate:mxfp8|emulate:mxfp8"}, {"linear": 1}, "head")
    assert problems(emulated, [Kernel(name="nvjet_sm90_tst_128x128_64x4_1x2_h_bz_TNT", count=3, ms=1.0)]) == []
    native = engine_claims({"layers.0.q": "nvfp4_native|nvfp4_native|bf16"}, {"linear": 1}, "head")
    assert problems(native, [Kernel(name="_block_scaled_kernel", count=2, ms=1.0)]) == []
    assert problems(native, kernels("fp8")) == ["block-scaled products: 0 of at least 1 kernels ran"]


@pytest.mark.parametrize(
    ("origin", "precision", "kernel"),
    [
        ("vendor", "fp8", "nvjet_sm90_qqtst_256x128_128x4_1x2_h_bz_coopA_TNT"),
        ("triton", "fp8", "_fp8_gemm_kernel"),
        ("cutlass", "fp8", "void cutlass::device_kernel<Gemm>"),
        ("vendor", "bf16", "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT"),
        ("user", "fp8", "anything"),
    ],
)
def test_a_candidate_of_the_registry_is_held_to_its_name(origin: str, precision: str, kernel: str) -> None:
    said = candidate_claims(origin, precision)
    assert problems(said, [Kernel(name=kernel, count=1, ms=1.0)]) == []
    other = "elementwise_kernel" if precision == "fp8" else "nvjet_sm90_qqtst_256x128"
    assert bool(problems(said, [Kernel(name=other, count=1, ms=1.0)])) == (origin != "user")


def test_ways_to_attend_are_held_to_their_names() -> None:
    rows = {row["attention"]: row["kernel"] for row in json.loads(_ATTENTION.read_text())["rows"]}
    ran = {name: [Kernel(name=kernel, count=1, ms=1.0)] for name, kernel in rows.items()}
    assert [problems(attention_claims(name), ran[name]) for name in rows] == [[]] * len(rows)
    assert problems(attention_claims("cuDNN"), ran["torch flash"])
    assert problems(attention_claims("softmax, eager"), ran["cuDNN"])
    assert problems(attention_claims("Deepwell"), ran["softmax, eager"])


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
