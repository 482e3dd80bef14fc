"""FP8 by tensor and by 1x128 blocks: schemes, bindings, products equal to their emulation, and whole models."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
import zoo_models
from torch import Tensor, nn

import deepwell as dw
from deepwell.bench.llama import Llama, LlamaConfig
from deepwell.engine.backend import BackendOptions, compile_graph
from deepwell.engine.binding import Target, bind, with_gains
from deepwell.engine.compile import unproven_formats
from deepwell.engine.passes.gain import keep_gaining
from deepwell.engine.passes.linear import find_linears
from deepwell.errors import ConfigError, UnsupportedError
from deepwell.formats.metrics import assert_bitwise_equal, sqnr_db
from deepwell.kernels.gemm.linear import low_precision_linear
from deepwell.kernels.gemm.schemes import parse_scheme
from deepwell.kernels.tune.gain import Gain, measure, would_gain

TENSOR, HYBRID, BLOCKS = "fp8_tensor", "fp8_tensor,gradients=e5m2", "fp8_1x128"
SCHEMES = (TENSOR, HYBRID, BLOCKS)
# What the policy calls the same, rounded exactly and multiplied in fp32.
EMULATED = {
    TENSOR: "emulate:fp8,gradients=e4m3",
    HYBRID: "emulate:fp8",
    BLOCKS: "emulate:fp8,scaling=1x128",
    "fp8_row": "emulate:fp8,scaling=row",
    "bf16": "bf16",
}
# (tokens, K, N): whole blocks; ends inside a block each way; fewer than a block, no whole lines; one token.
SHAPES = [(256, 256, 384), (200, 144, 300), (37, 20, 36), (1, 130, 16)]
HOPPER = Target(kind="cuda", capability=(9, 0))


def thrice(scheme: str) -> str:
    return "|".join([scheme] * 3)


def run(scheme: str, x: Tensor, weights: list[Tensor], dy: Tensor, bias: Tensor | None = None) -> list[Tensor]:
    """y, dx and the weights' gradients of one linear."""
    leaves = [t.detach().clone(memory_format=torch.preserve_format).requires_grad_() for t in (x, *weights)]
    y = low_precision_linear(leaves[0], leaves[1:], bias, scheme)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def numbers(t: int, k: int, n: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    """x, w and dy; the tokens of dy differ by octaves, as gradients do."""
    torch.manual_seed(t + k + n)
    loud = torch.exp2(torch.randint(-4, 3, (t, 1)).float())
    return torch.randn(t, k).to(dtype), torch.randn(n, k).to(dtype), (torch.randn(t, n) * loud).to(dtype)


# ---- schemes ----


def test_a_scheme_names_what_operands_are_rounded_to() -> None:
    how = parse_scheme(f"{TENSOR}|{HYBRID}|{BLOCKS}")
    assert (how.fwd.method, how.fwd.format.rhs.format) == ("fp8_tensor", "fp8_e4m3_tensor_pow2")
    assert (how.dgrad.method, how.dgrad.format.lhs.format) == ("fp8_tensor", "fp8_e5m2_tensor_pow2")
    assert (how.wgrad.method, how.wgrad.format.lhs.format) == ("fp8_1x128", "fp8_e4m3_1x128_pow2")
    # A forward has no gradient: E4M3 whatever those are.
    assert parse_scheme(thrice(HYBRID)).fwd.format.lhs.format == "fp8_e4m3_tensor_pow2"
    assert parse_scheme(thrice(BLOCKS)).fwd.format.rhs.format == "fp8_e4m3_128x128_pow2"


def test_a_scheme_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="fp8_tensor, fp8_1x128"):
        parse_scheme(thrice("fp8_column"))
    with pytest.raises(ConfigError, match="gradients"):
        parse_scheme(thrice("fp8_tensor,gradients=e3m4"))


