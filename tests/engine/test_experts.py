"""Experts in low precision: what a policy asks for runs in fwd, dgrad and wgrad; the model around it stays the same."""

import copy

import pytest
import torch
import torch.nn.functional as F
import zoo_models

import deepwell as dw
from deepwell.engine.binding import GROUPED_FP8, Target, bind
from deepwell.engine.calls.experts_choice import GroupedExperts
from deepwell.engine.passes.experts import find_experts, rewrite_experts
from deepwell.formats.metrics import assert_bitwise_equal, sqnr_db
from deepwell.formats.quantize import quantize
from deepwell.graph.fx import give_operands_by_position
from deepwell.kernels.experts import autograd as FE
from deepwell.kernels.experts.group_rows import padded_rows
from deepwell.kernels.gemm.linear import low_precision_linear
from deepwell.kernels.quantize.fp8 import quantize_rows_ref
from deepwell.kernels.tune.gain import Gain
from deepwell.precision.gemm_format import precision
from deepwell.precision.policy import PrecisionPolicy

transformers = pytest.importorskip("transformers")

FP8 = "|".join([FE.FP8_METHOD] * 3)
HOPPER = Target(kind="cuda", capability=(9, 0))
# Grouped products in two layers (DeepSeek's first is dense), and blocks of which all of FP8 is one op.
ARCHITECTURES = {
    "mixtral": (4, 2), "qwen3_moe": (4, 2), "olmoe": (4, 2), "deepseek_v3": (2, 1), "gpt_oss": (4, 2),
    "llama4_text": (4, 2), "longcat_flash": (2, 1), "aria_text": (4, 2),
}  # fmt: skip


@pytest.fixture
def on_hopper(monkeypatch):
    """Formats bound as on an H200; the kernels' references compute them here."""
    monkeypatch.setattr("deepwell.engine.compile.device_of", lambda tensors: HOPPER)
    monkeypatch.setattr("deepwell.engine.compile.measured_fallback", lambda *args: None)


def routed(tokens, top_k, experts, empty=None):
    """(choices sorted by expert, ends of the groups), one expert chosen by nobody."""
    ids = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)]).flatten()
    if empty is not None:
        ids[ids == empty] = (empty + 1) % experts
    offs = torch.cumsum(torch.bincount(ids, minlength=experts), 0).int()
    return ids, torch.sort(ids, stable=True).indices, offs


def groups(offs):
    return list(zip([0, *offs.tolist()], offs.tolist(), strict=False))


# ---- one grouped linear against each expert's own product ----


