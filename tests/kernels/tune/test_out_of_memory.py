"""Lack of memory is nobody's fault: it is raised or skipped, never held against a kernel, never kept on disk."""

import pytest
import torch

from deepwell.hardware.cache import cache_dir
from deepwell.kernels import KernelRegistry
from deepwell.kernels.experts import grouped_gemm
from deepwell.kernels.gemm import chosen, native_candidates
from deepwell.kernels.gemm import fp8_blocks as gemm_blocks
from deepwell.kernels.production_kernels import ProductionKernelManager
from deepwell.kernels.tune import choose, sandbox
from deepwell.kernels.tune.out_of_memory import SKIPPED, is_shortage
from deepwell.kernels.tune.problem import Problem
from deepwell.kernels.tune.verify import Proof

pytestmark = pytest.mark.usefixtures("no_choices")

ASKED = Problem(op="gemm", m=96, n=128, k=160, precision="mxfp8", dtype="float32")


class Scarce:
    """A right kernel that needs memory which is not always there; `short(a)` says when."""

    def __init__(self, short, error=None):
        self.short, self.calls = short, 0
        self.error = error or torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def register(self, registry: KernelRegistry | None = None) -> KernelRegistry:
        registry = registry or KernelRegistry()
        registry.register("scarce", self.gemm, precision="mxfp8", trusted=True)
        return registry

    def gemm(self, a, b):
        self.calls += 1
        if self.short(a):
            raise self.error
        return a @ b


def in_race(a) -> bool:
    """Whether a is the race's, not one of the proof's shapes or a real one."""
    return a.shape == (128, 160)


# ---- what is one ----


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (torch.OutOfMemoryError(""), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        # The kernel's own tile does not fit the multiprocessor: it never will.
        (RuntimeError("out of resource: shared memory, Required: 262144, Hardware limit: 232448"), False),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (KeyError("no such tile"), False),
    ],
    ids=lambda value: str(value)[:40],
)
def test_shortage_is_known_by_type_or_words(error, is_one):
    assert is_shortage(error) is is_one


def test_the_cpus_own_words_are_known():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 46)
    assert is_shortage(caught.value)


# ---- while a model runs ----


def run_chosen(kernel: str) -> torch.Tensor:
    a, b = torch.ones(48, 64), torch.ones(64, 32)
    return torch.ops.deepwell.chosen_gemm(a, b, kernel, "mxfp8", "mxfp8", torch.float32)


def test_a_chosen_product_raises_lack_of_memory_and_the_kernel_runs_again_afterwards():
    full = [True]
    scarce = Scarce(lambda a: bool(full))
    registry = scarce.register()
    kernel = chosen.install(registry, registry.users()[0])
    with pytest.raises(torch.OutOfMemoryError, match=r"2\.00 GiB"):
        run_chosen(kernel)
    assert not registry.aside()
    full.clear()
    assert torch.equal(run_chosen(kernel), torch.full((48, 32), 64.0)) and scarce.calls == 2


def test_the_users_door_raises_lack_of_memory_and_keeps_the_kernel():
    full = []
    scarce = Scarce(lambda a: bool(full))
    manager = ProductionKernelManager(scarce.register())
    a, b = torch.randn(48, 96), torch.randn(96, 64)
    first = manager.gemm(a, b, precision="mxfp8")
    full.append(True)
    with pytest.raises(torch.OutOfMemoryError):
        manager.gemm(a, b, precision="mxfp8")
    full.clear()
    assert torch.equal(manager.gemm(a, b, precision="mxfp8"), first)
    assert not manager.registry.aside() and manager.registry.choices()[0].kernel == "scarce"


# ---- while kernels compete ----


def test_a_proof_without_memory_is_skipped_and_made_again():
    full = [True]
    scarce = Scarce(lambda a: bool(full))
    registry = scarce.register()
    choice = registry.choose(ASKED)
    assert choice.kernel == "emulated_mxfp8"
    (verdict,) = choice.skipped()
    assert verdict.name == "scarce" and verdict.reason.startswith(f"{SKIPPED}: OutOfMemoryError: CUDA out of memory")
    assert not list(cache_dir().glob("kernels-*.json"))  # neither the proof nor the choice without it
    full.clear()
    choose.forget()
    assert "scarce" in scarce.register().choose(ASKED).ranking()


