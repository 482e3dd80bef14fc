"""Lifting: what stands in the graphs of twenty architectures, and that no size of the example leaks into an IR."""

import importlib.util
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from deepwell.graph.ir import IR
from deepwell.graph.lift import lift
from deepwell.graph.lift.extents import Sizes
from deepwell.graph.ops import (
    Activation,
    Attention,
    Combine,
    Extent,
    GroupedLinear,
    Linear,
    Loss,
    Matmul,
    Norm,
    Rope,
    TopK,
)
from deepwell.graph.trace import trace

transformers = pytest.importorskip("transformers")


def _load_zoo_models() -> ModuleType:
    spec = importlib.util.spec_from_file_location("zoo_models", Path(__file__).with_name("zoo_models.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


zoo = _load_zoo_models()

# Fused and separate projections, biases, ALiBi, learned positions, Conv1D, parallel blocks, post-norms, soft caps,
# windows, grouped experts of several designs, latent attention, state space and hybrid layers.
ARCHITECTURES = (
    "llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "mistral", "phi3", "gpt2", "gpt_neox", "opt", "bloom", "falcon",
    "olmo2", "cohere", "bert", "mixtral", "deepseek_v3", "gpt_oss", "granitemoe", "falcon_h1", "mamba2",
)  # fmt: skip
WITHOUT_ATTENTION = ("mamba2",)
EXPERTS = ("mixtral", "deepseek_v3", "gpt_oss", "granitemoe")


@cache
def lifted(model_type: str) -> tuple[nn.Module, IR]:
    model = zoo.tiny_model(model_type)
    return model, lift(model, trace(model))


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_every_weight_has_its_place_and_is_counted_once(model_type: str) -> None:
    model, ir = lifted(model_type)
    assert ir.num_params == sum(p.numel() for p in model.parameters())
    ir.check()
    assert IR.from_json(ir.to_json()) == ir


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_every_linear_of_the_model_is_an_op_under_its_own_path(model_type: str) -> None:
    model, ir = lifted(model_type)
    linears = {
        path for path, m in model.named_modules() if isinstance(m, (nn.Linear, transformers.pytorch_utils.Conv1D))
    }
    ops = {site.path: site.op for site in ir.sites() if isinstance(site.op, (Linear, GroupedLinear))}
    assert linears <= set(ops)
    for path in linears:
        module = model.get_submodule(path)
        assert {ops[path].k, ops[path].n} == set(module.weight.shape)
        assert ops[path].bias == (module.bias is not None)


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_attention_head_and_loss_are_recognised(model_type: str) -> None:
    _, ir = lifted(model_type)
    kinds = [site.op for site in ir.sites()]
    assert any(isinstance(op, Attention) for op in kinds) == (model_type not in WITHOUT_ATTENTION)
    heads = [op for op in kinds if op.role == "head"]
    assert [op.n for op in heads if isinstance(op, Linear)] == [zoo.VOCAB]
    assert [op.vocab for op in kinds if isinstance(op, Loss)] == [zoo.VOCAB]
    assert any(isinstance(op, Combine) for op in kinds) == (model_type in EXPERTS)
    assert ir.num_layers == len({site.layer for site in ir.sites() if site.layer is not None})


@pytest.mark.parametrize("model_type", [a for a in ARCHITECTURES if a not in WITHOUT_ATTENTION])
def test_attention_has_one_set_of_projections(model_type: str) -> None:
    # Every attention of a decoder layer is fed by linears that make q, k and v between them, and feeds one o.
    _, ir = lifted(model_type)
    for block in ir.blocks:
        if not any(isinstance(op, Attention) for op in block.ops):
            continue
        parts = [op.part.removesuffix("_b") for op in block.ops if op.role == "attention" and isinstance(op, Linear)]
        final = [part for part in parts if part and not part.endswith("_a")]
        assert sorted("".join(p for p in final if p != "o")) == ["k", "q", "v"]
        assert final.count("o") == 1


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "bloom", "deepseek_v3", "gpt_oss", "mamba2", "gemma2"])
def test_another_length_or_batch_gives_the_same_ir(model_type: str) -> None:
    # 53 is no multiple of the chunks of 16 that some of these work in.
    model, ir = lifted(model_type)
    assert lift(model, trace(model, seq_len=53)) == ir
    assert lift(model, trace(model, batch=3)) == ir


def test_activation_checkpointing_changes_nothing_about_what_is_computed() -> None:
    # Checkpointed layers arrive as calls of inner graphs; they are read as if they stood in place.
    _, ir = lifted("mixtral")
    model = zoo.tiny_model("mixtral")
    model.gradient_checkpointing_enable()
    traced = trace(model.train())
    assert any("checkpoint" in str(node.target) for node in traced.graph.nodes)
    assert lift(model, traced) == ir