# ---- one linear ----


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_forward_and_backward_equal_the_emulation_bit_for_bit(scheme, shape) -> None:
    x, w, dy = numbers(*shape)
    found, wanted = run(thrice(scheme), x, [w], dy), run(thrice(EMULATED[scheme]), x, [w], dy)
    for name, mine, ref in zip(("y", "dx", "dw"), found, wanted, strict=True):
        assert mine.isfinite().all() and mine.any()
        if shape == SHAPES[0]:
            assert_bitwise_equal(mine, ref, name)
        else:
            # Zeros that fill up a block may change the order of the reference's own sums.
            assert sqnr_db(ref.float(), mine.float()) > 80, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_products_keep_the_signal_that_the_design_asks_for(scheme, dtype) -> None:
    torch.manual_seed(0)
    x, w, dy = torch.randn(512, 384).to(dtype), torch.randn(256, 384).to(dtype), torch.randn(512, 256).to(dtype)
    found = run(thrice(scheme), x, [w], dy)
    exact = (x.float() @ w.float().T, dy.float() @ w.float(), dy.float().T @ x.float())
    for i, (mine, ref) in enumerate(zip(found, exact, strict=True)):
        assert mine.dtype is dtype
        assert sqnr_db(ref, mine.float()) > (24 if scheme == HYBRID and i else 27)


def test_finer_scales_hear_quiet_tokens_beside_loud_ones() -> None:
    # One scale for the tensor has to span all gradients: what is 2^-18 of the loudest token underflows E4M3. A block of
    # 1x128 is a token's own. In the wgrad the loud tokens rule in any case.
    torch.manual_seed(0)
    x, w = torch.randn(256, 128).bfloat16(), torch.randn(128, 128).bfloat16()
    dy = torch.randn(256, 128)
    dy[1:] *= 2.0**-18
    exact = (dy.bfloat16().float() @ w.float())[1:]
    heard = {name: sqnr_db(exact, run(thrice(name), x, [w], dy.bfloat16())[1][1:].float()) for name in SCHEMES}
    assert heard[TENSOR] < 10 and heard[BLOCKS] > 27
    assert 22 < heard[HYBRID] < 27


