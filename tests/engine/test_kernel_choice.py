"""Kernels compete inside an engine: the right and fast one runs, others are rejected with their reason."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import deepwell as dw
from deepwell.engine.binding import Target, bind, with_gains
from deepwell.engine.compile import measured_fallback, registry_for
from deepwell.engine.passes import work
from deepwell.engine.passes.choose_kernels import KernelRow
from deepwell.engine.passes.gain import keep_gaining
from deepwell.engine.report import EngineReport
from deepwell.errors import ConfigError, UnsupportedError
from deepwell.formats.metrics import sqnr_db
from deepwell.kernels import KernelRegistry
from deepwell.kernels.gemm import cases
from deepwell.kernels.tune import choose
from deepwell.kernels.tune.gain import Gain

sys.path.append(str(Path(__file__).resolve().parents[1] / "kernels"))
import user_kernels


@pytest.fixture(autouse=True)
def _fresh(tmp_path, monkeypatch):
    monkeypatch.setenv("DEEPWELL_CACHE_DIR", str(tmp_path))
    choose.forget()
    torch._dynamo.reset()


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 32, bias=False))


@pytest.fixture
def _users_win(monkeypatch):
    """Races that users' kernels win, whatever the machine does meanwhile: a product of 64 x 64 takes anyone as long."""

    def decided(runners, device, rules):
        for runner in runners:
            runner.lap()
            runner.times_us.append(1.0 if runner.candidate.origin == "user" else 2.0)
        return {}

    monkeypatch.setattr(choose, "_take_turns", decided)


def policy_of(fmt: str, **options) -> dw.PrecisionPolicy:
    policy = dw.PrecisionPolicy(fmt)
    for path in ("0", "2"):
        policy.set_layer_precision(f"path:{path}", fmt, **options)
    return policy


def registry_of(*functions, precision="mxfp8", timeout_s=30.0, **how) -> KernelRegistry:
    registry = KernelRegistry(proof_timeout_s=timeout_s)
    for function in functions:
        registry.register(function.__name__, function, precision=precision, **how)
    return registry


def run(model, registry, fmt="mxfp8", **options):
    engine = dw.compile(model, precision_policy=policy_of(fmt), kernel_registry=registry, **options)
    x = torch.randn(48, 64, requires_grad=True)
    y = engine(x)
    y.sum().backward()
    return engine, x, y