@pytest.mark.parametrize("length", [11, 37])  # shorter and longer than the window
def test_a_window_is_found_whether_or_not_the_example_is_longer(length: int) -> None:
    model = zoo.tiny_model("gpt_oss")
    ir = lift(model, trace(model, seq_len=length))
    windows = [site.op.window for site in ir.sites() if isinstance(site.op, Attention)]
    assert windows == [16, None]


@pytest.mark.parametrize(
    ("model_type", "causal", "kv_heads"),
    [
        ("mistral", True, 2),  # repeated for four query heads by expand
        ("falcon", True, 1),  # one key-value head for all
        ("bloom", True, 4),  # softmax written out, [batch * heads, length, dim]
        ("bert", True, 4),
    ],
)
def test_heads_and_masks_come_from_the_graph(model_type: str, causal: bool, kv_heads: int) -> None:
    model = zoo.tiny_model(model_type, **({"is_decoder": True} if model_type == "bert" else {}))
    ir = lift(model, trace(model))
    attention = next(site.op for site in ir.sites() if isinstance(site.op, Attention))
    assert (attention.q_heads, attention.qk_dim, attention.kv_heads) == (4, 16, kv_heads)
    assert attention.causal is causal


def test_an_encoder_without_a_mask_is_not_causal() -> None:
    model = zoo.tiny_model("bert", is_decoder=False)
    ir = lift(model, trace(model))
    assert [site.op.causal for site in ir.sites() if isinstance(site.op, Attention)] == [False, False]


def test_masks_are_computed_at_sizes_of_a_capture_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    import deepwell as dw
    from deepwell.graph.lift import masks

    model = zoo.tiny_model("gpt_oss")  # attention written out, with sinks: scores of 64 heads are gigabytes
    asked = []
    monkeypatch.setattr(masks, "_read_mask", lambda flow, target, scores: asked.append(flow.traced.tracer))
    engine = dw.compile(model, precision="mxfp8")
    assert asked and "call" not in asked
    del asked[:]
    tokens = torch.randint(0, 64, (2, 8))
    assert engine(input_ids=tokens, labels=tokens).loss.isfinite()
    assert asked == []
    assert "in the graphs of the calls" in str(engine.report())
    monkeypatch.setattr(masks, "_MOST_NUMBERS", 4)
    ir = lift(model, trace(model))
    assert asked == [] and all(site.op.causal for site in ir.sites() if isinstance(site.op, Attention))
    assert any("its mask could not be computed; taken as causal" in note for note in ir.notes)


def test_partial_rotation_counts_the_rotated_part_only() -> None:
    _, ir = lifted("gpt_neox")
    rope = next(site.op for site in ir.sites() if isinstance(site.op, Rope))
    fraction = transformers.GPTNeoXConfig().rope_parameters.get("partial_rotary_factor", 0.25)
    assert (rope.q_heads, rope.kv_heads, rope.rotary_dim) == (4, 4, int(16 * fraction))


def test_linear_flops_agree_with_torchs_own_counter() -> None:
    # Torch's counter sees the products of one real forward; linears, experts and the head must agree to the flop.
    from torch.utils.flop_counter import FlopCounterMode

    model, ir = lifted("qwen2")
    ids = torch.randint(0, zoo.VOCAB, (2, 37))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, use_cache=False)
    counted = counter.get_flop_counts()["Global"]
    # Batched products are left out: positions times frequencies, and attention where it is spelled out.
    products = sum(flops for op, flops in counted.items() if "mm" in str(op) and "bmm" not in str(op))
    work = ir.workload(2, 37)
    assert sum(site.op.flops(work) for site in ir.sites() if isinstance(site.op, Linear)) == products


# ---- single patterns ----


def ops_of(model: nn.Module, *inputs: torch.Tensor) -> dict[str, object]:
    ir = lift(model, trace(model, inputs))
    assert ir.num_params == sum(p.numel() for p in model.parameters())
    return {site.path: site.op for site in ir.sites()}


class Gated(nn.Module):
    """Feed-forward with a gate spelled out: `function` of one half times the other."""

    def __init__(self, function: object) -> None:
        super().__init__()
        self.both = nn.Linear(16, 64)
        self.down = nn.Linear(32, 16)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.both(x).chunk(2, dim=-1)
        return self.down(self.function(gate) * up)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (F.silu, "silu"),
        (lambda x: x * torch.sigmoid(x), "silu"),
        (lambda x: x * torch.sigmoid(1.702 * x), "quick_gelu"),
        (lambda x: F.gelu(x, approximate="tanh"), "gelu_tanh"),
        (lambda x: 0.5 * x * (1 + torch.tanh(0.79788456 * (x + 0.044715 * x**3))), "gelu_tanh"),
        (lambda x: 0.5 * x * (1 + torch.erf(x / 2**0.5)), "gelu"),
        (lambda x: F.relu(x) ** 2, "relu2"),
        (torch.sigmoid, "sigmoid"),
        (lambda x: x.clamp(max=7.0) * torch.sigmoid(1.702 * x.clamp(max=7.0)), "clamped_swiglu"),
    ],
)
def test_activations_are_known_by_what_they_compute(function: object, name: str) -> None:
    ops = ops_of(Gated(function), torch.randn(2, 37, 16))
    act = ops["act"]
    assert isinstance(act, Activation)
    assert (act.function, act.gated, act.width, act.inputs) == (name, True, 32, ("both",))
    assert [getattr(ops[path], "part", None) for path in ("both", "down")] == ["gate_up", "down"]


class HandNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))
        self.out = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale)


def test_a_norm_written_out_is_a_norm_with_its_weight() -> None:
    norm = ops_of(HandNorm(), torch.randn(2, 37, 16))["norm"]
    assert isinstance(norm, Norm)
    assert (norm.norm, norm.width, [p.name for p in norm.params]) == ("rms", 16, ["scale"])


class ComplexRope(nn.Module):
    """Rotation by complex numbers, as in Meta's own Llama code."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, 32, bias=False) for _ in range(3))
        self.register_buffer("freqs_cis", torch.polar(torch.ones(64, 8), torch.randn(64, 8)))

    def turn(self, x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * self.freqs_cis[: x.shape[1], None]).flatten(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).view(*x.shape[:2], 2, 16) for layer in (self.q, self.k, self.v))
        q, k, v = (t.transpose(1, 2) for t in (self.turn(q), self.turn(k), v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def test_rotation_by_complex_numbers_is_a_rope() -> None:
    ops = ops_of(ComplexRope(), torch.randn(2, 37, 32))
    rope = ops["rope"]
    assert isinstance(rope, Rope)
    assert (rope.q_heads, rope.kv_heads, rope.rotary_dim, rope.inputs) == (2, 2, 16, ("q", "k"))


class LinearAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.q(x) @ (self.k(x).transpose(1, 2) @ self.v(x))


def test_products_of_activations_without_softmax_are_matmuls() -> None:
    ops = ops_of(LinearAttention(), torch.randn(2, 37, 16))
    first, second = (op for op in ops.values() if isinstance(op, Matmul))
    assert (first.m, first.n, first.k) == (Extent(16), Extent(16), Extent(1, 0, 1))
    assert (second.batch, second.m, second.n, second.k) == (Extent(1, 1), Extent(1, 0, 1), Extent(16), Extent(16))


class Shared(nn.Module):
    """One linear used twice, and a tied pair: each storage counts once."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
        self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(self.a(x)))


def test_shared_weights_are_tied_to_their_first_owner() -> None:
    ops = ops_of(Shared(), torch.randn(2, 37, 16))
    assert [op.params[0].tied_to for op in ops.values()] == [None, "a.weight", "a.weight"]  # type: ignore[attr-defined]
    assert list(ops) == ["a", "a_2", "b"]


def test_scoring_and_choice_of_experts_are_read_from_the_router() -> None:
    for model_type, scoring in (("mixtral", "softmax"), ("deepseek_v3", "sigmoid"), ("gpt_oss", "softmax")):
        _, ir = lifted(model_type)
        topk = next(site.op for site in ir.sites() if isinstance(site.op, TopK))
        assert (topk.experts, topk.top_k, topk.scoring) == (4, 2, scoring)


@pytest.mark.parametrize(
    ("dims", "extent"),
    [
        ((2, 37), Extent(1, 1, 1)),
        ((74,), Extent(1, 1, 1)),
        ((148,), Extent(2, 1, 1)),  # two copies of each token
        ((2, 37, 8), Extent(8, 1, 1)),  # per head
        ((1, 37), Extent(1, 0, 1)),  # positions are the same for every sequence
        ((72,), Extent(1, 1, 1)),  # labels shifted by one
        ((16, 37, 37), Extent(8, 1, 2)),
        ((10,), Extent(10, 0, 0)),
    ],
)
def test_sizes_are_read_back_as_batch_and_sequence(dims: tuple[int, ...], extent: Extent) -> None:
    assert Sizes(2, 37).rows(dims) == extent


class SeparateProjections(nn.Module):
    """Attention as WavLM calls it: an empty weight of all projections, and a bias put together from three."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = torch.cat([self.q.bias, self.k.bias, self.v.bias])
        return F.multi_head_attention_forward(
            x, x, x, 32, 4, torch.empty([0]), bias, None, None, False, 0.0, self.o.weight, self.o.bias,
            use_separate_proj_weight=True,
            q_proj_weight=self.q.weight, k_proj_weight=self.k.weight, v_proj_weight=self.v.weight,
        )[0]  # fmt: skip


def test_one_attention_call_with_separate_projections() -> None:
    model = SeparateProjections()
    ir = lift(model, trace(model, torch.randn(37, 2, 32)))
    assert [site.op.part for site in ir.sites() if isinstance(site.op, Linear)] == ["q", "k", "v", "o"]
    assert ir.num_params == sum(p.numel() for p in model.parameters())