# q, k and v of the race's model shrunk, and widths that end inside a square.
@pytest.mark.parametrize("widths", [(256, 128, 128), (256, 128, 72), (32, 16, 24)], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_merged_weights_are_one_weight(scheme, widths) -> None:
    x, w, dy = numbers(192, 160, sum(widths))
    found = run(thrice(scheme), x, [*w.split(widths)], dy)
    whole = run(thrice(scheme), x, [w], dy)
    assert_bitwise_equal(found[0], whole[0], "y")
    assert_bitwise_equal(found[1], whole[1], "dx")
    assert_bitwise_equal(torch.cat(found[2:]), whole[2], "dw")


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("widths", [(72,), (128, 72)], ids=str)
def test_a_weight_stored_the_other_way_is_the_same_weight(scheme, widths) -> None:
    # GPT-2's Conv1D stores [K, N]; its linear sees a view.
    x, w, dy = numbers(64, 160, sum(widths))
    parts = w.split(widths)
    transposed = [part.T.contiguous().T for part in parts]
    for mine, ref in zip(run(thrice(scheme), x, transposed, dy), run(thrice(scheme), x, [*parts], dy), strict=True):
        assert_bitwise_equal(mine.contiguous(), ref)


MIXED = [
    f"{TENSOR}|bf16|{BLOCKS}",
    f"bf16|{TENSOR}|{TENSOR}",
    f"{BLOCKS}|{HYBRID}|{TENSOR}",
    f"fp8_row|{BLOCKS}|fp8_row",
    f"{TENSOR}|fp8_row|bf16",
    f"{BLOCKS}|{BLOCKS}|emulate:mxfp8",
]


@pytest.mark.parametrize("scheme", MIXED)
def test_mixed_schemes_run_each_gemm_by_itself(scheme) -> None:
    # A policy may name another format for each GEMM; operands are then shared only where the two agree.
    x, w, dy = numbers(256, 128, 256)
    found = run(scheme, x, [w], dy)
    for i, part in enumerate(scheme.split("|")):
        alone = run(thrice(EMULATED.get(part, part)), x, [w], dy)[i]
        assert sqnr_db(alone.float(), found[i].float()) > 60, part


@pytest.mark.parametrize("scheme", SCHEMES)
def test_copies_that_no_gradient_needs_are_not_made(scheme) -> None:
    # Evaluation, frozen weights (LoRA), and a first layer whose input has no gradient.
    x, w, dy = numbers(64, 128, 128)

    def calls(needs_dx: bool, needs_dw: bool) -> list[str]:
        seen: list[str] = []

        class Log(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                if func.namespace == "deepwell":
                    seen.append(func._schema.name.partition("::")[2])
                return func(*args, **(kwargs or {}))

        with Log():
            given = x.clone().requires_grad_(needs_dx), w.clone().requires_grad_(needs_dw)
            y = low_precision_linear(given[0], [given[1]], None, thrice(scheme))
            if y.requires_grad:
                y.backward(dy)
        return seen

    copy = "quantize_1x128" if scheme == BLOCKS else "quantize_tensor"
    weight = "quantize_weights_128x128" if scheme == BLOCKS else "quantize_weights"
    product = "fp8_gemm_blocks" if scheme == BLOCKS else "fp8_gemm"
    forward, backward = [weight, product], [f"{weight}_transposed", product]
    assert calls(False, False) == [copy, *forward]
    assert calls(True, False) == [copy, *forward, copy, *backward]
    assert calls(True, True) == [f"{copy}_both", *forward, f"{copy}_both", *backward, product]
    assert calls(False, True) == [f"{copy}_both", *forward, f"{copy}_both", product]


def test_what_the_backward_keeps_of_x_is_one_byte_an_element() -> None:
    x, w, _ = numbers(256, 384, 128)
    for scheme in SCHEMES:
        kept: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t) or t, lambda t: t):
            low_precision_linear(x.requires_grad_(), [w.requires_grad_()], None, thrice(scheme))
        sizes = [t.numel() * t.element_size() for t in kept if t.data_ptr() != w.data_ptr()]
        assert max(sizes) == x.numel() and sum(sizes) <= 1.05 * x.numel()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_tokens_have_a_gradient_of_zero(scheme) -> None:
    x, w, dy = torch.zeros(0, 48).bfloat16(), torch.randn(32, 48).bfloat16(), torch.zeros(0, 32).bfloat16()
    y, dx, dw = run(thrice(scheme), x, [w], dy)
    assert y.shape == (0, 32) and dx.shape == (0, 48) and not dw.any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_not_finite_stays_visible(scheme, bad) -> None:
    x, w, dy = numbers(64, 128, 128)
    x[3, 5] = bad
    y, _, dw = run(thrice(scheme), x, [w], dy)
    assert not y[3].isfinite().any() and not dw.isfinite().all()
    if scheme == BLOCKS:
        assert y[:3].isfinite().all() and y[4:].isfinite().all()


# ---- binding ----


class Two(nn.Module):
    def __init__(self, hidden: int = 256) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(128, hidden, bias=False), nn.Linear(hidden, 128, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)))


def bound(device: Target, hidden: int = 256, **options: str):
    ir = dw.capture(Two(hidden))
    return bind(ir, dw.PrecisionPolicy.recipe("fp8", **options).resolve(ir), device)


def schemes_of(found) -> dict[str, set[tuple[str, str]]]:
    return {g: {(b.binding, b.scheme) for b in found.bindings if b.gemm == g} for g in ("fwd", "dgrad", "wgrad")}


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0), (12, 0)])
def test_tensor_scales_are_native_on_every_fp8_gpu(capability) -> None:
    device = Target(kind="cuda", capability=capability)
    alike = schemes_of(bound(device, scaling="tensor", gradients="e4m3"))
    assert set().union(*alike.values()) == {("native", TENSOR)}
    hybrid = schemes_of(bound(device, scaling="tensor", gradients="e5m2"))
    assert hybrid == {"fwd": {("native", TENSOR)}, "dgrad": {("native", HYBRID)}, "wgrad": {("native", HYBRID)}}