def test_a_users_kernel_that_is_right_and_fastest_runs_in_all_three_products(model):
    calls = []

    def mine(a, b):
        calls.append((*a.shape, b.shape[1]))
        return a @ b

    registry = registry_of(mine, trusted=True)
    engine, x, y = run(model, registry)
    report = engine.report()
    rows = {row.shape: row for row in report.kernels}
    # fwd, dgrad and wgrad of both layers, as M x N x K.
    assert set(rows) == {"48x128x64", "48x32x128", "48x64x128", "48x128x32", "128x64x48", "32x128x48"}
    assert {row.kernel for row in rows.values()} == {"mine"} and all(row.us > 0 for row in rows.values())
    assert (48, 64, 128) in calls and (128, 48, 64) in calls
    # It computes in full precision: so does the model now.
    assert sqnr_db(model(x), y) > 100
    assert "mine" in str(report) and EngineReport.from_json(report.to_json()) == report


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (user_kernels.wrong, "wrong at 256x384x512"),
        (user_kernels.raises, "raised KeyError: 'no such tile'"),
        (user_kernels.hangs, "hangs: no answer within 1 s"),
        (user_kernels.crashes, "ended its process with status 7"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_kernel_that_fails_is_in_the_report_and_training_goes_on(model, kernel, reason):
    engine, _, _ = run(model, registry_of(kernel, timeout_s=1.0 if kernel is user_kernels.hangs else 30.0))
    torch._dynamo.reset()
    plain, _, _ = run(model, None)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    report = engine.report()
    assert {row.kernel for row in report.kernels} == {"emulated_mxfp8"}
    assert all(reason in why for row in report.kernels for _, why in row.set_aside)
    assert f"kernel {kernel.__name__} was rejected" in str(report)
    # The very numbers of an engine without a registry.
    x = torch.randn(48, 64)
    assert torch.equal(engine(x), plain(x))


def test_a_kernel_that_breaks_while_the_model_runs_is_replaced_and_noted(model):
    broken = []

    def breaks(a, b):
        if broken:
            raise RuntimeError("out of tiles")
        return a @ b

    registry = registry_of(breaks, trusted=True)
    engine, x, _ = run(model, registry)
    assert engine.report().kernels[0].kernel == "breaks"
    broken.append(True)
    y = engine(x)
    y.sum().backward()
    torch._dynamo.reset()
    plain, _, _ = run(model, None)
    assert torch.equal(y, plain(x))  # mxfp8 by exact emulation
    assert any("kernel breaks was rejected: raised RuntimeError" in note for note in engine.report().notes)


def test_training_goes_on_with_the_same_kernel_after_it_ran_out_of_memory(model):
    # As a training loop does: lack of memory is caught, something is given up, and the next step is as fast as before.
    full, calls = [], []

    def scarce(a, b):
        if full:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        calls.append(a.shape)
        return a @ b

    registry = registry_of(scarce, trusted=True)
    engine, x, _ = run(model, registry)
    assert {row.kernel for row in engine.report().kernels} == {"scarce"}
    full.append(True)
    with pytest.raises(torch.OutOfMemoryError, match=r"2\.00 GiB"):
        engine(x)
    full.clear()
    calls.clear()
    engine(x).sum().backward()
    assert len(calls) == 6 and not registry.aside()
    assert not any("rejected" in note for note in engine.report().notes)


def test_without_memory_to_compete_the_graph_keeps_its_products_and_the_report_says_so(model, monkeypatch):
    def no_memory(problem):
        raise torch.OutOfMemoryError("CUDA out of memory")

    # The operands of the race do not fit, whoever would run.
    monkeypatch.setattr(cases, "rotating_inputs", no_memory)
    engine, x, y = run(model, registry_of(user_kernels.right, trusted=True))
    rows = engine.report().kernels
    assert {(row.kernel, row.how) for row in rows} == {("emulated_mxfp8", "not measured: lack of memory")}
    torch._dynamo.reset()
    plain, _, _ = run(model, None)
    assert torch.equal(y, plain(x))


def test_a_kernel_is_not_asked_below_its_size_also_when_the_batch_shrinks(model):
    seen = []

    def large(a, b):
        seen.append(min(*a.shape, b.shape[1]))
        return a @ b

    registry = registry_of(large, trusted=True, min_size=32)
    engine, _, _ = run(model, registry)
    assert any(row.kernel == "large" for row in engine.report().kernels)
    with torch.no_grad():
        for rows in (40, 33, 9, 5):
            assert engine(torch.randn(rows, 64)).shape == (rows, 32)
    assert min(seen) >= 32


def test_stochastic_rounding_and_transforms_are_not_given_away(model):
    # NVFP4's weight gradients are rounded at random after a transform: a kernel of "gemm" knows nothing of that.
    registry = registry_of(user_kernels.right, precision="nvfp4")
    engine, _, _ = run(model, registry, fmt="nvfp4")
    assert {row.shape for row in engine.report().kernels} == {"48x128x64", "48x32x128"}


@pytest.fixture
def _as_hopper(monkeypatch):
    """A CPU that is taken for Hopper: the FP8 ops run by their references."""
    monkeypatch.setattr("deepwell.engine.compile.device_of", lambda tensors: Target(kind="cuda", capability=(9, 0)))
    monkeypatch.setattr("deepwell.engine.compile.use_inductor", lambda asked, device: False)


def test_on_fp8_hardware_a_whole_chain_runs_where_codes_are_not_shared(model, _as_hopper):
    registry = registry_of(user_kernels.right, trusted=True)
    model = model.bfloat16()
    engine = dw.compile(model, precision_policy=policy_of("mxfp8"), kernel_registry=registry, measure=False)
    x = torch.randn(48, 64).bfloat16()
    with torch.no_grad():
        y = engine(x)
    report = engine.report()
    # Evaluation quantizes x for one product: the kernel gets the numbers, and the model is as exact as it is.
    assert {row.kernel for row in report.kernels} == {"right"}
    assert sqnr_db(model(x), y) > 45


def test_on_fp8_hardware_a_whole_chain_that_cannot_compete_has_its_reason(model, _as_hopper):
    registry = registry_of(user_kernels.right, trusted=True)
    model = model.bfloat16()
    engine = dw.compile(model, precision_policy=policy_of("mxfp8"), kernel_registry=registry, measure=False)
    engine(torch.randn(48, 64).bfloat16().requires_grad_()).sum().backward()
    rows = engine.report().kernels
    assert len(rows) == 6 and all("register it for fp8_gemm" in dict(row.set_aside)["right"] for row in rows)


def test_codes_compete_too(model, _as_hopper, _users_win):
    registry = KernelRegistry()
    registry.register("codes", user_kernels.fp8_right, op="fp8_gemm", precision="fp8", trusted=True)
    model = model.bfloat16()
    engine = dw.compile(model, precision_policy=policy_of("mxfp8"), kernel_registry=registry, measure=False)
    x = torch.randn(48, 64).bfloat16().requires_grad_()
    y = engine(x)
    y.sum().backward()
    report = engine.report()
    assert {row.op for row in report.kernels} == {"fp8_gemm"} and sum(row.count for row in report.kernels) == 6
    assert {row.kernel for row in report.kernels} == {"codes"}
    assert sqnr_db(model(x), y) > 20


def test_candidates_are_timed_under_the_scales_that_a_product_has(model, _as_hopper, _users_win, monkeypatch):
    # A row's scale and a tensor's are other algorithms to cuBLASLt.
    asked = []
    choose = KernelRegistry.choose
    monkeypatch.setattr(KernelRegistry, "choose", lambda self, problem: asked.append(problem) or choose(self, problem))
    registry = KernelRegistry()
    registry.register("codes", user_kernels.fp8_right, op="fp8_gemm", precision="fp8", trusted=True)
    model = model.bfloat16()
    engine = dw.compile(model, precision_policy=policy_of("mxfp8"), kernel_registry=registry, measure=False)
    engine(torch.randn(48, 64).bfloat16().requires_grad_()).sum().backward()
    assert {problem.one_scale for problem in asked if problem.k == 48} == {True}  # weight gradients: over tokens
    assert {problem.one_scale for problem in asked if problem.k != 48} == {False}


def test_the_registry_and_the_report_print_the_same_rows(model):
    registry = registry_of(user_kernels.right, user_kernels.wrong, trusted=True)
    engine, _, _ = run(model, registry)
    report = engine.report()
    assert sorted(registry.rows(), key=str) == sorted(report.kernels, key=str)
    lines = str(report).splitlines()
    begin = next(i for i, line in enumerate(lines) if line.split()[:1] == ["kernels"])
    table = lines[begin : begin + 1 + len(report.kernels)]
    assert len(table) == 7 and all(line in registry.explain().splitlines() for line in table)
    assert "next best" in table[0] and "kernel wrong was rejected" in registry.explain()


def test_a_chosen_kernel_forgets_the_operands_its_predecessor_was_traced_with(_users_win):
    """Inductor binds traced operands to the op's parameters: those of another op have other numbers of them."""
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.operator_schemas import normalize_function

    from deepwell.engine.passes.choose_kernels import choose_kernels

    registry = KernelRegistry()
    registry.register("codes", user_kernels.fp8_right, op="fp8_gemm", precision="fp8", trusted=True)
    with FakeTensorMode():
        codes, scales = torch.empty(64, 64, dtype=torch.float8_e4m3fn), torch.empty(64)
        traced = make_fx(lambda *given: torch.ops.deepwell.fp8_gemm(*given, True))(codes, scales, codes, scales)
    (row,) = choose_kernels(traced.graph, registry)
    assert row.kernel == "codes"
    (new,) = traced.graph.find_nodes(op="call_function", target=torch.ops.deepwell.chosen_fp8_gemm.default)
    args, kwargs = new.meta.get("eager_input_vals", (new.args, new.kwargs))
    assert normalize_function(new.target, args, kwargs) is not None


def test_measured_microseconds_of_every_op(model):
    engine, _, _ = run(model, None)
    assert engine.report().kernels == ()
    report = engine.report(measure=True)
    assert {row.op for row in report.kernels} == {"round_to"}
    assert all(row.us > 0 and row.how == "measured" for row in report.kernels)
    assert sum(row.count for row in report.kernels) >= 8
    assert EngineReport.from_json(report.to_json()) == report


def test_torch_compile_takes_a_registry(model):
    calls = []

    def mine(a, b):
        calls.append(a.shape)
        return a @ b

    options = {"precision_policy": policy_of("mxfp8"), "kernel_registry": registry_of(mine, trusted=True)}
    fast = torch.compile(model, backend="deepwell", options=options)
    x = torch.randn(48, 64)
    assert sqnr_db(model(x), fast(x)) > 100
    assert torch.Size((48, 64)) in calls


def test_wrong_arguments_are_named(model):
    with pytest.raises(ConfigError, match=r"kernel_registry is a dict; pass a deepwell\.kernels\.KernelRegistry"):
        dw.compile(model, kernel_registry={})


def test_cutlass_on_a_cpu_is_a_note_and_everything_runs(model):
    engine, _, _ = run(model, None, use_cutlass=True)
    assert any("use_cutlass: other kernels run instead" in note for note in engine.report().notes)


# ---- would FP8 gain? ----


def test_measurement_is_for_fp8_gpus_and_strict_only_on_demand():
    hopper, cpu = Target(kind="cuda", capability=(9, 0)), Target(kind="cpu")
    assert measured_fallback(None, "safe", hopper) == "safe"
    assert measured_fallback(None, "strict", hopper) is None
    assert measured_fallback(True, "strict", hopper) == "strict"
    assert measured_fallback(False, "safe", hopper) is None
    assert measured_fallback(True, "safe", cpu) is None
    assert registry_for(None, False, cpu) == (None, [])


def _as_if_on_a_gpu(monkeypatch):
    """Sizes as of a CUDA tensor, everything else on the CPU."""
    sizes = []

    def of(group):
        found = (sum(site.node.meta["example_value"].shape[-1] for site in group), 64, 48, "cuda:0")
        sizes.append(found)
        return found

    monkeypatch.setattr("deepwell.engine.passes.gain._sizes", of)
    monkeypatch.setattr("deepwell.engine.compile.device_of", lambda tensors: Target(kind="cuda", capability=(9, 0)))
    monkeypatch.setattr("deepwell.engine.compile.use_inductor", lambda asked, device: False)
    return sizes


def test_a_layer_that_would_not_gain_stays_in_bf16_with_its_microseconds(model, monkeypatch):
    _as_if_on_a_gpu(monkeypatch)

    rows = []

    def measured(n, k, tokens, device, fused):
        rows.append(fused)
        return Gain(n=n, k=k, tokens=tokens, fp8_us=10.0 if n == 128 else 90.0, bf16_us=30.0)

    monkeypatch.setattr(work, "would_gain", measured)
    model = model.bfloat16()
    engine = dw.compile(model, precision_policy=policy_of("mxfp8"))
    engine(torch.randn(48, 64).bfloat16())
    assert rows == ["", ""]  # no kernel of ours makes tanh
    rows = {(row.path, row.gemm): row for row in engine.report().bindings}
    assert rows["0", "fwd"].scheme == "fp8_row" and "faster: FP8 10 us, bf16 30 us" in rows["0", "fwd"].reason
    kept = rows["2", "wgrad"]
    assert (kept.scheme, kept.binding, kept.format) == ("bf16", "substitute", "mxfp8")
    assert kept.reason == "would not gain: FP8 90 us, bf16 30 us forward and backward at 48 tokens"
    assert engine.report().passes["linear"] == 1
    assert not any("not met" in note for note in engine.report().notes)


def test_rows_that_another_kernel_writes_are_not_measured(monkeypatch):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.RMSNorm(64)
            self.q, self.k = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
            self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64)
            self.o, self.last = nn.Linear(64, 64), nn.RMSNorm(64)

        def forward(self, x):
            normed = self.norm(x)
            h = torch.nn.functional.scaled_dot_product_attention(self.q(normed)[None], self.k(normed)[None], x[None])
            h = self.down(torch.nn.functional.gelu(self.up(h[0].contiguous())))
            return self.last(x + self.o(torch.tanh(h)))

    found = {}

    def measured(n, k, tokens, device, fused):
        found[len(found)] = fused
        return Gain(n=n, k=k, tokens=tokens, fp8_us=1.0, bf16_us=2.0)

    sizes = _as_if_on_a_gpu(monkeypatch)
    monkeypatch.setattr(work, "would_gain", measured)
    policy = dw.PrecisionPolicy("mxfp8")
    for path in ("q", "k", "up", "down", "o"):
        policy.set_layer_precision(f"path:{path}", "mxfp8")
    dw.compile(Block().bfloat16(), precision_policy=policy)(torch.randn(48, 64).bfloat16())
    assert len(sizes) == 4
    # A norm before q and k, and several readers; attention before up, an activation after it and before down; o is
    # added to the stream, and a norm reads the sum.
    assert list(found.values()) == ["x dy", "dy", "x", "dy"]


