"""A bias that no activation takes goes into the epilogue of its FP8 product: the op, the pass, three architectures."""

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch._functorch.aot_autograd import aot_function
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    OPTConfig,
    OPTForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import deepwell as dw
from deepwell.engine.binding import Target
from deepwell.engine.passes import pipeline
from deepwell.engine.passes.bias_epilogue import fuse_bias
from deepwell.errors import ConfigError
from deepwell.formats.metrics import assert_bitwise_equal, sqnr_db
from deepwell.kernels.gemm.fp8 import fp8_gemm, fp8_gemm_ref
from deepwell.kernels.quantize.fp8 import quantize_rows

BF16 = torch.bfloat16


@pytest.fixture
def as_hopper(monkeypatch):
    """A CPU that is taken for Hopper: the FP8 ops run by their references."""
    monkeypatch.setattr("deepwell.engine.compile.device_of", lambda tensors: Target(kind="cuda", capability=(9, 0)))
    monkeypatch.setattr("deepwell.engine.compile.use_inductor", lambda asked, device: False)


@pytest.mark.parametrize("n, k", [(48, 64), (20, 36)])  # the second is padded to whole lines, bias included
def test_the_op_adds_the_bias_before_it_rounds(n, k):
    torch.manual_seed(0)
    q_a, s_a = quantize_rows(torch.randn(16, k).bfloat16())
    q_b, s_b = quantize_rows(torch.randn(n, k).bfloat16())
    bias = torch.randn(n).bfloat16()
    got = torch.ops.deepwell.fp8_gemm_bias(q_a, s_a, q_b, s_b, bias, True)
    wanted = (fp8_gemm_ref(q_a, s_a, q_b, s_b, out_dtype=torch.float32) + bias.float()).bfloat16()
    assert_bitwise_equal(got, wanted)
    # Apart it is rounded twice, and that shows.
    assert not torch.equal(torch.ops.deepwell.fp8_gemm(q_a, s_a, q_b, s_b, True) + bias, wanted)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("is_row", [False, True])
def test_the_gpus_epilogue_agrees_with_the_reference(fast, is_row):
    torch.manual_seed(0)
    q_a, s_a = quantize_rows(torch.randn(256, 512, device="cuda").bfloat16())
    q_b, s_b = quantize_rows(torch.randn(384, 512, device="cuda").bfloat16())
    scales = (s_a, s_b) if is_row else (torch.tensor(0.5, device="cuda"), torch.tensor(0.25, device="cuda"))
    # A slice that begins in the middle of a 16-byte line, and a bias as large as the product.
    bias = (torch.randn(385, device="cuda") * 20).bfloat16()[1:]
    got = torch.ops.deepwell.fp8_gemm_bias(q_a, scales[0], q_b, scales[1], bias, fast)
    wanted = fp8_gemm_ref(q_a, scales[0], q_b, scales[1], out_dtype=BF16, bias_N=bias)
    assert sqnr_db(wanted, got) > 60


def _models():
    qwen = Qwen2Config(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
    )
    gpt2 = GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=64, n_positions=32)
    opt = OPTConfig(
        hidden_size=64,
        ffn_dim=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=64,
        max_position_embeddings=32,
        word_embed_proj_dim=64,
        dropout=0.0,
    )
    dropless = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    for name, value in dropless.items():
        setattr(gpt2, name, value)
    # Biased products a layer that no activation follows. Qwen2: merged q, k, v. GPT-2: c_attn and both c_proj. OPT:
    # merged q, k, v, out_proj, fc2.
    return [(Qwen2ForCausalLM, qwen, 1), (GPT2LMHeadModel, gpt2, 3), (OPTForCausalLM, opt, 3)]


def _run(make, config):
    torch.manual_seed(0)
    model = make(config).bfloat16()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3)
    tokens = torch.randint(3, 64, (2, 16), generator=torch.Generator().manual_seed(1))
    policy = dw.PrecisionPolicy("fp8")
    policy.set_default("fp8", scaling="row")
    engine = dw.compile(dw.capture(model), precision_policy=policy, measure=False, fuse_head=False)
    out = engine(input_ids=tokens, labels=tokens)
    out.loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    high = model(input_ids=tokens).logits
    return engine, out.logits.detach(), grads, high.detach()


@pytest.mark.parametrize("make, config, each", _models(), ids=lambda value: getattr(value, "__name__", ""))
def test_biases_of_three_architectures_leave_their_own_op(make, config, each, as_hopper, monkeypatch):
    engine, logits, grads, high = _run(make, config)
    report = engine.report()
    assert report.passes["bias_epilogue"] == 2 * each
    assert f"bias in the epilogue of {2 * each} FP8 products" in " ".join(str(report).split())
    calls = {call.name: 0 for call in engine.options.calls}
    for call, count in engine.options.calls.items():
        calls[call.name] += count
    assert calls["fp8_gemm_bias"] == 2 * each
    monkeypatch.setattr(pipeline, "PASSES", pipeline.swapped("bias_epilogue", lambda graph: 0))
    torch._dynamo.reset()
    before, logits_before, grads_before, _ = _run(make, config)
    assert "fp8_gemm_bias" not in {call.name for call in before.options.calls}
    assert "bias_epilogue" not in before.report().passes or before.report().passes["bias_epilogue"] == 0
    # A rounding of 2^-9 less in each product: as near to the high-precision model, and near to what it was.
    assert sqnr_db(high, logits) > sqnr_db(high, logits_before) - 1
    assert sqnr_db(logits_before, logits) > 25
    assert grads.keys() == grads_before.keys()
    # All gradients as one vector: of keys under nearly even attention there is little but rounding.
    flat, flat_before = (torch.cat([g.float().flatten() for g in each.values()]) for each in (grads, grads_before))
    assert F.cosine_similarity(flat, flat_before, dim=0) > 0.999