def test_fp8_and_no_more_is_rows_on_a_gpu() -> None:
    found = bound(HOPPER)
    assert {(b.binding, b.scheme) for b in found.bindings} == {("substitute", "fp8_row")}
    assert all("as the policy leaves scales to the device" in b.reason for b in found.bindings)


def test_blocks_are_native_on_hopper_alone_and_rows_elsewhere_say_why() -> None:
    found = bound(HOPPER, scaling="1x128")
    assert {(b.binding, b.scheme) for b in found.bindings} == {("native", BLOCKS)}
    assert all("per 1x128, of weights per 128x128" in b.reason for b in found.bindings)
    for capability in ((8, 9), (10, 0), (12, 0)):
        other = bound(Target(kind="cuda", capability=capability), scaling="1x128")
        assert {(b.binding, b.scheme) for b in other.bindings} == {("substitute", "fp8_row")}
        assert all("has no products with 1x128 scales" in b.reason for b in other.bindings)


def test_blocks_that_fail_their_self_check_are_rows_with_that_reason() -> None:
    device = Target(kind="cuda", capability=(9, 0), unproven=(("fp8_1x128", "its wgrad is 3.0 dB"),))
    found = bound(device, scaling="1x128")
    assert {(b.binding, b.scheme) for b in found.bindings} == {("substitute", "fp8_row")}
    assert all("self-check here (its wgrad is 3.0 dB)" in b.reason for b in found.bindings)
    ir = dw.capture(Two())
    with pytest.raises(UnsupportedError, match="self-check"):
        bind(ir, dw.PrecisionPolicy.recipe("fp8", scaling="1x128").resolve(ir), device, fallback="strict")


def test_a_hopper_gpu_is_asked_for_its_proof_and_others_are_not(monkeypatch) -> None:
    asked = []
    monkeypatch.setattr(
        "deepwell.engine.compile.why_rejected", lambda op, device: asked.append(device) or "wrong by 3 dB"
    )
    gpu = torch.device("cuda", 0)
    assert unproven_formats((9, 0), gpu) == (("fp8_1x128", "wrong by 3 dB"),) and asked == [gpu]
    assert unproven_formats((8, 9), gpu) == () and asked == [gpu]


@pytest.mark.parametrize("scaling", ["row", "1x128"])
def test_e5m2_gradients_with_finer_scales_are_a_substitute(scaling) -> None:
    found = bound(HOPPER, scaling=scaling, gradients="e5m2")
    by_gemm = {b.gemm: b for b in found.bindings}
    assert by_gemm["fwd"].binding == "native"
    assert by_gemm["dgrad"].binding == "substitute" and "E4M3, not E5M2" in by_gemm["dgrad"].reason


def test_padded_sizes_are_reported() -> None:
    assert all("padded to multiples of 128" in b.reason for b in bound(HOPPER, 200, scaling="1x128").bindings)
    assert all("padded to multiples of 16" in b.reason for b in bound(HOPPER, 200, scaling="tensor").bindings)
    assert not any("filled" in b.reason for b in bound(HOPPER, scaling="1x128").bindings)


def test_a_cpu_emulates_them() -> None:
    assert {b.scheme for b in bound(Target(kind="cpu"), scaling="1x128").bindings} == {"emulate:fp8,scaling=1x128"}


# ---- models ----


def compiled(model: nn.Module, options: BackendOptions):
    return torch.compile(model, backend=lambda graph, inputs: compile_graph(graph, inputs, options))


def linears_of(model: nn.Module, but: str) -> list[str]:
    return [name for name, m in model.named_modules() if isinstance(m, nn.Linear) and name != but]


def small_llama(layers: int) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    config = LlamaConfig(width=128, num_heads=4, num_kv_heads=2, hidden=192, num_layers=layers, vocab=256)
    model = Llama(config).init_weights()
    tokens = torch.randint(0, 256, (2, 65))
    return model, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


