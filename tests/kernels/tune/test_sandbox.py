"""What a user's kernel may do before it is trusted: write, raise, hang, crash; the process and the model go on."""

from dataclasses import asdict

import pytest
import torch

import user_kernels
from asked import problem, registry_of
from deepwell.errors import UnsupportedError
from deepwell.kernels import KernelRegistry
from deepwell.kernels.experts import tiles_proof
from deepwell.kernels.gemm.cases import cases, operands
from deepwell.kernels.production_kernels import ProductionKernelManager
from deepwell.kernels.tune import choose, sandbox
from deepwell.kernels.tune.out_of_memory import SKIPPED
from deepwell.kernels.tune.verify import Proof, copies_of, verify, wrote_into

pytestmark = pytest.mark.usefixtures("no_choices")

NAMES = ("a", "b", "bias")
LARGE = 600  # in a bucket beyond the proof's sizes


def verdict_of(registry, name, asked):
    return next(verdict for verdict in registry.choose(asked).verdicts if verdict.name == name)


# ---- operands are read, not written ----


@pytest.mark.parametrize("trusted", [False, True], ids=["apart", "trusted"])
@pytest.mark.parametrize(
    ("kernel", "operand"),
    [(user_kernels.halves_b, "b"), (user_kernels.zeroes_a, "a"), (user_kernels.zeroes_bias, "bias")],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_kernel_that_writes_into_an_operand_is_rejected(kernel, operand, trusted):
    registry = registry_of(kernel, trusted=trusted)
    assert registry.choose(problem()).kernel == "emulated_mxfp8"
    assert verdict_of(registry, kernel.__name__, problem()).reason == f"wrote into its operand {operand}"


def test_a_kernel_of_codes_is_held_to_the_same():
    registry = registry_of(user_kernels.fp8_halves_scale, op="fp8_gemm", precision="fp8")
    (candidate,) = registry.users()
    assert verify(candidate, cases(candidate, problem(op="fp8_gemm"))).reason == "wrote into its operand scale_b"


def test_what_prepares_an_operand_may_not_write_either():
    registry = KernelRegistry()
    registry.register("k", user_kernels.right, prepare=lambda b: b.mul_(0.5), precision="mxfp8")
    assert verdict_of(registry, "k", problem()).reason == "wrote into its operand b"


@pytest.mark.parametrize("trusted", [False, True], ids=["apart", "trusted"])
def test_one_that_writes_at_the_real_shape_only_is_rejected_and_others_are_judged_by_clean_operands(trusted):
    registry = registry_of(user_kernels.halves_b_when_large, user_kernels.right, trusted=trusted)
    asked = problem(m=LARGE)
    assert verdict_of(registry, "halves_b_when_large", asked).reason == "wrote into its operand b"
    assert {"right", "emulated_mxfp8"} == set(registry.choose(asked).ranking())


def test_one_that_writes_only_when_it_was_called_before_is_found_after_it_was_timed():
    seen = []

    def later(a, b):
        seen.extend([True] if a.shape == (128, 160) else [])
        c = a @ b
        if len(seen) > 2:
            a.zero_()
        return c

    registry = registry_of(later, trusted=True)
    assert verdict_of(registry, "later", problem()).reason == "wrote into its operand a"
    assert len(seen) > 2


def test_a_callers_own_operands_stay_as_they_are():
    manager = ProductionKernelManager(registry_of(user_kernels.halves_b, user_kernels.halves_b_when_large))
    a, b = torch.randn(LARGE, 160), torch.randn(128, 160).T
    before = b.clone()
    manager.gemm(a, b, precision="mxfp8")
    assert torch.equal(b, before)


def test_operands_are_compared_by_their_bits_and_copies_lie_as_they_do():
    given = operands(problem(bias=True))
    given[0][0, 0], given[0][0, 1] = float("nan"), 0.0
    own = copies_of(given)
    assert [x.stride() for x in own] == [x.stride() for x in given]
    assert wrote_into(NAMES, own, given) == ""  # a NaN is itself
    own[0][0, 1] = -0.0
    assert wrote_into(NAMES, own, given) == "wrote into its operand a"
    assert wrote_into(NAMES, (given[0], given[1].T, given[2]), given) == "wrote into its operand b"


# ---- raising ----


def breaks_after(calls: int, error: Exception):
    """A kernel that is right in its proof and for some calls at the race's shape."""
    seen = []

    def breaks(a, b):
        seen.extend([True] if a.shape == (32, 64) else [])
        if len(seen) > calls:
            raise error
        return a @ b

    return breaks


@pytest.mark.parametrize(
    "error", [RuntimeError("tile table exhausted"), user_kernels.TileError("tile table exhausted")]
)
@pytest.mark.parametrize("calls", [1, 2, 6])
def test_one_that_raises_while_it_is_timed_is_rejected_and_the_others_go_on(calls, error):
    # At the turn that does not count, and between timed ones.
    asked = problem(32, 32, 64)
    registry = registry_of(breaks_after(calls, error), user_kernels.right, trusted=True)
    choice = registry.choose(asked)
    assert set(choice.ranking()) == {"right", "emulated_mxfp8"}
    reason = verdict_of(registry, "breaks", asked).reason
    assert reason == f"raised {type(error).__name__} while it was timed: tile table exhausted"


def test_where_it_was_the_only_other_one_the_built_in_kernel_runs(caplog):
    manager = ProductionKernelManager(registry_of(breaks_after(2, RuntimeError("exhausted")), trusted=True))
    a, b = torch.randn(32, 64), torch.randn(64, 32)
    assert manager.gemm(a, b, precision="mxfp8").shape == (32, 32)
    assert manager.registry.choices()[0].kernel == "emulated_mxfp8"
    assert "kernel breaks was rejected" in caplog.text and "exhausted" in caplog.text


def test_an_error_of_a_users_own_kind_is_a_reason_too():
    registry = registry_of(user_kernels.raises_its_own)
    assert verdict_of(registry, "raises_its_own", problem()).reason == "raised TileError: no such tile"


def test_one_that_alone_could_serve_is_tried_at_the_real_shape_all_the_same():
    registry = registry_of(user_kernels.right, user_kernels.wrong_when_large, precision="fp32", trusted=True)
    asked = problem(m=LARGE, precision="fp32", dtype="bfloat16")  # no built-in kernel takes that
    registry.set_aside("right", "for the test")
    with pytest.raises(UnsupportedError, match="wrong_when_large wrong at 1024x128x160"):
        registry.choose(asked)


# ---- the first run at a real size, in a process of its own ----


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (user_kernels.hangs_when_large, "hangs at 1024x128x160: no answer within 2 s"),
        (user_kernels.crashes_when_large, "ended its process with status 7 at 1024x128x160"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_one_that_hangs_or_crashes_at_the_real_size_only_does_so_elsewhere_and_once(
    kernel, reason, monkeypatch, caplog
):
    registry = registry_of(kernel, timeout_s=2.0)
    assert kernel.__name__ in registry.choose(problem(m=64)).ranking()
    assert registry.choose(problem(m=LARGE)).kernel == "emulated_mxfp8"
    assert verdict_of(registry, kernel.__name__, problem(m=LARGE)).reason == reason
    assert f"kernel {kernel.__name__} was rejected on cpu: {reason}" in caplog.text
    # What was found is kept by itself: another process, with other candidates beside it, does not try again.
    choose.forget()

    def others(candidate, *args, **how):
        assert candidate.name != kernel.__name__
        return sandbox.verify_apart(candidate, *args, **how)

    monkeypatch.setattr(choose, "verify_apart", others)
    again = registry_of(kernel, user_kernels.right, timeout_s=2.0)
    assert set(again.choose(problem(m=LARGE)).ranking()) == {"right", "emulated_mxfp8"}


@pytest.mark.parametrize("kernel", [user_kernels.lacks_memory_when_large, user_kernels.is_killed_when_large])
def test_lack_of_memory_there_is_nobodys_fault_and_not_kept(kernel):
    registry = registry_of(kernel)
    choice = registry.choose(problem(m=LARGE))
    assert choice.kernel == "emulated_mxfp8"
    (verdict,) = choice.skipped()
    assert verdict.name == kernel.__name__ and verdict.reason.startswith(SKIPPED)
    cache = choose.cache_of("cpu")
    assert cache.proof(registry.users()[0], problem(m=LARGE).key) is None and not cache.choices


def test_no_process_is_started_for_what_is_built_in_or_trusted(monkeypatch):
    monkeypatch.setattr(choose, "verify_apart", lambda *args, **how: pytest.fail("a process of its own"))
    registry = registry_of(user_kernels.right, trusted=True)
    assert registry.choose(problem()).how == "measured"


def test_a_fresh_process_tries_the_problem_that_it_is_given():
    # What a GPU uses.
    asked = problem(m=1024, bias=True, activation="gelu")
    cases = [
        # An interpreter takes seconds to start; what a fork tells as well is not asked again.
        (user_kernels.right_with_everything, 120, ""),
        (user_kernels.crashes_when_large, 120, "ended its process with status 7 at 1024x128x160"),
        (user_kernels.hangs_when_large, 1.0, "hangs at 1024x128x160: no answer within 1 s"),
    ]
    for function, timeout_s, reason in cases:
        address = sandbox._address(registry_of(function).users()[0])
        request = {**address, "problem": asdict(asked), "at_size": True}
        found = sandbox._in_fresh_process(sandbox._ENTRY, request, timeout_s, " at 1024x128x160").reason
        assert found.startswith(reason) and bool(found) == bool(reason), found


# ---- lack of memory in the proof ----


def test_a_proof_without_memory_on_a_cpu_is_skipped_without_a_word_on_the_screen(capfd):
    registry = registry_of(user_kernels.lacks_memory)
    (verdict,) = registry.choose(problem()).skipped()
    assert verdict.reason == f"{SKIPPED}: MemoryError"
    assert choose.cache_of("cpu").proof(registry.users()[0], "float32") is None
    assert "Traceback" not in capfd.readouterr().err


# ---- several in one process ----


def asked_for(device, count=4):
    candidates = [candidate for candidate in tiles_proof.built_in(tiles_proof.OP) if candidate.name.startswith("prod")]
    return [(one, problem(op=tiles_proof.OP, details="nk", device=device)) for one in candidates[:count]]


def test_a_process_answers_for_each_candidate_it_was_asked_about():
    requests = [
        {**sandbox._address(candidate), "problem": asdict(asked)} for candidate, asked in asked_for("cpu", count=2)
    ]
    lines, ended = sandbox._answers(
        sandbox._ENTRY_TOGETHER, {"asked": requests, "compiles_ahead": False}, timeout_s=120.0
    )
    assert ended is None and [*map(list, lines)] == [["tries"], ["proof"], ["tries"], ["proof"]]
    assert all(not line["proof"]["reason"] for line in lines[1::2])


class Processes:
    """Stand-ins for the processes of `verify_together`: each answers as its turn in a script says."""

    def __init__(self, *script):
        self.script, self.requests = list(script), []

    def __call__(self, entry, request, timeout_s):
        self.requests.append(request)
        proved, ended = self.script.pop(0)
        names = [one["name"] for one in request["asked"]]
        lines = [line for reason in proved for line in ({"tries": ""}, {"proof": {"reason": reason}})]
        return lines + [{"tries": name} for name in names[len(proved) : len(proved) + (ended is not None)]], ended


def test_one_that_hangs_is_rejected_and_the_next_process_tries_the_rest(monkeypatch):
    # The third hangs; in the next process the fourth is right.
    processes = Processes((["", "wrong"], Proof(reason="hangs")), ([""], None))
    monkeypatch.setattr(sandbox, "_answers", processes)
    proofs = sandbox.verify_together(asked_for("cuda:0"), 1.0)
    assert [proof.reason for proof in proofs] == ["", "wrong", "hangs", ""]
    assert [len(request["asked"]) for request in processes.requests] == [4, 1]


def test_an_error_that_cuda_keeps_starts_another_process_without_blame(monkeypatch):
    processes = Processes((["", "illegal memory access"], None), (["", ""], None))
    monkeypatch.setattr(sandbox, "_answers", processes)
    proofs = sandbox.verify_together(asked_for("cuda:0"), 1.0)
    assert [proof.reason for proof in proofs] == ["", "illegal memory access", "", ""]


def test_a_crash_of_the_compiler_is_found_one_by_one(monkeypatch):
    crash = Proof(reason="ended its process with status -11")
    answers = [([], crash), ([{"tries": ""}], crash), ([{"tries": ""}, {"proof": {"reason": ""}}] * 3, None)]
    requests = []
    monkeypatch.setattr(
        sandbox, "_answers", lambda entry, request, timeout_s: requests.append(request) or answers.pop(0)
    )
    proofs = sandbox.verify_together(asked_for("cuda:0"), 1.0)
    assert [proof.reason for proof in proofs] == [crash.reason, "", "", ""]
    assert [request["compiles_ahead"] for request in requests] == [True, False, False]
