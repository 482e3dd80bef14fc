"""Large products by the fastest algorithm: the right one wins, is kept, and nothing is counted twice."""

from dataclasses import replace

import pytest
import torch

from deepwell.formats.metrics import assert_bitwise_equal, sqnr_db
from deepwell.kernels.gemm import cublaslt
from deepwell.kernels.gemm.cases import codes
from deepwell.kernels.gemm.cublaslt import LtProduct, mm_ranked, mm_ref
from deepwell.kernels.gemm.fp8 import fp8_gemm
from deepwell.kernels.tune import choose, fastest, sources
from deepwell.kernels.tune.fastest import fastest_fp8_gemm, fastest_mm
from deepwell.kernels.tune.problem import Problem

PRODUCT = LtProduct(m=4096, n=4096, k=8192, scales="none", device=0)


@pytest.fixture(autouse=True)
def _fresh(tmp_path, monkeypatch):
    monkeypatch.setenv("DEEPWELL_CACHE_DIR", str(tmp_path))
    choose.forget()
    fastest.forget()


@pytest.fixture
def race(monkeypatch):
    """A race without a GPU: algorithms by name with their microseconds; which were run and timed."""
    us: dict[str, float] = {}
    wrong: set[str] = set()
    broken: set[str] = set()
    short: set[str] = set()
    log: list[str] = []
    right = torch.randn(4096, 8)

    def run_of(name: str):
        def run() -> torch.Tensor:
            log.append(name)
            if name in short:
                raise torch.OutOfMemoryError
            if name in broken:
                raise RuntimeError("cuBLASLt's Matmul failed with status 14")
            return -right if name in wrong else right

        run.name = name
        return run

    def timed(lap, device, budget_s):
        return [us[lap.__self__.candidate.name]]

    def _name(rank, is_static):
        return f"{'static' * is_static}{rank}"

    monkeypatch.setattr(choose, "times_us", timed)
    monkeypatch.setattr(fastest, "_algorithms", lambda product: ["0", *(name for name in us if name != "torch")])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: race.is_recording)
    on_cpu = fastest._problem
    monkeypatch.setattr(fastest, "_problem", lambda product: replace(on_cpu(product), device="cpu"))

    def go(may_time: bool = True, m: int = PRODUCT.m) -> str:
        """Which way a product takes."""
        log.clear()
        fastest._by_the_fastest(
            replace(PRODUCT, m=m),
            run_of("torch"),
            lambda rank, is_static: run_of(_name(rank, is_static))(),
            may_time=may_time,
        )
        return log[-1]

    parts = {"us": us, "wrong": wrong, "broken": broken, "short": short, "log": log, "go": staticmethod(go)}
    race = type("Race", (), {**parts, "is_recording": False})
    return race


def test_the_fastest_that_is_right_wins(race):
    race.us.update({"torch": 100.0, "1": 90.0, "static0": 80.0, "static1": 50.0})
    race.wrong.add("static1")
    assert race.go() == "static0"


def test_what_gains_less_than_a_percent_is_left_to_torch(race):
    race.us.update({"torch": 100.0, "1": 99.5})
    assert race.go() == "torch"


def test_a_choice_is_measured_once_and_outlives_the_process(race):
    race.us.update({"torch": 100.0, "1": 90.0})
    race.go()
    assert race.go() == "1" and race.log == ["1"]
    # Another process: the clock says otherwise now, the file decides.
    fastest.forget()
    choose.forget()
    race.us.update({"1": 200.0})
    assert race.go() == "1" and race.log == ["1"]


def test_a_kept_choice_among_other_algorithms_is_not_trusted(race):
    race.us.update({"torch": 100.0, "1": 90.0})
    race.go()
    fastest.forget()
    race.us.update({"static2": 50.0})
    assert race.go() == "static2" and len(race.log) > 1


def test_other_sources_and_other_products_are_measured_anew(race, monkeypatch):
    race.us.update({"torch": 100.0, "1": 90.0})
    race.go()
    fastest.forget()
    monkeypatch.setattr(fastest, "_source_hash", lambda: "other")
    race.us.update({"1": 200.0})
    assert race.go() == "torch" and len(race.log) > 1


def test_the_key_is_of_the_sources_that_a_choice_depends_on(monkeypatch):
    keys, hash_of = set(), sources.file_hash
    for changed in (None, "gemm/cublaslt.py", "gemm/fp8.py", "tune/timing.py", "adamw/update.py"):

        def hash_after(path, changed=changed):
            return f"{hash_of(path)}{changed is not None and str(path).endswith(changed)}"

        monkeypatch.setattr(sources, "file_hash", hash_after)
        fastest._source_hash.cache_clear()
        keys.add(fastest._source_hash())
    fastest._source_hash.cache_clear()
    assert len(keys) == 4  # the optimizer's file changes nothing