@pytest.mark.parametrize(
    ("scheme", "use_inductor"),
    [(TENSOR, False), (HYBRID, False), (BLOCKS, False), pytest.param(BLOCKS, True, marks=pytest.mark.slow)],
)
def test_a_llama_trains_with_its_quantizations_apart(scheme, use_inductor, request) -> None:
    if use_inductor:
        request.getfixturevalue("cxx_compiler")
    layers = 1 if use_inductor else 2
    model, x, y = small_llama(layers)
    model(x, y).backward()
    exact = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    options = BackendOptions(
        schemes=dict.fromkeys(linears_of(model, "head"), thrice(scheme)), use_inductor=use_inductor
    )
    with torch._inductor.config.patch(force_disable_caches=True):
        loss = compiled(model, options)(x, y)
        loss.backward()
    assert abs(loss.item() - model(x, y).item()) < 0.01
    # q, k, v and gate, up are one product each; nothing before a linear writes its codes.
    counts = options.counts
    assert (counts["linear"], counts["merged_linear"], counts["fused_quantize"]) == (7 * layers, 2 * layers, 0)
    assert counts["rms_norm"] == 2 * layers + 1 and counts["swiglu"] == layers
    made = {name: list(group) for name, group in itertools.groupby(sorted(c.name for c in options.calls))}
    assert ("quantize_1x128_both" if scheme == BLOCKS else "quantize_tensor_both") in made
    for name, p in model.named_parameters():
        assert sqnr_db(exact[name], p.grad) > (11 if scheme == HYBRID else 14), name


@pytest.mark.parametrize(
    ("model_type", "scheme"),
    [
        ("qwen2", BLOCKS),
        ("gpt2", TENSOR),
        *(pytest.param(*p, marks=pytest.mark.slow) for p in (("qwen2", TENSOR), ("gpt2", BLOCKS))),
    ],
)
def test_hugging_face_models_train(model_type, scheme, batch) -> None:
    # Qwen2 has biases on q, k and v; GPT-2 stores [K, N], with LayerNorm and GELU before its linears.
    model = zoo_models.tiny_model(model_type).eval()
    ref = model(**batch).loss
    ref.backward()
    exact = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    names = [n for n, m in model.named_modules() if hasattr(m, "weight") and m.weight.dim() == 2 and ".emb" not in n]
    schemes = dict.fromkeys(
        [n for n in names if "embed" not in n and "wte" not in n and "wpe" not in n], thrice(scheme)
    )
    schemes.pop("lm_head", None)
    options = BackendOptions(schemes=schemes)
    loss = compiled(model, options)(**batch).loss
    loss.backward()
    assert options.rewritten == set(schemes) and options.counts["fused_quantize"] == 0
    assert abs(loss.item() - ref.item()) < 0.01 * ref.item()
    grads = {name: p.grad for name, p in model.named_parameters()}
    worst = min((sqnr_db(exact[n], grads[n]), n) for n in exact if exact[n].norm() > 1e-3)
    assert worst[0] > 8, worst


def test_the_engine_runs_what_the_policy_asks_for_on_a_gpu_that_has_it(monkeypatch, batch) -> None:
    # All of `dw.compile` but the GPU itself: its ops compute by their references.
    monkeypatch.setattr("deepwell.engine.compile.device_of", lambda tensors: HOPPER)
    monkeypatch.setattr("deepwell.engine.compile.use_inductor", lambda asked, device: False)
    hybrid = {"scaling": "tensor", "gradients": "e5m2"}
    for options, scheme in ((hybrid, HYBRID), ({"scaling": "1x128"}, BLOCKS)):
        torch._dynamo.reset()
        model = zoo_models.tiny_model("llama", num_key_value_heads=2)
        policy = dw.PrecisionPolicy.recipe("fp8", **options)
        engine = dw.compile(model, precision_policy=policy, fallback="strict")
        loss = engine(**batch).loss
        loss.backward()
        report = engine.report()
        assert {b.scheme for b in report.bindings if b.gemm == "wgrad" and b.layer is not None} == {scheme}
        assert not any("not met" in note for note in report.notes)
        assert report.passes["linear"] == 14 and report.passes["merged_linear"] == 4
        assert type(report).from_json(report.to_json()) == report
        assert scheme in str(report)