def test_strict_raises_where_safe_would_keep_bf16(model, monkeypatch):
    _as_if_on_a_gpu(monkeypatch)
    slow = Gain(n=1, k=1, tokens=1, fp8_us=2.0, bf16_us=1.0)
    monkeypatch.setattr(work, "would_gain", lambda *sizes: slow)
    model = model.bfloat16()
    engine = dw.compile(model, precision_policy=policy_of("fp8", scaling="row"), fallback="strict", measure=True)
    with pytest.raises(Exception, match=r"0: fp8 would not gain: FP8 2 us, bf16 1 us") as raised:
        engine(torch.randn(48, 64).bfloat16())
    assert isinstance(raised.value, UnsupportedError) or "UnsupportedError" in str(raised.value)


def test_linears_of_one_input_are_measured_as_one_product(monkeypatch):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k = nn.Linear(64, 96, bias=False), nn.Linear(64, 32, bias=False)

        def forward(self, x):
            return self.q(x), self.k(x)

    sizes = _as_if_on_a_gpu(monkeypatch)
    fast = Gain(n=1, k=1, tokens=1, fp8_us=1.0, bf16_us=2.0)
    monkeypatch.setattr(work, "would_gain", lambda *sizes: fast)
    policy = dw.PrecisionPolicy("mxfp8")
    for path in ("q", "k"):
        policy.set_layer_precision(f"path:{path}", "mxfp8")
    dw.compile(Two().bfloat16(), precision_policy=policy)(torch.randn(48, 64).bfloat16())
    assert sizes == [(128, 64, 48, "cuda:0")]