# A product [32, 64] with a bias [64], a column [32], all [32, 64], and whether the bias goes into its epilogue.
ADDED = {
    "a bias": (lambda y, b, c, r: y + b, 1),
    "a bias first": (lambda y, b, c, r: b + y, 1),
    "a bias in place": (lambda y, b, c, r: y.add_(b), 1),
    "a bias and another": (lambda y, b, c, r: y + b + b, 1),
    "a bias that is not dense": (lambda y, b, c, r: y + r.t().flatten()[: 2 * 64 : 2], 1),
    "one number for all columns": (lambda y, b, c, r: y + b[:1].expand(64), 1),
    "a bias that is written afterwards": (lambda y, b, c, r: (y + b, b.mul_(2))[0], 1),
    "a number": (lambda y, b, c, r: y + 1, 0),
    "a number as a tensor": (lambda y, b, c, r: y + b[0], 0),
    "a column": (lambda y, b, c, r: y + c[:, None], 0),
    "a residual": (lambda y, b, c, r: y + r, 0),
    "a row of more dimensions": (lambda y, b, c, r: y + b[None], 0),
    "a row of fp32": (lambda y, b, c, r: y + b.float(), 0),  # torch takes bf16 alone
    "twice the bias": (lambda y, b, c, r: torch.add(y, b, alpha=2), 0),
    "a bias that is taken off": (lambda y, b, c, r: y - b, 0),
    "itself": (lambda y, b, c, r: y + y, 0),
    "a row of itself": (lambda y, b, c, r: y + y[0], 0),
    "a product that is read elsewhere": (lambda y, b, c, r: (y + b) * y.sum(), 0),
    "a product that is returned": (lambda y, b, c, r: (y + b, y), 0),
    "a view of the product": (lambda y, b, c, r: y.view(4, 8, 64) + b, 0),
    "the transposed product": (lambda y, b, c, r: y.t() + c, 0),
    "an activation of the product": (lambda y, b, c, r: y.relu() + b, 0),
    "a product of bf16": (lambda y, b, c, r: r @ r.t() + c, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", ADDED)
def test_only_a_bias_that_alone_reads_a_vendors_product_is_taken(name):
    add, count = ADDED[name]
    shapes = ((32, 48), (64, 48), (64,), (32,), (32, 64))
    g = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=g).bfloat16() for shape in shapes]
    results = []
    for rewrite in (fuse_bias, lambda graph: 0):
        found = []

        def compiler(module, _, rewrite=rewrite, found=found):
            found.append(rewrite(module.graph))
            module.graph.lint()
            module.recompile()
            return module.forward

        given = [t.clone() for t in inputs]

        def function(x, w, *others):
            ops = torch.ops.deepwell
            return add(ops.fp8_gemm(*ops.quantize_rows(x), *ops.quantize_rows(w), True), *others)

        out = aot_function(function, compiler)(*given)
        results.append([*(out if isinstance(out, list | tuple) else (out,)), *given])
        assert sum(found) == (count if rewrite is fuse_bias else 0)
    for mine, theirs in zip(*results, strict=True):
        # In the epilogue a sum is rounded once less.
        assert sqnr_db(theirs, mine) > 45 if count else torch.equal(mine, theirs)


@pytest.mark.parametrize("target, count", [(torch.ops.deepwell.fp8_gemm.default, 1), (torch.ops.aten.mm.default, 0)])
def test_a_product_that_another_kernel_computes_keeps_its_bias_apart(target, count):
    graph = fx.Graph()
    operands = [graph.placeholder(name) for name in ("a", "scale_a", "b", "scale_b", "bias")]
    operands[4].meta["val"] = torch.empty(48, dtype=BF16)
    product = graph.call_function(target, (*operands[:4], True))
    product.meta["val"] = torch.empty((16, 48), dtype=BF16)
    graph.output(graph.call_function(torch.ops.aten.add.Tensor, (product, operands[4])))
    assert fuse_bias(graph) == count
    graph.lint()
    if count:
        *operands, bias, fast = next(node for node in graph.nodes if node.op == "call_function").args
        assert [node.name for node in operands] == ["a", "scale_a", "b", "scale_b"]
        assert (bias.name, fast) == ("bias", True)


@pytest.mark.parametrize(
    "bias, message",
    [(torch.zeros(48), "adds bfloat16 to bfloat16"), (torch.zeros(47, dtype=BF16), r"shape \(48,\)")],
)
def test_refuses_a_bias_that_does_not_fit(bias, message):
    q_a, s_a = quantize_rows(torch.randn(16, 64).bfloat16())
    q_b, s_b = quantize_rows(torch.randn(48, 64).bfloat16())
    with pytest.raises(ConfigError, match=message):
        fp8_gemm(q_a, s_a, q_b, s_b, bias_N=bias)