# ---- whether it pays ----


def test_gain_is_measured_for_the_scaling_that_would_run(monkeypatch, run_pass) -> None:
    monkeypatch.setattr("deepwell.engine.passes.gain._sizes", lambda group: (256, 128, 48, "cuda:0"))
    asked = []

    def timed(*how):
        asked.append(how)
        return Gain(n=256, k=128, tokens=48, fp8_us=9.0 if "fp8_tensor" in how else 2.0, bf16_us=5.0)

    x, a, b, c = torch.randn(48, 128), *(torch.randn(256, 128) for _ in range(3))

    def passing(graph):
        names = [node.name for node in graph.nodes if node.op == "placeholder"][1:]
        weights = {name: (f"{path}.weight",) for name, path in zip(names, "abc", strict=True)}
        schemes = {"a": thrice(HYBRID), "b": thrice(BLOCKS), "c": f"{TENSOR}|{BLOCKS}|bf16"}
        return keep_gaining(find_linears(graph, weights, schemes), timed, strict=False)

    found = run_pass(lambda x, a, b, c: (F.linear(x, a), F.linear(x, b), F.linear(x, c)), passing, x, a, b, c).found
    kept, gains = found
    # What is mixed is not measured and runs as asked.
    assert asked == [(256, 128, 48, "cuda:0", "", "fp8_tensor"), (256, 128, 48, "cuda:0", "", "fp8_1x128")]
    assert [site.path for site in kept] == ["b", "c"] and set(gains) == {"a", "b"}


def test_a_layer_that_does_not_gain_is_bf16_in_the_report() -> None:
    found = bound(HOPPER, scaling="1x128")
    slow = Gain(n=1, k=1, tokens=64, fp8_us=4.0, bf16_us=3.0)
    rows = {(b.path, b.gemm): b for b in with_gains(found.bindings, {"up": slow})}
    assert rows["up", "wgrad"].scheme == "bf16" and "would not gain" in rows["up", "wgrad"].reason
    assert rows["down", "wgrad"].scheme == BLOCKS


@pytest.mark.parametrize("method", ["fp8_tensor", "fp8_1x128"])
def test_the_measured_step_is_one_that_runs(method) -> None:
    choice = measure(48, 32, 64, "cpu", "", method)
    assert {verdict.name for verdict in choice.verdicts} == {method, "bf16"}
    assert all(verdict.us > 0 and verdict.sqnr_db > 27 for verdict in choice.verdicts)


# ---- on a GPU ----


def gpu_policy(scheme: str) -> dw.PrecisionPolicy:
    if scheme == BLOCKS:
        if torch.cuda.get_device_capability()[0] != 9:
            pytest.skip("cuBLASLt has 1x128 scales on Hopper only")
        return dw.PrecisionPolicy.recipe("fp8", scaling="1x128")
    return dw.PrecisionPolicy.recipe("fp8", scaling="tensor", gradients="e5m2" if scheme == HYBRID else "e4m3")


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1024, 768, 512), *SHAPES], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_kernels_compute_what_the_references_do(scheme, shape) -> None:
    gpu_policy(scheme)
    x, w, dy = numbers(*shape)
    wanted = run(thrice(scheme), x, [w], dy)
    found = run(thrice(scheme), x.cuda(), [w.cuda()], dy.cuda())
    # The same codes: what differs is how sums are added. 60 dB is DESIGN's floor; fast accumulation over at most 1024
    # has the one of docs/numerics.md.
    floor = 60 if scheme == BLOCKS else 40
    for name, mine, ref in zip(("y", "dx", "dw"), found, wanted, strict=True):
        assert sqnr_db(ref.float(), mine.cpu().float()) > floor, name


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", SCHEMES)
def test_products_on_a_gpu_keep_their_signal(scheme) -> None:
    gpu_policy(scheme)
    torch.manual_seed(0)
    x, w, dy = (torch.randn(shape, device="cuda").bfloat16() for shape in ((4096, 2048), (3072, 2048), (4096, 3072)))
    found = run(thrice(scheme), x, [w], dy)
    for i, (mine, ref) in enumerate(zip(found, (x @ w.T, dy @ w, dy.T @ x), strict=True)):
        assert sqnr_db(ref.float(), mine.float()) > (24 if scheme == HYBRID and i else 27)