def test_a_cpu_measures_nothing(model):
    engine, _, _ = run(model, None)
    assert engine.options.measure is None and not engine.options.gains
    assert keep_gaining([], lambda *sizes: pytest.fail("measured"), strict=False) == ([], {})


def test_rows_without_a_gain_are_left_alone(model):
    ir = dw.capture(model)
    bound = bind(ir, policy_of("mxfp8").resolve(ir), Target(kind="cpu"))
    assert with_gains(bound.bindings, {}) == bound.bindings


def test_equal_rows_are_added_up():
    from deepwell.engine.passes.choose_kernels import merge_rows

    known: dict = {}
    row = KernelRow(op="gemm", shape="1x1x1", format="fp8", count=1, kernel="k", us=2.0)
    merge_rows(known, [row, row])
    merge_rows(known, [row])
    assert [found.count for found in known.values()] == [3]


@pytest.mark.gpu
def test_a_gpu_engine_says_what_runs_and_how_long():
    model = nn.Sequential(nn.Linear(2048, 8192, bias=False), nn.Tanh(), nn.Linear(8192, 192, bias=False))
    model = model.bfloat16().cuda()
    engine = dw.compile(model, precision_policy=policy_of("mxfp8"), use_cutlass=True, kernel_registry=KernelRegistry())
    engine(torch.randn(8192, 2048, device="cuda").bfloat16()).sum().backward()
    report = engine.report(measure=True)
    assert any(row.op == "fp8_gemm" and row.us for row in report.kernels)
    assert all("us" in row.reason for row in report.bindings)