@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_kernel_without_memory_in_the_race_is_skipped_and_the_choice_not_kept(after):
    # At its first product there, at the turn that does not count, and between two timed ones.
    full, seen = [True], []

    def short(a):
        seen.extend([True] if in_race(a) else [])
        return bool(full) and len(seen) > after

    registry = Scarce(short).register()
    choice = registry.choose(ASKED)
    assert choice.kernel == "emulated_mxfp8" and [verdict.name for verdict in choice.skipped()] == ["scarce"]
    assert "scarce" not in choice.ranking() and "wrong" not in str(choice) and not registry.aside()
    full.clear()
    # Within the process it is asked again when the next graph is compiled; another process finds no such choice.
    assert registry.choose(ASKED) is choice
    registry.forget_skipped()
    again = registry.choose(ASKED)  # who is faster is the machine's business
    assert "scarce" in again.ranking() and not again.skipped()


def test_a_choice_in_which_nobody_lacked_memory_stays():
    registry = Scarce(lambda a: False).register()
    choice = registry.choose(ASKED)
    registry.forget_skipped()
    assert registry.choose(ASKED) is choice


def test_a_kept_choice_of_an_older_build_that_blames_memory_is_made_again():
    full = [True]
    scarce = Scarce(lambda a: bool(full) and in_race(a))
    registry = scarce.register()
    choice = registry.choose(ASKED)
    cache = choose.cache_of("cpu")
    candidates = [c for c in registry.candidates("gemm", "mxfp8") if c.name in ("scarce", "emulated_mxfp8")]
    cache.choices[ASKED.key] = {"candidates": sorted(c.key for c in candidates), "choice": choice.to_dict()}
    assert cache.choice(ASKED.key, candidates) is None


def test_where_nobody_has_memory_that_is_raised_not_called_unsupported(monkeypatch):
    registry = Scarce(lambda a: True).register()
    short = Proof(reason=f"{SKIPPED}: OutOfMemoryError")
    monkeypatch.setattr(choose, "proof_of", lambda *args, **how: short)
    with pytest.raises(torch.OutOfMemoryError, match="scarce skipped for lack of memory"):
        registry.choose(ASKED)
    assert not registry.choices()


# ---- self-checks of the engine ----


@pytest.mark.parametrize(
    ("module", "name", "op"),
    [(gemm_blocks, "fp8_gemm_blocks", "fp8_gemm_blocks"), (grouped_gemm, "grouped_gemm", "grouped_gemm")],
    ids=["blocks", "grouped"],
)
def test_a_self_check_without_memory_is_no_finding_and_is_made_again(module, name, op, monkeypatch):
    full, right = [True], getattr(module, name)

    def scarce(*operands, **how):
        if full:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return right(*operands, **how)

    monkeypatch.setattr(module, name, scarce)
    with pytest.raises(torch.OutOfMemoryError, match=f"could not be checked for {op}"):
        choose.why_rejected(op, torch.device("cpu"))
    full.clear()
    assert choose.why_rejected(op, torch.device("cpu")) == ""


def test_a_block_scaled_kernel_without_memory_is_checked_again(monkeypatch):
    full = [True]

    def scarce(a, b, *, out_dtype, candidate):
        if full:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return native_candidates.block_scaled_gemm_ref(a, b, out_dtype=out_dtype)

    monkeypatch.setattr(native_candidates, "block_scaled_gemm", scarce)
    cpu = torch.device("cpu")
    with pytest.raises(torch.OutOfMemoryError, match="vendor could not be checked for block_scaled_gemm"):
        native_candidates.native_kernel("mxfp8", cpu)
    # Doctor lists all of them, with that as a reason.
    verdicts = native_candidates.self_check("mxfp8", cpu)
    assert [verdict.reason.startswith(SKIPPED) for verdict in verdicts] == [False, True, True, True]
    full.clear()
    assert native_candidates.native_kernel("mxfp8", cpu)[0] == "vendor"


def test_a_process_of_its_own_that_lacks_memory_is_no_finding_either():
    entry = "import torch; raise torch.OutOfMemoryError('CUDA out of memory')"
    assert sandbox._in_fresh_process(entry, {}, 60.0, "").reason.startswith(SKIPPED)