def test_lengths_that_change_from_batch_to_batch_are_not_timed_for_ever(race):
    race.us.update({"torch": 100.0, "1": 90.0})
    for m in range(2048, 2048 + 64, 8):
        assert race.go(m=m) == ("1" if m < 2048 + 8 * fastest._MOST_LENGTHS else "torch")


def test_nothing_is_timed_into_a_sum_or_a_recording_and_the_shape_stays_open(race):
    race.us.update({"torch": 100.0, "1": 90.0})
    assert race.go(may_time=False) == "torch" and race.log == ["torch"]
    race.is_recording = True
    assert race.go() == "torch" and race.log == ["torch"]
    race.is_recording = False
    assert race.go() == "1"


def test_an_algorithm_that_fails_later_is_rejected_and_the_product_is_torchs(race):
    race.us.update({"torch": 100.0, "1": 90.0})
    assert race.go() == "1"
    race.broken.add("1")
    assert race.go() == "torch" and race.log == ["1", "torch"]
    assert race.go() == "torch" and race.log == ["torch"]


def test_lack_of_memory_is_not_held_against_an_algorithm(race):
    race.us.update({"torch": 100.0, "1": 90.0})
    race.go()
    race.short.add("1")
    with pytest.raises(torch.OutOfMemoryError):
        race.go()
    race.short.clear()
    assert race.go() == "1"


def test_a_race_that_lacks_memory_is_torchs_and_run_again_by_the_next_process(race):
    race.us.update({"torch": 100.0, "1": 90.0})
    race.short.add("1")
    assert race.go() == "torch" and race.go() == "torch"
    race.short.clear()
    fastest.forget()
    assert race.go() == "1"


def test_a_cpu_and_small_products_are_torchs_own():
    a, b, out = torch.randn(64, 32), torch.randn(32, 48), torch.ones(64, 48)
    assert_bitwise_equal(fastest_mm(a, b, out=out), a @ b)
    assert_bitwise_equal(fastest_mm(a, b, out=out, accumulate=True), torch.addmm(a @ b, a, b))
    given = codes(Problem(op="fp8_gemm", m=32, n=48, k=64, precision="fp8"))
    assert_bitwise_equal(fastest_fp8_gemm(*given), fp8_gemm(*given))


@pytest.mark.gpu
@pytest.mark.parametrize("transposed", [(False, False), (True, False), (False, True), (True, True)], ids=str)
def test_every_algorithm_of_bf16_is_right_however_operands_lie(transposed):
    m, n, k = 512, 768, 1024
    a = torch.randn(*((k, m) if transposed[0] else (m, k)), device="cuda").bfloat16()
    b = torch.randn(*((n, k) if transposed[1] else (k, n)), device="cuda").bfloat16()
    a, b = a.T if transposed[0] else a, b.T if transposed[1] else b
    out = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
    product = cublaslt.product_of(a, b, out)
    assert product is not None and product.along_k == (not transposed[0], transposed[1])
    count = cublaslt.num_algorithms(product)
    assert count > 1
    for rank in range(count):
        out.fill_(float("nan"))
        assert sqnr_db(mm_ref(a, b), mm_ranked(a, b, out=out, rank=rank)) > 45
        before = out.clone()
        mm_ranked(a, b, out=out, rank=rank, accumulate=True)
        assert sqnr_db(mm_ref(a, b, before), out) > 45


@pytest.mark.gpu
def test_a_large_product_is_torchs_but_for_rounding_and_its_sum_counts_once():
    a = torch.randn(2048, 4096, device="cuda").bfloat16()
    b = torch.randn(8192, 4096, device="cuda").bfloat16().T
    out = torch.empty(2048, 8192, dtype=torch.bfloat16, device="cuda")
    fastest_mm(a, b, out=out)
    assert sqnr_db((a @ b).float(), out.float()) > 45
    fastest_mm(a, b, out=out, accumulate=True)
    assert sqnr_db(2 * (a @ b).float(), out.float()) > 45
    (entry,) = choose.cache_of("cuda:0").choices.values()
    times = {verdict["name"]: verdict["us"] for verdict in entry["choice"]["verdicts"]}
    assert times["torch"] > 0 and len(times) > 1


@pytest.mark.gpu
def test_a_large_product_of_codes_is_torchs_but_for_rounding():
    given = codes(Problem(op="fp8_gemm", m=4096, n=8192, k=4096, precision="fp8", one_scale=True, device="cuda"))
    got = fastest_fp8_gemm(*given, fast=False)
    assert sqnr_db(fp8_gemm(*given, fast=False).float(), got.float()) > 60
