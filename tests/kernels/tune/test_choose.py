"""Selection: only what is right is chosen, the fastest of it, and what is kept on disk is never trusted blindly."""

import json
import logging
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

import user_kernels
from asked import problem, registry_of
from deepwell.errors import ConfigError, UnsupportedError
from deepwell.formats.quantize import quantize
from deepwell.hardware.cache import cache_dir
from deepwell.kernels import KernelRegistry
from deepwell.kernels.gemm import candidates as gemm_candidates
from deepwell.kernels.gemm import torch_ops as gemm_ops
from deepwell.kernels.gemm.candidates import built_in
from deepwell.kernels.gemm.cases import cases, codes_floor_db, operands, prepared, run_gemm
from deepwell.kernels.quantize import torch_ops as quantize_ops
from deepwell.kernels.registry import _stand_ins
from deepwell.kernels.tune import cache as choice_cache
from deepwell.kernels.tune import choose, gain, sandbox, sources
from deepwell.kernels.tune.candidate import Candidate
from deepwell.kernels.tune.problem import Problem
from deepwell.kernels.tune.verify import Proof, verify

pytestmark = pytest.mark.usefixtures("no_choices", "one_thread")


@pytest.fixture
def one_thread():
    """On a busy machine two threads wait for each other far longer than a product takes, and the slower one wins."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def reason_of(registry, name, asked=None) -> str:
    choice = registry.choose(asked or problem())
    return next(verdict.reason for verdict in choice.verdicts if verdict.name == name)


def proof_on_cpu(candidate, dtype="bfloat16") -> Proof:
    return verify(candidate, cases(candidate, problem(dtype=dtype)))


# ---- who is chosen ----


def test_a_right_and_fast_kernel_is_chosen_over_emulation_and_a_slow_one():
    registry = registry_of(user_kernels.right, user_kernels.slow)
    choice = registry.choose(problem())
    assert choice.kernel == "right" and choice.how == "measured"
    times = {verdict.name: verdict.us for verdict in choice.verdicts}
    assert times["right"] < times["emulated_mxfp8"] and times["right"] < times["slow"]
    assert times["slow"] > 45_000  # it sleeps 50 ms: the clock measures what is called
    assert "right" in registry.explain() and choice in registry.choices()


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (user_kernels.wrong, r"wrong at 256x384x512: \d+\.\d dB against the reference, 27 are needed"),
        (user_kernels.raises, r"raised KeyError: 'no such tile'"),
        (user_kernels.crashes, "ended its process with status 7"),
        (user_kernels.wrong_shape, r"returns \(384, 256\) on cpu at 256x384x512, it should be \(256, 384\)"),
        (user_kernels.hides_nan, "hides a NaN of its input"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_wrong_is_rejected_with_its_reason_and_the_reference_runs(kernel, reason, caplog):
    registry = registry_of(kernel)
    with caplog.at_level(logging.WARNING, "deepwell.kernels"):
        choice = registry.choose(problem())
    assert choice.kernel == "emulated_mxfp8"
    found = reason_of(registry, kernel.__name__)
    assert re.search(reason, found), found
    assert kernel.__name__ in caplog.text


def test_a_kernel_that_hangs_is_rejected_after_the_timeout():
    registry = registry_of(user_kernels.hangs, timeout_s=1.0)
    assert registry.choose(problem()).kernel == "emulated_mxfp8"
    assert reason_of(registry, "hangs") == "hangs: no answer within 1 s"


def test_a_kernel_right_in_the_small_and_wrong_in_the_large_is_caught_at_the_real_shape():
    registry = registry_of(user_kernels.wrong_when_large)
    assert registry.choose(problem(m=512)).kernel == "wrong_when_large"
    assert registry.choose(problem(m=600)).kernel == "emulated_mxfp8"
    assert "wrong at 1024x128x160" in reason_of(registry, "wrong_when_large", problem(m=600))


def test_a_kernel_may_refuse_a_shape():
    def even_only(a, b):
        if a.shape[0] % 2 or b.shape[1] % 128:
            raise UnsupportedError("N must be a multiple of 128")
        return a @ b

    registry = KernelRegistry()
    registry.register("even_only", even_only, precision="mxfp8")
    assert registry.choose(problem(n=128)).kernel == "even_only"
    assert "does not take this shape: N must be" in reason_of(registry, "even_only", problem(n=144))


def test_min_size_keeps_a_kernel_out_and_the_proof_at_its_sizes():
    seen = []

    def large_only(a, b):
        seen.append(min(*a.shape, b.shape[1]))
        return a @ b

    registry = KernelRegistry()
    registry.register("large_only", large_only, precision="mxfp8", min_size=128, trusted=True)
    assert registry.choose(problem(m=96)).kernel == "emulated_mxfp8"
    assert "is 96, below its min_size of 128" in reason_of(registry, "large_only", problem(m=96))
    assert not seen
    assert registry.choose(problem(m=128)).kernel == "large_only"
    assert min(seen) >= 128


def test_bias_and_activation_reach_a_kernel_that_takes_them():
    registry = registry_of(user_kernels.right_with_everything)
    choice = registry.choose(problem(bias=True, activation="gelu"))
    assert choice.kernel == "right_with_everything"


def test_codes_compete_by_their_own_signature():
    registry = KernelRegistry()
    registry.register("fp8_right", user_kernels.fp8_right, op="fp8_gemm", precision="fp8")
    registry.register("without", user_kernels.fp8_without_scales, op="fp8_gemm", precision="fp8")
    choice = registry.choose(Problem(op="fp8_gemm", m=64, n=64, k=64, precision="fp8"))
    assert choice.kernel in ("fp8_right", "fp8_gemm_ref")
    verdicts = {verdict.name: verdict for verdict in choice.verdicts}
    assert "wrong at 256x384x512" in verdicts["without"].reason
    assert verdicts["fp8_right"].us is not None and verdicts["fp8_right"].sqnr_db > 60


def test_where_nobody_is_left_the_reasons_are_given():
    with pytest.raises(UnsupportedError, match="no kernel computes gemm 1x8x8 fp32 bfloat16"):
        KernelRegistry().choose(problem(1, 8, 8, precision="fp32", dtype="bfloat16"))


@pytest.mark.parametrize("name", [c.name for c in built_in("gemm") if c.origin == "vendor" and "torch" in c.name])
def test_torchs_own_products_pass_their_proof(name):
    candidate = KernelRegistry().candidate("gemm", name)
    proof = proof_on_cpu(candidate)
    assert proof.is_passed, proof.reason


@pytest.mark.parametrize("name", [c.name for c in built_in("gemm") if c.origin == "reference"])
def test_exact_emulation_passes_the_proof_that_others_must_pass(name):
    # Else the floors would be out of reach for everybody.
    proof = proof_on_cpu(KernelRegistry().candidate("gemm", name), "float32")
    assert proof.is_passed, proof.reason


@pytest.mark.parametrize("name", [c.name for c in built_in("gemm") if "fp8_row" in c.name or "fp8_tensor" in c.name])
def test_the_fp8_chains_pass_by_their_references_on_a_cpu(name):
    # What a GPU runs with kernels, a CPU runs with their references: padding, epilogue and NaN are the chain's own.
    proof = proof_on_cpu(KernelRegistry().candidate("gemm", name))
    assert proof.is_passed, proof.reason
    assert proof.sqnr_db > 27


@pytest.mark.parametrize("fmt", ["mxfp8", "nvfp4"])
def test_blackwells_chains_are_the_emulation_bit_for_bit_by_their_references(fmt):
    problem_of_fmt = problem(precision=fmt, dtype="bfloat16")
    a, b, _ = operands(problem_of_fmt)
    registry = KernelRegistry()
    exact = run_gemm(registry.candidate("gemm", f"emulated_{fmt}"), a, b)
    for name in (f"cublaslt_{fmt}", f"triton_{fmt}", f"cutlass_{fmt}"):
        candidate = registry.candidate("gemm", name)
        assert proof_on_cpu(candidate).is_passed
        assert torch.equal(run_gemm(candidate, a, prepared(candidate, b)), exact)
        assert "needs a Blackwell GPU" in candidate.why_not(problem_of_fmt)


def test_square_blocks_lie_as_cublaslt_reads_them():
    # K's blocks fastest, padded to a multiple of four; what is padded with zeros has no effect.
    b = torch.randn(200, 640).bfloat16().T  # [K, N]: 5 blocks of K, 1.6 of N
    weight = gemm_candidates._prepare_128x128(b)
    assert weight.codes.shape == (256, 640) and weight.n == 200
    assert weight.scale.shape == (8, 2) and weight.scale.stride() == (1, 8)
    scales = weight.scale.T[:, :5].repeat_interleave(128, 0).repeat_interleave(128, 1)
    back = (weight.codes.float() * scales)[:200]
    assert torch.equal(back, quantize(b.T.contiguous(), "fp8_e4m3_128x128_pow2").dequantize())


def test_a_substitute_does_not_compete_with_kernels_of_the_very_format():
    def candidate(name, fmt, origin):
        return Candidate(name=name, op="gemm", precision=fmt, fn=user_kernels.right, origin=origin)

    native, substitute = candidate("native", "mxfp8", "vendor"), candidate("fp8_row", "fp8", "vendor")
    users, emulated = candidate("users", "fp8", "user"), candidate("emulated", "mxfp8", "reference")
    passed = [(c, Proof()) for c in (native, substitute, users)]
    names = _stand_ins(problem(), [native, substitute, users, emulated])
    assert names == {"fp8_row"}
    kept, dropped = choose._without_substitutes(passed, names)
    assert [c.name for c, _ in kept] == ["native", "users"]
    assert [(v.name, "stands in only where" in v.reason) for v in dropped] == [("fp8_row", True)]
    # Without one the substitute runs; emulation does not count as a kernel.
    others = [(substitute, Proof()), (emulated, Proof())]
    assert choose._without_substitutes(others, names) == (others, [])
    assert _stand_ins(problem(precision="auto"), [native, substitute]) == set()


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["gemm", "fp8_gemm"])
def test_every_built_in_candidate_proves_itself_on_the_gpu(op):
    failed = {}
    for candidate in built_in(op):
        if candidate.refuses and candidate.refuses(Problem(op=op, m=1, n=1, k=1, precision="fp8", device="cuda:0")):
            continue
        proof = verify(candidate, cases(candidate, problem(dtype="bfloat16", device="cuda:0")))
        if not proof.is_passed:
            failed[candidate.name] = proof.reason
    assert not failed


@pytest.mark.gpu
def test_a_gpu_chooses_a_chain_and_keeps_it():
    asked = problem(1024, 1024, 1024, precision="auto", dtype="bfloat16", device="cuda:0")
    first = KernelRegistry(proof_timeout_s=120).choose(asked)
    assert first.how == "measured" and first.us > 0
    choose.forget()
    again = KernelRegistry().choose(asked)
    assert again.how == "cached" and again.kernel == first.kernel


def test_fast_sums_have_a_floor_that_sinks_with_k():
    fast, exact = (
        Candidate(name="k", op="fp8_gemm", precision="fp8", fn=print, origin="vendor", fast=is_fast)
        for is_fast in (True, False)
    )
    assert codes_floor_db(exact, 16384, "cuda:0") == 60 == codes_floor_db(fast, 512, "cpu")
    # Twelve decibels below what was measured at each length, to one.
    measured = {512: 62.7, 4096: 55.4, 16384: 49.4, 32768: 46.8, 131072: 41.7}
    for k, found in measured.items():
        assert abs(codes_floor_db(fast, k, "cuda:0") - (found - 12)) < 1


# ---- processes ----


def test_a_fresh_process_finds_a_function_by_its_file_and_may_crash_or_hang():
    # What a GPU uses; the test's own modules are on no path that the child knows.
    cases = [
        (user_kernels.right, 120, ""),
        (user_kernels.crashes, 120, "ended its process with status 7"),
        (user_kernels.hangs, 1.0, "hangs: no answer within 1 s"),
    ]
    for function, timeout_s, reason in cases:
        address = sandbox._address(registry_of(function).users()[0])
        request = {**address, "problem": asdict(problem()), "at_size": False}
        assert sandbox._in_fresh_process(sandbox._ENTRY, request, timeout_s, "").reason == reason


def test_a_fresh_process_holds_a_kernel_to_the_floor_it_was_registered_for():
    # Sums in a shorter accumulator have a floor of their own; a process that did not know would set the kernel aside.
    registry = KernelRegistry()
    registry.register("short", user_kernels.fp8_right, precision="fp8", op="fp8_gemm", fast=True, min_size=64)
    candidate = registry.users()[0]
    found = sandbox.find(json.loads(json.dumps(sandbox._address(candidate))))
    told_apart = ("name", "op", "precision", "origin", "min_size", "fast", "prepare")
    assert all(getattr(found, name) == getattr(candidate, name) for name in told_apart)


def test_built_in_candidates_are_found_by_name():
    address = sandbox._address(KernelRegistry().candidate("gemm", "torch_fp32"))
    assert address["built_in"] and sandbox.find(address).name == "torch_fp32"


def test_a_closure_cannot_be_tried_on_a_gpu_unless_it_is_trusted():
    registry = KernelRegistry()
    registry.register("closure", lambda a, b: a @ b, precision="mxfp8")
    assert sandbox._address(registry.users()[0]) is None
    proof = sandbox.verify_apart(registry.users()[0], problem(device="cuda:0"), 1.0)
    assert "move it to one or pass trusted=True" in proof.reason


# ---- the cache ----


def cache_file():
    (path,) = cache_dir().glob("kernels-*.json")
    return path


def test_a_choice_is_kept_and_used_again_without_running_anything():
    first = registry_of(user_kernels.right).choose(problem())
    choose.forget()
    again = registry_of(user_kernels.right).choose(problem(m=70))  # another M of the same bucket
    assert again.how == "cached" and again.kernel == first.kernel and again.us == first.us


def test_other_candidates_or_other_sources_are_measured_anew(monkeypatch):
    registry_of(user_kernels.right).choose(problem())
    choose.forget()
    assert registry_of(user_kernels.right, user_kernels.slow).choose(problem()).how == "measured"
    choose.forget()
    monkeypatch.setattr(sources, "file_hash", lambda path: "another source")
    assert registry_of(user_kernels.right).choose(problem()).how == "measured"


def fingerprints() -> dict[str, str]:
    built_in.cache_clear()
    found = {f"{op} {c.name}": c.fingerprint for op in ("gemm", "fp8_gemm") for c in built_in(op)}
    return {**found, "gain": gain.sources()}


@pytest.mark.parametrize(
    ("edited", "changed", "same"),
    [
        ("device/fp8.py", "gemm cublaslt_fp8_row, gemm cublaslt_fp8_1x128, gemm triton_mxfp8, gain", ""),
        ("device/triton_support.py", "gemm cublaslt_fp8_row, gemm triton_mxfp8, fp8_gemm fp8_gemm_ref, gain", ""),
        ("quantize/transpose.py", "gain", "gemm cublaslt_fp8_row, gemm cublaslt_fp8_1x128"),
        ("gemm/native_candidates.py", "gemm triton_mxfp8", "gemm cublaslt_fp8_row"),
        ("gemm/candidates.py", "gemm emulated_fp8, fp8_gemm cublaslt", ""),
        ("formats/blocks.py", "gemm emulated_fp8, gemm cublaslt_fp8_1x128, gain", ""),
        ("adamw/update.py", "", "gemm cublaslt_fp8_row, gain"),
    ],
)
def test_built_in_candidates_are_distinguished_by_all_that_they_import(edited, changed, same, monkeypatch):
    assert list(Path(sources.__file__).parents[2].glob(f"**/{edited}"))
    before = fingerprints()
    real = sources.file_hash
    for module in (sources, gemm_candidates):
        monkeypatch.setattr(module, "file_hash", lambda path: "edited" * str(path).endswith(f"/{edited}") + real(path))
    after = fingerprints()
    built_in.cache_clear()
    assert all(before[name] != after[name] for name in filter(None, changed.split(", ")))
    assert all(before[name] == after[name] for name in filter(None, same.split(", ")))


def test_what_a_module_imports_is_read_from_its_text_as_python_loads_it():
    # Packages hold a docstring alone.
    modules = "(name for name, module in sys.modules.items() if not hasattr(module, '__path__'))"
    code = f"import sys, deepwell.kernels.quantize.microscaled; print(*{modules})"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    ours = {name for name in loaded if name.startswith(("deepwell.kernels.", "deepwell.formats."))}
    assert ours <= sources.closure("deepwell.kernels.quantize.microscaled")


def test_a_choice_of_another_gpu_of_the_same_kind_serves_under_the_name_of_this_one():
    registry_of(user_kernels.right).choose(problem())
    path = cache_file()
    path.write_text(path.read_text().replace('"device": "cpu"', '"device": "cpu:1"'))
    choose.forget()
    again = registry_of(user_kernels.right).choose(problem())
    assert again.how == "cached" and again.device == "cpu"


def test_a_proof_is_kept_so_that_a_hanging_kernel_hangs_once(monkeypatch):
    registry_of(user_kernels.hangs, timeout_s=1.0).choose(problem())
    choose.forget()
    monkeypatch.setattr(choose, "verify_apart", lambda *args, **how: pytest.fail("it was proved before"))
    registry = registry_of(user_kernels.hangs, timeout_s=1.0)
    assert registry.choose(problem(n=64)).kernel == "emulated_mxfp8"


def test_shortage_of_memory_is_not_held_against_a_kernel():
    cache = choice_cache.ChoiceCache(device="cpu")
    candidate = registry_of(user_kernels.right).users()[0]
    cache.keep_proof(candidate, "float32", Proof(reason="raised OutOfMemoryError: CUDA out of memory"))
    assert cache.proof(candidate, "float32") is None


DAMAGES = {
    "not JSON": lambda text: text[: len(text) // 2],
    "another schema": lambda text: re.sub(r'"schema": \d+', '"schema": 99', text),
    "of another machine": lambda text: text.replace(choice_cache.identity("cpu")[0], "GeForce 256"),
    "of another torch": lambda text: text.replace(torch.__version__.split("+")[0], "0.4.1", 1),
    "a list": lambda text: "[]",
    "no verdicts": lambda text: text.replace('"verdicts"', '"verdict"'),
    "a kernel rejected": lambda text: text.replace('"kernel": "right"', '"kernel": "wrong"'),
    "a time in words": lambda text: re.sub(r'"us": [0-9.]+', '"us": "soon"', text),
    "a time that is no number": lambda text: re.sub(r'"us": [0-9.]+', '"us": NaN', text),
    "a verdict without a name": lambda text: text.replace('"name": "wrong"', '"name": null'),
    "an unknown kernel": lambda text: re.sub(r'"(kernel|name)": "right"', r'"\1": "ghost"', text),
    "another verdict of an unknown kernel": lambda text: text.replace('"name": "emulated_mxfp8"', '"name": "ghost"'),
    "the choice of another shape": lambda text: text.replace('"problem": "gemm 128x128', '"problem": "gemm 64x128'),
    "the choice of another device": lambda text: text.replace('"device": "cpu"', '"device": "cuda:7"'),
    "brackets without end": lambda text: "[" * 100_000,
    "digits without end": lambda text: "9" * 10_000,
    "a proof in words": lambda text: re.sub(r'"sqnr_db": [0-9.]+', '"sqnr_db": "fine"', text),
    "bytes": lambda text: "\x00\xff",
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_or_foreign_cache_is_logged_and_rebuilt(damage, caplog):
    registry_of(user_kernels.right, user_kernels.wrong, trusted=True).choose(problem())
    path = cache_file()
    good = path.read_text()
    damaged = damage(good)
    assert damaged != good
    path.write_text(damaged)
    choose.forget()
    with caplog.at_level(logging.WARNING, "deepwell.kernels"):
        choice = registry_of(user_kernels.right, user_kernels.wrong, trusted=True).choose(problem())
    assert choice.kernel == "right" and choice.how == "measured"
    assert "kernels are measured again" in caplog.text
    data = json.loads(path.read_text())
    assert data["schema"] == choice_cache.SCHEMA and data["identity"] == list(choice_cache.identity("cpu"))


def test_without_a_folder_to_write_to_everything_works(monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("DEEPWELL_CACHE_DIR", str(tmp_path / "file"))
    choose.forget()
    with caplog.at_level(logging.WARNING, "deepwell.kernels"):
        assert registry_of(user_kernels.right).choose(problem()).kernel == "right"
    assert "could not be kept" in caplog.text


def test_two_processes_keep_each_others_entries():
    one, two = choice_cache.ChoiceCache(device="cpu"), choice_cache.ChoiceCache(device="cpu")
    candidate = registry_of(user_kernels.right).users()[0]
    one.keep_proof(candidate, "a", Proof(sqnr_db=1.0))
    two.keep_proof(candidate, "b", Proof(sqnr_db=2.0))
    fresh = choice_cache.ChoiceCache(device="cpu")
    assert fresh.proof(candidate, "a").sqnr_db == 1.0 and fresh.proof(candidate, "b").sqnr_db == 2.0


# ---- would it gain? ----


def test_on_a_cpu_nothing_is_measured():
    with pytest.raises(UnsupportedError, match="formats run as asked"):
        gain.would_gain(128, 128, 1024, "cpu")
    with pytest.raises(ConfigError, match="tokens is 0"):
        gain.would_gain(128, 128, 0, "cpu")


def test_both_chains_run_and_a_gain_says_its_figures():
    # On a CPU the figures mean nothing, but the same code runs.
    for fused in ("", "x", "dy", "x dy"):
        choice = gain.measure(20, 40, 24, "cpu", fused)
        assert {verdict.name for verdict in choice.verdicts} == {"fp8_row", "bf16"}
        assert all(verdict.us > 0 and verdict.sqnr_db > 27 for verdict in choice.verdicts)
    slow = gain.Gain(n=64, k=64, tokens=128, fp8_us=90.4, bf16_us=30.2)
    assert not slow.gains
    assert slow.reason == "would not gain: FP8 90 us, bf16 30 us forward and backward at 128 tokens"


def test_a_registry_explains_what_was_chosen_without_it():
    registry = registry_of(user_kernels.right)
    assert registry.explain() == "nothing was chosen yet"
    gain.measure(20, 40, 24, "cpu")
    own = registry.choose(problem())
    assert gain.measure(20, 40, 24, "cpu").how == "cached"
    table, linear_choice, own_choice = KernelRegistry.explain(registry).split("\n\n")[0], *choose.decided()
    assert linear_choice[2] == 2 and own_choice[1] == own
    row = next(line for line in table.splitlines() if line.split()[:1] == ["linear"])
    assert row.split()[1:4] == ["24x20x40", "fp8_row", "2"]
    text = registry.explain()
    assert text.count(own.problem) == 1 and "linear 32x20x40 fp8_row" in text
    assert "gemm" not in KernelRegistry().explain().partition("linear 32x20x40")[2].splitlines()[0]


@pytest.mark.parametrize(("method", "per_row"), [("fp8_row", True), ("fp8_tensor", False)])
def test_a_step_is_timed_by_the_kernels_that_the_engine_runs(method, per_row, monkeypatch):
    seen = []
    for room, name in ((quantize_ops, "quantize_group"), (gemm_ops, "fastest_fp8_gemm")):
        real = getattr(room, name)
        monkeypatch.setattr(room, name, lambda *args, real=real, **how: seen.append(how) or real(*args, **how))
    x, w, dy = gain._tensors(Problem(op="linear", m=32, n=48, k=64, precision=method))
    gain._fp8_step(x, w, dy, method=method, fused=[])()
    along, transposed = ({"transposed": is_transposed, "scale_per_row": per_row} for is_transposed in (False, True))
    assert seen == [
        along,
        {"fast": True},
        transposed,
        {"fast": True},
        {"fast": False},
    ]  # forward, dgrad, and a wgrad that sums in fp32


@pytest.mark.gpu
def test_a_large_layer_gains_and_a_tiny_one_does_not():
    large, tiny = gain.would_gain(8192, 4096, 8192), gain.would_gain(64, 64, 16)
    assert large.gains and not tiny.gains
    choose.forget()
    assert gain.would_gain(8192, 4096, 8192) == large  # from the file