@pytest.mark.gpu
@pytest.mark.parametrize("cuda_graphs", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_engine_trains_on_a_gpu_as_the_policy_says(scheme, cuda_graphs, batch) -> None:
    # 74 tokens: nothing of the backward is a whole block, nor a whole line.
    inputs = {name: value.cuda() for name, value in batch.items()}
    model = zoo_models.tiny_model("llama", num_key_value_heads=2).bfloat16().cuda()
    eager = model(**inputs).loss.item()
    policy = gpu_policy(scheme)
    engine = dw.compile(model, precision_policy=policy, fallback="strict", measure=False, cuda_graphs=cuda_graphs)
    for _ in range(4):
        model.zero_grad(set_to_none=True)
        loss = engine(**inputs).loss
        loss.backward()
    assert abs(loss.item() - eager) < 0.01 * eager
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    report = engine.report()
    assert {b.scheme for b in report.bindings if b.gemm == "wgrad" and b.layer is not None} == {scheme}
    assert not any("not met" in note for note in report.notes)
    measured = engine.report(measure=True)
    assert not any("not measured" in row.how for row in measured.kernels)


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_parameter_has_its_gradient_on_a_gpu(scheme) -> None:
    gpu_policy(scheme)
    torch.manual_seed(0)
    config = LlamaConfig(width=768, num_heads=12, num_kv_heads=4, hidden=2048, num_layers=2, vocab=1024)
    with torch.device("cuda"):
        model = Llama(config).init_weights().bfloat16()
        tokens = torch.randint(0, 1024, (4, 1025))
    x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    exact = copy.deepcopy(model).float()
    exact(x, y).backward()
    wanted = {name: p.grad for name, p in exact.named_parameters()}
    options = BackendOptions(schemes=dict.fromkeys(linears_of(model, "head"), thrice(scheme)), use_inductor=True)
    compiled(model, options)(x, y).backward()
    found = {name: sqnr_db(wanted[name], p.grad.float()) for name, p in model.named_parameters()}
    # Two layers of FP8 both ways; the same floor as for rows.
    weak = {name: db for name, db in found.items() if db < 12}
    assert not weak, weak


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["fp8_tensor", "fp8_1x128"])
def test_gain_is_measured_on_a_gpu(method) -> None:
    gpu_policy(method)
    gain = would_gain(512, 512, 2048, "cuda", "", method)
    assert gain.fp8_us > 0 and gain.bf16_us > 0


@pytest.mark.parametrize("scheme", ["fp8_row|fp8_row|fp8_row", "fp8_tensor|fp8_tensor|fp8_tensor"])
def test_the_gradient_of_a_weight_lies_as_the_weight_is_stored(scheme) -> None:
    """GPT-2's is [K, N]: autograd would copy a gradient that lies across it."""
    torch.manual_seed(0)
    x, stored = torch.randn(32, 48).bfloat16(), torch.randn(48, 64).bfloat16().requires_grad_()
    other = stored.detach().T.contiguous().requires_grad_()
    dy = torch.randn(32, 64).bfloat16()
    (grad,) = torch.autograd.grad(low_precision_linear(x, [stored.T], None, scheme), stored, dy)
    (wanted,) = torch.autograd.grad(low_precision_linear(x, [other], None, scheme), other, dy)
    assert grad.stride() == stored.stride()
    torch.testing.assert_close(grad, wanted.T, rtol=1e-2, atol=1e-2)
