"""KernelRegistry: what may be registered, who competes where, and what is said about it."""

import json
import subprocess
import sys

import pytest
import torch

import user_kernels
from deepwell.errors import ConfigError
from deepwell.kernels import KernelRegistry
from deepwell.kernels.registry import Candidate, Choice, Problem, Verdict, fingerprint_of, formats_for


def problem(m=64, n=64, k=64, **more) -> Problem:
    return Problem(op="gemm", m=m, n=n, k=k, **{"precision": "mxfp8", "dtype": "float32", **more})


def test_the_name_is_loaded_on_first_use_and_loads_no_torch():
    code = "import sys, deepwell.kernels; from deepwell.kernels import KernelRegistry; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
    with pytest.raises(AttributeError, match="no attribute 'Registry'; public names: KernelRegistry"):
        import deepwell.kernels

        _ = deepwell.kernels.Registry


def test_a_kernel_is_registered_as_the_documents_write_it():
    registry = KernelRegistry()
    registry.register("custom_gemm", user_kernels.right, precision="mxfp8", min_size=1024)
    (mine,) = registry.users()
    assert (mine.name, mine.precision, mine.min_size, mine.origin) == ("custom_gemm", "mxfp8", 1024, "user")
    assert mine in registry.candidates("gemm", "mxfp8") and mine not in registry.candidates("gemm", "bf16")
    assert "custom_gemm" in repr(registry)


def test_a_product_that_needs_fp32_sums_is_not_for_fast_kernels():
    fast = Candidate(name="a", op="fp8_gemm", precision="fp8", fn=print, origin="user", fast=True)
    asked = Problem(op="fp8_gemm", m=64, n=64, k=64, precision="fp8", exact_sums=True)
    assert "needs fp32" in fast.why_not(asked)
    easy = Problem(op="fp8_gemm", m=64, n=64, k=64, precision="fp8")
    assert not fast.why_not(easy)
    assert asked.key != easy.key  # what was chosen for one is not taken for the other


def test_a_decorator_registers_and_gives_the_function_back():
    registry = KernelRegistry()

    @registry.register("mine", precision="fp4")
    def mine(a, b):
        return a @ b

    assert registry.users()[0].fn is mine and registry.users()[0].precision == "nvfp4"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": ""}, "name is ''"),
        ({"fn": 3}, "fn of kernel 'k' is a int"),
        ({"op": "conv"}, "op of kernel 'k' is 'conv'; it takes gemm or fp8_gemm"),
        ({"min_size": -1}, "min_size of kernel 'k' is -1"),
        ({"min_size": True}, "min_size of kernel 'k' is True"),
        ({"precision": "fp9"}, "format 'fp9' is not known"),
        ({"name": "torch_bf16"}, "'torch_bf16' is registered for gemm already"),
    ],
)
def test_what_cannot_be_registered_is_named(arguments, message):
    registry = KernelRegistry()
    given = {"name": "k", "fn": user_kernels.right, **arguments}
    with pytest.raises(ConfigError, match=message):
        registry.register(given.pop("name"), given.pop("fn"), **given)
    assert not registry.users()


def test_a_name_is_taken_once_per_op():
    registry = KernelRegistry()
    registry.register("k", user_kernels.right)
    registry.register("k", user_kernels.fp8_right, op="fp8_gemm", precision="fp8")
    with pytest.raises(ConfigError, match="'k' is registered for gemm already"):
        registry.register("k", user_kernels.slow)


def test_min_size_is_the_least_of_all_three_sizes():
    candidate = Candidate(name="k", op="gemm", precision="bf16", fn=user_kernels.right, origin="user", min_size=128)
    assert candidate.why_not(problem(128, 128, 128)) == ""
    for sizes in [(127, 512, 512), (512, 127, 512), (512, 512, 127)]:
        assert "is 127, below its min_size of 128" in candidate.why_not(problem(*sizes))


def test_fp8_stands_in_for_mxfp8_and_nothing_for_the_others():
    assert formats_for("mxfp8") == ("mxfp8", "fp8")
    assert formats_for("fp4") == ("nvfp4",)
    assert formats_for("bf16") == ("bf16",)


def test_m_is_a_bucket_and_n_and_k_are_exact():
    assert problem(65).key == problem(128).key != problem(129).key
    assert problem(64).bucket.m == 64 and problem(1).bucket.m == 1
    keys = {problem(n=80).key, problem(k=80).key, problem(bias=True).key, problem(activation="gelu").key, problem().key}
    assert len(keys) == 5


def test_a_choice_prints_its_reasons_and_round_trips_through_json():
    choice = Choice(
        problem="gemm 64x64x64 mxfp8 float32",
        device="cpu",
        kernel="fast",
        us=3.25,
        how="measured",
        verdicts=(
            Verdict(name="fast", precision="mxfp8", origin="user", us=3.25, sqnr_db=31.0),
            Verdict(name="slow", precision="mxfp8", origin="user", us=9.0),
            Verdict(name="bad", precision="mxfp8", origin="user", reason="raised KeyError"),
        ),
    )
    assert Choice.from_dict(json.loads(json.dumps(choice.to_dict()))) == choice
    assert choice.ranking() == ("fast", "slow")
    text = str(choice)
    assert text.index("3.2 us, 31.0 dB") < text.index("9.0 us") < text.index("raised KeyError")
    with pytest.raises(ConfigError, match="not a choice"):
        Choice.from_dict({"kernel": "fast"})


def test_sources_are_distinguished():
    def make(scale):
        def kernel(a, b):
            return a @ b * scale

        return kernel

    assert fingerprint_of(make(1.0)) == fingerprint_of(make(1.0)) != fingerprint_of(make(2.0))
    assert fingerprint_of(user_kernels.right) != fingerprint_of(user_kernels.wrong)
    # A tensor inside cannot be hashed by its name: nothing about such a kernel is kept on disk.
    assert fingerprint_of(make(torch.ones(1))) is None


def test_transformer_engine_competes_where_it_can_be_imported(tmp_path):
    # A stand-in with TE's names: its linear multiplies as torch does. In a process of its own: the list is made once.
    package = tmp_path / "transformer_engine"
    (package / "common").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "common" / "__init__.py").write_text("")
    (package / "common" / "recipe.py").write_text("class Float8CurrentScaling: pass\n")
    (package / "pytorch.py").write_text(
        "import contextlib, torch\n"
        "from transformer_engine.common.recipe import Float8CurrentScaling\n"
        "def Linear(k, n, bias, params_dtype, device):\n"
        "    return torch.nn.Linear(k, n, bias=bias, dtype=params_dtype, device=device)\n"
        "@contextlib.contextmanager\n"
        "def fp8_autocast(enabled, fp8_recipe):\n"
        "    assert enabled and isinstance(fp8_recipe, Float8CurrentScaling)\n"
        "    yield\n"
    )
    code = f"""
import sys; sys.path.insert(0, {str(tmp_path)!r})
from deepwell.kernels import KernelRegistry
from deepwell.kernels.gemm.cases import cases
from deepwell.kernels.tune.problem import Problem
from deepwell.kernels.tune.verify import verify
candidate = KernelRegistry().candidate("gemm", "transformer_engine_fp8")
problem = Problem(op="gemm", precision="fp8", dtype="float32")
print(verify(candidate, cases(candidate, problem)).reason or "passed")
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.stdout.strip() == "passed", run.stderr + run.stdout