@pytest.mark.parametrize("is_kn", [False, True], ids=["nk", "kn"])
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "fp8"])
def test_emulated_experts_are_the_products_of_their_rounded_operands(name, is_kn):
    # Each expert by itself, each operand rounded along its contraction, as the formats say; bit for bit.
    torch.manual_seed(0)
    _, order, offs = routed(19, 2, 4, empty=2)
    x = torch.randn(19, 64).bfloat16()[order // 2].requires_grad_()
    w_ENK = (torch.randn(4, 48, 64) / 8).bfloat16()
    w = (w_ENK.transpose(1, 2).contiguous() if is_kn else w_ENK).requires_grad_()
    dy = torch.randn(38, 48).bfloat16()
    # Rounding to nearest throughout: random draws could not be repeated in another order.
    options = ",stochastic_rounding=False,hadamard=False" if name == "nvfp4" else ""
    y = FE.grouped_linear(x, w, offs, is_kn, "|".join([f"emulate:{name}{options}"] * 3))
    dx, dw = torch.autograd.grad(y, (x, w), dy)
    dw = dw.transpose(1, 2) if is_kn else dw
    chosen = precision(name, {"stochastic_rounding": False, "hadamard": False} if name == "nvfp4" else {})

    def product(step, left, right):
        how = chosen.gemm(step)
        sides = ((left, how.lhs), (right, how.rhs))
        a, b = (quantize(t.detach().contiguous(), side.format).dequantize() for t, side in sides)
        return (a @ b.T).bfloat16()

    for e, (begin, end) in enumerate(groups(offs)):
        if begin == end:
            assert not dw[e].any()
            continue
        rows, grads = x[begin:end], dy[begin:end]
        assert_bitwise_equal(y[begin:end], product("fwd", rows, w_ENK[e]), f"fwd {e}")
        assert_bitwise_equal(dx[begin:end], product("dgrad", grads, w_ENK[e].T), f"dgrad {e}")
        assert_bitwise_equal(dw[e].contiguous(), product("wgrad", grads.T, rows.T), f"wgrad {e}")


@pytest.mark.parametrize("is_kn", [False, True], ids=["nk", "kn"])
def test_fp8_experts_are_the_products_of_their_dequantized_operands(is_kn):
    torch.manual_seed(0)
    _, order, offs = routed(19, 2, 4, empty=2)
    x = torch.randn(19, 64).bfloat16()[order // 2].requires_grad_()
    w_ENK = (torch.randn(4, 48, 64) / 8).bfloat16()
    w = (w_ENK.transpose(1, 2).contiguous() if is_kn else w_ENK).requires_grad_()
    dy = torch.randn(38, 48).bfloat16()
    y = FE.grouped_linear(x, w, offs, is_kn, FP8)
    dx, dw = torch.autograd.grad(y, (x, w), dy)
    dw = dw.transpose(1, 2) if is_kn else dw

    def rows(t):
        q, scale = quantize_rows_ref(t.detach().contiguous())
        return q.float() * scale[:, None]

    def tensor(t):
        return quantize(t.detach().contiguous(), "fp8_e4m3_tensor_pow2").dequantize()

    for e, (begin, end) in enumerate(groups(offs)):
        if begin == end:
            assert not dw[e].any()
            continue
        # Along its rows as stored a weight has a scale per row, transposed one per expert.
        forward, backward = (tensor, rows) if is_kn else (rows, tensor)
        wanted = rows(x[begin:end]) @ forward(w_ENK[e]).T
        assert_bitwise_equal(y[begin:end], wanted.bfloat16(), f"fwd {e}")
        assert_bitwise_equal(dx[begin:end], (rows(dy[begin:end]) @ backward(w_ENK[e].T).T).bfloat16(), f"dgrad {e}")
        a, b = tensor(rows(dy[begin:end])), tensor(rows(x[begin:end]))
        assert sqnr_db((a.T @ b), dw[e].float()) > 45  # bf16's rounding of the result; sums in another order


@pytest.mark.parametrize("scheme", ["grouped_fp8|bf16|grouped_fp8", "bf16|grouped_fp8|emulate:mxfp8", "bf16|bf16|bf16"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_each_gemm_may_have_its_own_scheme(scheme, dtype):
    torch.manual_seed(0)
    _, order, offs = routed(19, 2, 4)
    x = torch.randn(19, 64).to(dtype)[order // 2].requires_grad_()
    w = (torch.randn(4, 48, 64) / 8).to(dtype).requires_grad_()
    dy = torch.randn(38, 48).to(dtype)
    y = FE.grouped_linear(x, w, offs, False, scheme)
    got = (y, *torch.autograd.grad(y, (x, w), dy))
    parts = [x[b:e].float() @ w[i].float().T for i, (b, e) in enumerate(groups(offs))]
    plain = torch.cat(parts)
    wanted = (plain, *torch.autograd.grad(plain, (x, w), dy.float()))
    for how, ref, made in zip(scheme.split("|"), wanted, got, strict=True):
        found = sqnr_db(ref.float(), made.float())
        assert found > 45 if how == "bf16" else 27 < found < 35


@pytest.mark.parametrize("scheme", [FP8, "|".join(["emulate:mxfp8"] * 3)], ids=["fp8", "mxfp8"])
@pytest.mark.parametrize("is_kn", [False, True], ids=["nk", "kn"])
def test_a_batch_of_products_is_the_grouped_product_of_groups_equally_long(is_kn, scheme):
    # Rows of zeros among them, as Llama 4 has: a token times zero for each expert that it did not choose.
    torch.manual_seed(0)
    x = (torch.randn(4, 19, 64) * (torch.rand(4, 19, 1) < 0.4)).bfloat16().requires_grad_()
    w = (torch.randn(4, 64, 48) / 8).bfloat16()
    w = (w if is_kn else w.mT.contiguous()).requires_grad_()
    dy = torch.randn(4, 19, 48).bfloat16()
    y = FE.batched_linear(x, w, is_kn, scheme)
    rows, ends = x.reshape(76, 64), torch.tensor([19, 38, 57, 76], dtype=torch.int32)
    grouped = FE.grouped_linear(rows, w, ends, is_kn, scheme)
    assert_bitwise_equal(y, grouped.view(4, 19, 48))
    plain = torch.bmm(x.float(), (w if is_kn else w.mT).float())
    for how in ("fwd", "dx", "dw"):
        given = {"fwd": (y, plain), "dx": (x, x), "dw": (w, w)}[how]
        if how == "fwd":
            made, ref = given
        else:
            (made,) = torch.autograd.grad(y, given[0], dy, retain_graph=True)
            (ref,) = torch.autograd.grad(plain, given[1], dy.float(), retain_graph=True)
        assert sqnr_db(ref.float(), made.float()) > 27, how
    assert not y[0][(x[0] == 0).all(1)].any()


@pytest.mark.parametrize("is_kn", [False, True], ids=["nk", "kn"])
def test_a_batch_of_one_product_is_the_linear_that_it_is_bound_as(is_kn):
    # Inkling with one shared expert: its weights are [1, N, K].
    torch.manual_seed(0)
    x = torch.randn(1, 32, 64).bfloat16().requires_grad_()
    w = (torch.randn(1, *((64, 48) if is_kn else (48, 64))) / 8).bfloat16().requires_grad_()
    scheme = "|".join(["fp8_row"] * 3)
    y = FE.batched_linear(x, w, is_kn, scheme)
    ref = low_precision_linear(x, [w[0].t() if is_kn else w[0]], None, scheme)
    for made, wanted in zip(*((one, *torch.autograd.grad(one.sum(), (x, w))) for one in (y, ref)), strict=True):
        assert_bitwise_equal(made, wanted)


def test_rows_past_the_last_group_are_zero_and_get_no_gradient():
    # Choices of experts on other ranks are sorted behind the last group.
    for scheme in (FP8, "|".join(["emulate:mxfp8"] * 3)):
        x = torch.randn(10, 32).bfloat16().requires_grad_()
        w = torch.randn(2, 16, 32).bfloat16().requires_grad_()
        y = FE.grouped_linear(x, w, torch.tensor([4, 7], dtype=torch.int32), False, scheme)
        assert y[:7].any()
        assert not y[7:].any()
        dx, dw = torch.autograd.grad(y, (x, w), torch.ones_like(y))
        assert not dx[7:].any()
        assert dw.isfinite().all()


# ---- the fused block ----


def block(dtype=torch.bfloat16, tokens=45, top_k=2, experts=4, width=64, hidden=48):
    """Inputs of `fused_experts` as leaves, the experts of the choices, and the routing."""
    ids, order, offs = routed(tokens, top_k, experts, empty=2)
    x = torch.randn(tokens, width).to(dtype).requires_grad_()
    gate_up = (torch.randn(experts, 2 * hidden, width) / 8).to(dtype).requires_grad_()
    down = (torch.randn(experts, width, hidden) / 7).to(dtype).requires_grad_()
    weight = torch.rand(tokens * top_k).to(dtype).requires_grad_()
    return (x, gate_up, down, weight), ids, order, offs


def plain_block(x, gate_up, down, weight, ids, top_k):
    """Every choice by itself, in fp32."""
    rows = x.float().repeat_interleave(top_k, 0)
    gate, up = torch.einsum("sd,snd->sn", rows, gate_up.float()[ids]).chunk(2, -1)
    y = torch.einsum("sf,sdf->sd", F.silu(gate) * up, down.float()[ids]) * weight.float()[:, None]
    return y.view(x.shape[0], top_k, -1).sum(1)


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_a_fused_block_computes_what_the_experts_compute_one_by_one(top_k):
    torch.manual_seed(0)
    leaves, ids, order, offs = block(top_k=top_k)
    x, gate_up, down, weight = leaves
    dy = torch.randn(45, 64).bfloat16()
    y = FE.fused_experts(x, gate_up, down, (order, weight, offs), top_k, "silu")
    ref = plain_block(*leaves, ids, top_k)
    got, wanted = (y, *torch.autograd.grad(y, leaves, dy)), (ref, *torch.autograd.grad(ref, leaves, dy.float()))
    # Two FP8 products in a row and an FP8 hidden layer between them: 27 dB a product, less what adds up.
    for name, made, exact in zip(("y", "dx", "d gate_up", "d down", "d weight"), got, wanted, strict=True):
        assert sqnr_db(exact.float(), made.float()) > 20, name
    assert not got[2][2].any()  # the expert that nobody chose
    assert not got[3][2].any()


def test_a_fused_block_rounds_no_more_than_its_products_one_by_one():
    # The same block from grouped linears; weighting h instead of y must not cost accuracy.
    torch.manual_seed(0)
    leaves, ids, order, offs = block(tokens=200)
    x, gate_up, down, weight = leaves
    gate, up = FE.grouped_linear(x[order // 2], gate_up, offs, False, FP8).chunk(2, -1)
    rows = FE.grouped_linear(F.silu(gate) * up, down, offs, False, FP8) * weight[order][:, None]
    apart = torch.zeros_like(rows).index_copy(0, order, rows).view(200, 2, 64).sum(1)
    fused = FE.fused_experts(x, gate_up, down, (order, weight, offs), 2, "silu")
    dy = torch.randn(200, 64).bfloat16()
    ref = plain_block(*leaves, ids, 2)
    exact = (ref, *torch.autograd.grad(ref, leaves, dy.float()))
    for out, one, other in zip(
        exact,
        (apart, *torch.autograd.grad(apart, leaves, dy)),
        (fused, *torch.autograd.grad(fused, leaves, dy)),
        strict=True,
    ):
        assert sqnr_db(out.float(), other.float()) > sqnr_db(out.float(), one.float()) - 0.7


def test_a_nan_token_reaches_its_own_output_and_no_other():
    leaves, _, order, offs = block()
    x, gate_up, down, weight = leaves
    with torch.no_grad():
        x[7, 3] = float("nan")
    y = FE.fused_experts(x, gate_up, down, (order, weight, offs), 2, "silu")
    assert y.isnan().any(1).nonzero().flatten().tolist() == [7]


def test_only_the_gradients_that_are_wanted_are_made():
    leaves, _, order, offs = block()
    x, gate_up, down, weight = (t.detach() for t in leaves)
    y = FE.fused_experts(x, gate_up.requires_grad_(), down, (order, weight, offs), 2, "silu")
    y.sum().backward()
    assert gate_up.grad is not None
    assert x.grad is down.grad is weight.grad is None


def test_a_fused_block_keeps_no_gathered_rows_for_the_backward():
    # The partitioner that Inductor uses removes equal calls first: what is made again must not become what is kept.
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    leaves, _, order, offs = block(tokens=64)
    graphs = []

    def keep(graph_module, _):
        graphs.append(graph_module.graph)
        return make_boxed_func(graph_module.forward)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition)

    @torch.compile(backend=backend)
    def run(x, gate_up, down, weight, order, offs):
        return FE.fused_experts(x, gate_up, down, (order, weight, offs), 2, "silu")

    run(*leaves, order, offs).sum().backward()
    forward, backward = graphs
    kept = [node.meta["val"] for node in next(iter(reversed(forward.nodes))).args[0] if isinstance(node, torch.fx.Node)]
    rows = padded_rows(128, 4)
    wide = [tuple(value.shape) for value in kept if value.dim() == 2 and rows in value.shape]  # transposed or not
    assert wide == [(rows, 144)]  # gate and up alone, in 12 bits a number
    assert not any(value.dim() == 3 and value.dtype == torch.float8_e4m3fn for value in kept)  # no FP8 weights
    targets = [node.target for node in backward.nodes]
    assert torch.ops.deepwell.gather_rows.default not in targets  # products and transpositions gather as they read


# ---- through the engine ----


def _some(*names):
    """All architectures, those that are not named as slow tests."""
    return [name if name in names else pytest.param(name, marks=pytest.mark.slow) for name in ARCHITECTURES]


@pytest.mark.parametrize("model_type", _some("qwen3_moe", "llama4_text"))
def test_experts_leave_bf16_and_train(model_type, batch):
    model = zoo_models.tiny_model(model_type).bfloat16()
    eager = model(**batch).loss.item()
    engine = dw.compile(dw.capture(model), precision="mxfp8")
    loss = engine(**batch).loss
    loss.backward()
    report = engine.report()
    assert report.passes["experts"] == ARCHITECTURES[model_type][0]
    assert abs(loss.item() - eager) <= 2e-3 * eager
    rows = [row for row in report.bindings if ".experts." in row.path]
    assert {row.scheme for row in rows} == {"emulate:mxfp8"}
    assert not any("not met" in note for note in report.notes)
    assert all(p.grad is not None for name, p in model.named_parameters() if ".experts." in name)
    assert all(row.scheme == "bf16" for row in report.bindings if row.op.endswith((".gate", ".router")))


@pytest.mark.parametrize("model_type", _some("mixtral", "qwen3_moe", "olmoe", "gpt_oss", "llama4_text", "aria_text"))
def test_hoppers_fp8_experts_are_one_op_a_block(model_type, batch, on_hopper):
    model = zoo_models.tiny_model(model_type).bfloat16()
    eager = model(**batch).loss.item()
    engine = dw.compile(dw.capture(model), precision="mxfp8", inductor=False)
    loss = engine(**batch).loss
    loss.backward()
    report = engine.report()
    found = (report.passes["experts"], report.passes["fused_experts"])
    assert found == ARCHITECTURES[model_type]
    assert abs(loss.item() - eager) <= 2e-3 * eager
    assert {row.scheme for row in report.bindings if ".experts." in row.path} == {GROUPED_FP8}
    assert not any("product by product" in note for note in report.notes)
    assert all(p.grad is not None for name, p in model.named_parameters() if ".experts." in name)


def _measured_as(monkeypatch, found):
    """Experts are measured as on a GPU, with this outcome; the blocks and tokens that were asked for."""
    asked = []

    def measured(block, tokens, device):
        asked.append((block, tokens))
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr("deepwell.engine.compile.measured_fallback", lambda measure, fallback, device: fallback)
    monkeypatch.setattr("deepwell.engine.passes.gain._can_be_measured", lambda x: True)
    monkeypatch.setattr("deepwell.engine.passes.work.experts_would_gain", measured)
    return asked


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_experts_that_would_not_gain_stay_in_bf16_with_their_microseconds(model_type, batch, on_hopper, monkeypatch):
    slow = Gain(n=64, k=32, tokens=32, fp8_us=6140.0, bf16_us=4540.0)
    asked = _measured_as(monkeypatch, slow)
    model = zoo_models.tiny_model(model_type).bfloat16()
    experts = next(module for module in model.modules() if hasattr(module, "gate_up_proj"))
    plain = dw.compile(dw.capture(copy.deepcopy(model)), precision="bf16", inductor=False)
    engine = dw.compile(dw.capture(model), precision="mxfp8", inductor=False)
    engine(**batch).loss.backward()
    block, tokens = asked[0]
    stored = experts.gate_up_proj.shape[1:]
    assert (block.stored, block.biases) == (("kn", (True, True)) if model_type == "gpt_oss" else ("nk", (False, False)))
    assert {block.width, block.rows_out} == set(stored) and block.experts == experts.gate_up_proj.shape[0]
    assert tokens == batch["input_ids"].numel() and len(asked) == 2
    report = engine.report()
    assert report.passes.get("fused_experts", 0) == 0
    rows = [row for row in report.bindings if ".experts." in row.path]
    assert {(row.scheme, row.binding) for row in rows} == {("bf16", "substitute")}
    assert {row.reason for row in rows} == {slow.reason} and "FP8 6140 us, bf16 4540 us" in slow.reason
    assert not any("not met" in note or "product by product" in note for note in report.notes)
    # Where attention and the router are in bf16 too, the experts' products are bf16's own.
    for one in (engine, plain):
        one.zero_grad()
    policy = PrecisionPolicy("bf16")
    policy.set_layer_precision("experts", "mxfp8")
    alone = dw.compile(dw.capture(copy.deepcopy(model)), precision_policy=policy, inductor=False)
    assert_bitwise_equal(alone(**batch).loss, plain(**batch).loss)


def test_experts_are_asked_for_strictly_and_stay_fp8_where_memory_is_short(batch, on_hopper, monkeypatch):
    model = zoo_models.tiny_model("qwen3_moe").bfloat16()
    _measured_as(monkeypatch, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    engine = dw.compile(dw.capture(model), precision="mxfp8", inductor=False)
    engine(**batch)
    assert engine.report().passes["fused_experts"] == 2
    assert any("not compared with bf16: CUDA out of memory" in note for note in engine.report().notes)
    _measured_as(monkeypatch, Gain(n=64, k=32, tokens=32, fp8_us=1.0, bf16_us=2.0))
    engine = dw.compile(dw.capture(model), precision="mxfp8", inductor=False)
    engine(**batch)
    rows = [row for row in engine.report().bindings if ".experts." in row.path]
    assert {row.scheme for row in rows} == {GROUPED_FP8} and all("faster: FP8 1 us" in row.reason for row in rows)
    _measured_as(monkeypatch, Gain(n=64, k=32, tokens=32, fp8_us=2.0, bf16_us=1.0))
    policy = PrecisionPolicy("bf16")
    policy.set_layer_precision("experts", "fp8", scaling="row")
    engine = dw.compile(dw.capture(model), precision_policy=policy, inductor=False, fallback="strict", measure=True)
    with pytest.raises(Exception, match=r"experts.*: fp8 would not gain: FP8 2 us"):
        engine(**batch)


@pytest.mark.parametrize(
    ("product", "shape", "is_met"),
    [
        (torch.bmm, (4, 9, 32), True),
        (torch.matmul, (4, 9, 32), True),
        (lambda x, w: x @ w, (4, 9, 32), True),
        (lambda x, w: torch.bmm(x, mat2=w), (4, 9, 32), True),
        # One row block for all experts, or a batch of them: no group for each expert.
        (torch.matmul, (1, 9, 32), False),
        (torch.matmul, (9, 32), False),
        (torch.matmul, (2, 4, 9, 32), False),
    ],
    ids=["bmm", "matmul", "@", "by name", "one for all", "a matrix", "a batch of them"],
)
@pytest.mark.parametrize("is_kn", [False, True], ids=["nk", "kn"])
def test_a_batch_of_products_with_a_parameter_leaves_bf16(run_pass, product, shape, is_met, is_kn):
    torch.manual_seed(0)
    x, w = torch.randn(shape), torch.randn(4, *((32, 16) if is_kn else (16, 32)))

    def function(x, w):
        return product(x, w if is_kn else w.transpose(-2, -1))

    def rewrite(graph):
        give_operands_by_position(graph)
        (weight,) = (n.name for n in graph.nodes if n.op == "placeholder" and n.meta["example_value"].shape == w.shape)
        sites = find_experts(graph, {weight: ("experts.up",)}, {"experts.up": "|".join(["emulate:mxfp8"] * 3)})
        rewrite_experts(graph, sites)
        return [(site.path, site.is_kn, site.offs) for site in sites]

    got = run_pass(function, rewrite, x, w)
    assert got.found == ([("experts.up", is_kn, None)] if is_met else [])
    assert ("batched_linear" in got.names()) == is_met
    found = sqnr_db(function(x, w), got.out)
    assert 27 < found < 35 if is_met else found == float("inf")


@pytest.mark.parametrize("model_type", ["mixtral", pytest.param("llama4_text", marks=pytest.mark.slow)])
def test_a_fused_block_takes_other_lengths_without_a_graph_for_each(model_type, batch, on_hopper):
    layers = {"num_hidden_layers": 1} if model_type == "mixtral" else {}
    model = zoo_models.tiny_model(model_type, **layers).bfloat16()
    engine = dw.compile(dw.capture(model), precision="mxfp8", inductor=False)
    for length in (37, 21, 30, 19):  # longer than a chunk of Llama 4's attention
        ids = batch["input_ids"][:, :length]
        loss = engine(input_ids=ids, labels=ids).loss
        loss.backward()
        eager = model(input_ids=ids, labels=ids).loss.item()
        assert abs(loss.item() - eager) <= 2e-3 * eager
    assert engine.options.graphs == 2


def test_experts_train_in_fp8_as_they_do_in_bf16(batch, on_hopper):
    # Twenty steps on one batch: routing may differ, the way down may not.
    losses = {}
    for name in ("bf16", "mxfp8"):
        torch.manual_seed(0)
        model = zoo_models.tiny_model("qwen3_moe").bfloat16()
        engine = dw.compile(dw.capture(model), precision=name, inductor=False)
        optimizer = torch.optim.AdamW(engine.parameters(), lr=2e-3)
        losses[name] = []
        for _ in range(20):
            loss = engine(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[name].append(loss.item())
        torch._dynamo.reset()
    assert losses["bf16"][-1] < 0.6 * losses["bf16"][0]
    assert abs(losses["mxfp8"][-1] - losses["bf16"][-1]) < 0.03 * losses["bf16"][-1]


@pytest.mark.slow
def test_recomputed_layers_with_experts_have_nearly_the_same_gradients(batch, on_hopper):
    grads = []
    for recompute in (False, True):
        torch.manual_seed(0)
        model = zoo_models.tiny_model("mixtral").bfloat16().train()
        engine = dw.compile(dw.capture(model), precision="mxfp8", inductor=False, recompute=recompute)
        engine(**batch).loss.backward()
        assert engine.report().passes["fused_experts"] == 2
        grads.append({name: p.grad for name, p in model.named_parameters()})
        torch._dynamo.reset()
    # Sums and norms are fused within layers only, so that the stream rounds elsewhere and an FP8 code may differ.
    for name, grad in grads[0].items():
        assert sqnr_db(grad.float(), grads[1][name].float()) > 25, name


def test_a_policy_may_keep_experts_or_one_of_their_gemms_in_bf16(batch, on_hopper):
    model = zoo_models.tiny_model("mixtral").bfloat16()
    policy = PrecisionPolicy("mxfp8")
    policy.set_layer_precision("experts", "bf16", gemms="wgrad")
    engine = dw.compile(dw.capture(model), precision_policy=policy, inductor=False)
    engine(**batch).loss.backward()
    rows = {row.gemm: row.scheme for row in engine.report().bindings if ".experts." in row.path}
    assert rows == {"fwd": GROUPED_FP8, "dgrad": GROUPED_FP8, "wgrad": "bf16"}
    assert (engine.report().passes["experts"], engine.report().passes["fused_experts"]) == (4, 0)


# ---- how experts run is the model's setting ----


@pytest.mark.parametrize("model_type", ["mixtral", pytest.param("deepseek_v3", marks=pytest.mark.slow)])
@pytest.mark.parametrize("chosen", ["eager", "batched_mm"])
def test_the_engine_groups_experts_and_leaves_the_models_setting(model_type, chosen, batch):
    model = zoo_models.tiny_model(model_type).bfloat16()
    model.set_experts_implementation(chosen)
    reference = model(**batch).loss
    reference.backward()
    eager = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    engine = dw.compile(dw.capture(model), precision="bf16")
    loss = engine(**batch).loss
    loss.backward()
    assert engine.options.graphs == 1  # a loop over experts would break it
    assert model.config._experts_implementation == chosen
    assert abs(loss.item() - reference.item()) <= 2**-8 * reference.item()
    for name, grad in eager.items():
        if ".experts." in name:
            assert sqnr_db(grad.float(), model.get_parameter(name).grad.float()) > 30, name
    assert any(f"setting, {chosen!r}, is kept" in note for note in engine.report().notes)


def test_the_setting_is_put_back_where_the_model_raises(batch):
    model = zoo_models.tiny_model("mixtral")
    model.set_experts_implementation("eager")
    with pytest.raises(ZeroDivisionError), GroupedExperts(model).applied():
        assert model.config._experts_implementation == "deepwell"
        raise ZeroDivisionError
    assert model.config._experts_implementation == "eager"


def test_every_kernel_of_a_block_can_be_timed_by_itself(batch, on_hopper):
    # With random ends of groups a grouped product would read what is not there.
    model = zoo_models.tiny_model("mixtral").bfloat16()
    engine = dw.compile(dw.capture(model), precision="mxfp8", inductor=False)
    engine(**batch).loss.backward()
    rows = {row.op: row for row in engine.report(measure=True).kernels}
    rows_of = ("choice_layout", "group_columns", "combine_rows", "wgrad_operands", "grouped_wgrad")
    for name in (*rows_of, "expert_product"):
        assert rows[name].us, f"{name}: {rows[name].how}"


@pytest.mark.parametrize(
    "model_type", ["dbrx", *(pytest.param(name, marks=pytest.mark.slow) for name in ("longcat_flash", "aria_text"))]
)
def test_experts_that_loop_by_themselves_are_one_function_in_one_graph(model_type, batch):
    model = zoo_models.tiny_model(model_type)
    engine = dw.compile(dw.capture(model), precision="bf16", inductor=False)
    grads = []
    for run in (model, engine):
        loss = run(**batch).loss
        grads.append((loss, *torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True)))
    for wanted, made in zip(*grads, strict=True):
        assert sqnr_db(wanted, made) > 90
    assert engine.options.graphs == 1 and not any("forward" in vars(module) for module in model.modules())
    assert any("the loop over its experts runs as 'deepwell'" in note for note in engine.report().notes)


def test_gate_and_up_that_are_two_weights_run_product_by_product(batch, on_hopper):
    model = zoo_models.tiny_model("dbrx").bfloat16()
    eager = model(**batch).loss.item()
    engine = dw.compile(dw.capture(model), precision="mxfp8", inductor=False)
    loss = engine(**batch).loss
    loss.backward()
    report = engine.report()
    assert abs(loss.item() - eager) <= 2e-3 * eager and engine.options.graphs == 1
    assert (report.passes["experts"], report.passes["fused_experts"]) == (6, 0)
    assert {row.scheme for row in report.bindings if ".experts." in row.path} == {GROUPED_FP8}
    assert any("padded for each: gate and up are two weights" in note for note in report.notes)
    assert all(p.grad is not None for name, p in model.named_parameters() if ".experts." in name)


def test_experts_that_the_model_multiplies_one_by_one_are_not_said_to_run_in_a_format(batch):
    # Its loop is kept and has no product of all experts in it: the rows say what runs, not what was asked for.
    model = zoo_models.tiny_model("dbrx")
    for path, module in model.named_modules():
        if path.endswith("experts.mlp"):
            module.register_forward_hook(lambda *args: None)
    engine = dw.compile(dw.capture(model), precision="mxfp8")

    def experts():
        return [row for row in engine.report().bindings if row.op.endswith(("w1", "v1", "w2"))]

    assert {row.scheme for row in experts()} == {"emulate:mxfp8"}  # nothing ran yet
    loss = engine(**batch).loss
    loss.backward()
    assert abs(loss.item() - model(**batch).loss.item()) <= 2e-3 * loss.item()
    assert len(experts()) == 18
    assert {(row.format, row.binding, row.scheme) for row in experts()} == {("mxfp8", "substitute", "fp32")}
    assert all("the model multiplies its experts by itself" in row.reason for row in experts())
    assert "the model multiplies its experts by itself" in " ".join(str(engine.report()).split())
    assert any("experts and 1 more: its loop over experts is kept" in note for note in engine.report().notes)
    # Its other linears are in their format.
    assert {row.scheme for row in engine.report().bindings if "attn" in row.op} == {"emulate:mxfp8"}


def test_a_dense_model_has_no_word_about_experts(batch):
    engine = dw.compile(dw.capture(zoo_models.tiny_model("llama")), precision="bf16")
    engine(**batch)
    assert not any("experts" in note for note in engine.report().notes)


# ---- binding ----


def bound(device, fmt="mxfp8", **kwargs):
    ir = dw.capture(zoo_models.tiny_model("mixtral", **kwargs).bfloat16())
    rows = bind(ir, PrecisionPolicy(fmt).resolve(ir), device).bindings
    return {(row.binding, row.scheme) for row in rows if ".experts." in row.path}, rows


@pytest.mark.parametrize(
    ("device", "fmt", "expected"),
    [
        (HOPPER, "mxfp8", ("substitute", "grouped_fp8")),
        (HOPPER, "nvfp4", ("emulated", "emulate:nvfp4")),
        (Target(kind="cpu"), "fp8", ("emulated", "emulate:fp8")),
        (Target(kind="cuda", capability=(8, 0)), "mxfp8", ("emulated", "emulate:mxfp8")),
        (Target(kind="cuda", capability=(10, 0), unproven=(("grouped_fp8", "no"),)), "mxfp8", ("substitute", "bf16")),
    ],
)
def test_experts_are_bound_by_what_the_device_has_proven(device, fmt, expected):
    assert bound(device, fmt)[0] == {expected}


def test_an_unproven_device_and_odd_sizes_are_reasons():
    unproven = Target(kind="cuda", capability=(10, 0), unproven=(("grouped_fp8", "its wgrad is 3.0 dB"),))
    _, rows = bound(unproven)
    assert any("its wgrad is 3.0 dB" in row.reason for row in rows if ".experts." in row.path)
    made, rows = bound(HOPPER, intermediate_size=36)
    assert made == {("substitute", "bf16")}
    assert any("multiples of 16" in row.reason for row in rows if ".experts." in row.path)


# ---- on a GPU ----


@pytest.mark.gpu
@pytest.mark.parametrize(("experts", "top_k", "tokens"), [(4, 2, 45), (64, 8, 700), (8, 1, 4096)])
def test_a_fused_block_on_a_gpu_is_the_references(experts, top_k, tokens):
    # Few rows an expert and many; the kernels against the same op on the CPU, where references compute it.
    torch.manual_seed(0)
    leaves, _, order, offs = block(tokens=tokens, top_k=top_k, experts=experts, width=256, hidden=192)
    dy = torch.randn(tokens, 256).bfloat16()
    results = []
    for device in ("cpu", "cuda"):
        x, gate_up, down, weight = (leaf.detach().to(device).requires_grad_() for leaf in leaves)
        routing = (order.to(device), weight, offs.to(device))
        y = FE.fused_experts(x, gate_up, down, routing, top_k, "silu")
        grads = torch.autograd.grad(y, (x, gate_up, down, weight), dy.to(device))
        results.append([t.detach().float().cpu() for t in (y, *grads)])
    for name, ref, got in zip(("y", "dx", "d gate_up", "d down", "d weight"), *results, strict=True):
        # Codes that fall to the other side where exp or a sum differs in its last bit; FP8 itself is at 23 dB.
        assert sqnr_db(ref, got) > 35, name


@pytest.mark.gpu
@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_a_model_with_experts_trains_on_a_gpu(cuda_graphs, batch):
    torch.manual_seed(0)
    model = zoo_models.tiny_model("qwen3_moe").bfloat16().cuda()
    batch = {name: value.cuda() for name, value in batch.items()}
    eager = model(**batch).loss.item()
    engine = dw.compile(dw.capture(model), precision="mxfp8", measure=False, cuda_graphs=cuda_graphs)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=2e-3)
    losses = []
    for _ in range(8):
        loss = engine(**batch).loss
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    report = engine.report()
    if torch.cuda.get_device_capability()[0] == 9:
        assert (report.passes["experts"], report.passes["fused_experts"]) == (4, 2)
        assert {row.scheme for row in report.bindings if ".experts." in row.path} == {GROUPED_FP8}
    assert abs(losses[0] - eager) <= 2e-3 * eager
    assert losses[-1] < 0.9 * losses[0]
