"""`dw.capture`: the published models equal their configs, plain modules, the static fallback, and named errors."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from deepwell.errors import CaptureError, ConfigError
from deepwell.graph.capture import capture
from deepwell.graph.configs import published_config, published_models
from deepwell.graph.ir import IR
from deepwell.graph.ops import BLOCK_INPUT, TOKENS, Attention, Conv, Extent, Linear
from warm import run_python

transformers = pytest.importorskip("transformers")


def meta_model(name: str, **overrides: object) -> nn.Module:
    config = {k: v for k, v in published_config(name).items() if k not in ("_source", "torch_dtype")} | overrides
    dtype = torch.float32 if name == "gpt2" else torch.bfloat16
    if config["model_type"] == "kimi_k2":  # DeepSeek's class under another name, which transformers does not know
        config = {**config, "model_type": "deepseek_v3"}
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config), dtype=dtype)


def num_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


# ---- the published models ----


# Larger siblings of models that are captured here anyway: the same graph with more layers or experts.
SIBLINGS = ("gpt-oss-120b", "kimi-k2", "llama3-70b", "mixtral-8x22b", "qwen3-14b", "qwen3-32b", "qwen3-235b-a22b")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in SIBLINGS else n for n in published_models()]
)
def test_capture_of_a_published_model_equals_the_ir_of_its_config(name: str) -> None:
    # Two roads to one value: the traced graph of the real model, and what the config alone says about it.
    model = meta_model(name)
    ir = capture(model)
    assert ir.source == "graph"
    assert ir == IR.from_config(published_config(name))
    assert ir.num_params == num_parameters(model)
    assert ir.module is model and ir.graph is not None


def test_capturing_405b_stays_in_40_seconds_and_3_gigabytes() -> None:
    # In a process of its own: peak memory belongs to the process, and other tests leave theirs behind.
    script = (
        "import sys, time, resource; sys.path.insert(0, sys.argv[1])\n"
        "from test_capture import meta_model; from deepwell.graph.capture import capture\n"
        "model = meta_model('llama3-405b'); start = time.perf_counter(); ir = capture(model)\n"
        "print(time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, ir.num_params)"
    )
    out = run_python(script, str(Path(__file__).parent))
    assert out.returncode == 0, out.stderr[-2000:]
    seconds, peak_bytes, params = (float(word) for word in out.stdout.split()[-3:])
    assert params == 405_853_388_800
    assert seconds < 40
    assert peak_bytes < 3e9


@pytest.mark.parametrize(
    ("name", "matmul_params", "heads", "dim", "layers"),
    [
        # Parameters that a token is multiplied with, counted by hand: q, k, v, o, gate, up, down, head.
        ("llama3-8b", 32 * (4096 * (4096 + 2048) + 4096 * 4096 + 3 * 4096 * 14336) + 4096 * 128256, 32, 128, 32),
        # Two of eight experts, and the router.
        (
            "mixtral-8x7b",
            32 * (4096 * 6144 + 4096 * 4096 + 2 * 3 * 4096 * 14336 + 4096 * 8) + 4096 * 32000,
            32,
            128,
            32,
        ),
    ],
)
def test_flops_per_token_follow_the_closed_formula(
    name: str, matmul_params: int, heads: int, dim: int, layers: int
) -> None:
    seq_len = 4096
    formula = 2 * matmul_params + layers * 2 * 2 * heads * dim * (seq_len + 1) / 2
    ir = capture(meta_model(name))
    assert ir.flops_per_token(seq_len) == pytest.approx(formula, rel=0.005)


# ---- plain modules ----


def test_a_sequential_mlp_needs_no_inputs() -> None:
    ir = capture(nn.Sequential(nn.Linear(768, 3072), nn.GELU(), nn.Linear(3072, 768)))
    assert [op.name for op in ir.stem] == ["0", "act", "2"]
    assert [(op.role, op.part) for op in ir.stem] == [("mlp", "up"), ("mlp", ""), ("mlp", "down")]
    assert [op.inputs for op in ir.stem] == [(BLOCK_INPUT,), ("0",), ("act",)]
    assert ir.flops(2, 10) == 2 * 2 * 10 * (768 * 3072 * 2)


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.second = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.head = nn.Linear(32, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.first(image)))
        return self.head(F.relu(self.second(x)).mean((2, 3)))


def test_a_convolutional_network_grows_with_the_batch_alone() -> None:
    model = ConvNet()
    ir = capture(model, torch.randn(2, 3, 32, 32))
    convs = [op for op in ir.stem if isinstance(op, Conv)]
    assert [(c.k, c.n, c.rows) for c in convs] == [
        (27, 16, Extent(32 * 32, 1, 0)),
        (144, 32, Extent(16 * 16, 1, 0)),
    ]
    assert ir.num_params == num_parameters(model)
    assert capture(model, torch.randn(5, 3, 32, 32)) == ir


class Block(nn.Module):
    """Attention and feed-forward written into one module, with the fused SDPA call."""

    def __init__(self, dim: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.fc, self.out = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, dim = x.shape
        parts = self.qkv(self.ln_1(x)).split(dim, -1)
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, length, dim))
        return x + self.out(F.gelu(self.fc(self.ln_2(x))))


class SmallGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(100, 64)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 100, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, ids: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        x = self.wte(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits if targets is None else F.cross_entropy(logits.view(-1, 100), targets.view(-1))


def test_a_hand_written_gpt_is_read_by_its_dataflow() -> None:
    model = SmallGPT()
    ids = torch.randint(0, 100, (2, 16))
    ir = capture(model, {"ids": ids, "targets": ids.clone()})
    assert (ir.num_layers, len(ir.blocks)) == (3, 1)
    places = {op.name: (op.role, op.part) for op in ir.blocks[0].ops if isinstance(op, Linear)}
    assert places == {
        "qkv": ("attention", "qkv"),
        "proj": ("attention", "o"),
        "fc": ("mlp", "up"),
        "out": ("mlp", "down"),
    }
    attention = next(op for op in ir.blocks[0].ops if isinstance(op, Attention))
    assert (attention.q_heads, attention.kv_heads, attention.qk_dim, attention.causal) == (4, 4, 16, True)
    assert [op.name for op in ir.tail] == ["norm", "head", "loss"]
    # The head is the embedding: it must not be counted twice.
    assert ir.tail[1].params[0].tied_to == "wte.weight"
    assert ir.num_params == num_parameters(model)


def test_a_transformer_encoder_layer_attends_both_ways() -> None:
    model = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    ir = capture(model, torch.randn(2, 37, 64))
    attention = next(op for op in ir.stem if isinstance(op, Attention))
    assert (attention.q_heads, attention.causal, attention.q_len) == (4, False, Extent(1, 0, 1))
    assert [op.name for op in ir.stem if isinstance(op, Linear)] == [
        "self_attn.in_proj_weight",
        "self_attn.out_proj",
        "linear1",
        "linear2",
    ]
    assert ir.num_params == num_parameters(model)


def test_multihead_attention_is_three_ops() -> None:
    x = torch.randn(2, 37, 64)
    ir = capture(nn.MultiheadAttention(64, 4, batch_first=True), (x, x, x))
    assert [(op.kind, op.part) for op in ir.stem] == [("linear", "qkv"), ("attention", ""), ("linear", "o")]
    assert all(op.rows == TOKENS for op in ir.stem if isinstance(op, Linear))


def test_flops_of_the_linears_agree_with_torchs_own_counter() -> None:
    # Torch's counter knows matrix products; it has no entry for the attention kernel that a CPU runs.
    from torch.utils.flop_counter import FlopCounterMode

    model = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.0)
    x = torch.randn(2, 37, 64)
    with FlopCounterMode(display=False) as counter:
        model(x)
    products = sum(n for op, n in counter.get_flop_counts()["Global"].items() if "mm" in str(op))
    ir = capture(model, x)
    work = ir.workload(2, 37)
    assert sum(op.flops(work) for op in ir.stem if isinstance(op, Linear)) == products


# ---- fallback and errors ----


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.left(x) if x.sum().item() > 0 else self.right(x)


@pytest.mark.parametrize("device", ["cpu", "meta"])  # with values a run can be recorded, without it cannot even start
def test_a_branch_on_values_is_read_from_the_modules_with_the_reason(device: str) -> None:
    model = Branching().to(device)
    ir = capture(model, torch.randn(2, 5, 8, device=device))
    assert ir.source == "static"
    assert {op.name for op in ir.stem} == {"left", "right"}
    assert any("data-dependent" in note for note in ir.notes)
    assert ir.num_params == num_parameters(model)


class Empty(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("never runs")


def test_what_neither_way_can_read_is_an_error_that_names_the_module() -> None:
    with pytest.raises(CaptureError, match="Empty"):
        capture(Empty(), torch.randn(2, 3))
    with pytest.raises(CaptureError, match=r"0\.weight of Sequential has no shape yet"):
        capture(nn.Sequential(nn.LazyLinear(4)))


def test_a_model_of_two_towers_names_no_table_of_its_inputs() -> None:
    width = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    text, vision = {**width, "vocab_size": 99}, {**width, "image_size": 16, "patch_size": 8}
    model = transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision))
    assert capture(model).num_params == num_parameters(model)


def test_a_scalar_added_to_a_product_is_no_bias() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.shift = nn.Parameter(torch.randn(32, 64)), nn.Parameter(torch.tensor(0.5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight + self.shift

    (linear,) = (s.op for s in capture(Shifted(), torch.randn(4, 32)).sites() if isinstance(s.op, Linear))
    assert (linear.k, linear.n, linear.bias) == (32, 64, False)


def test_a_thing_that_is_no_module_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="model is a dict"):
        capture({"weight": 1})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="example_inputs"):
        capture(nn.Linear(4, 4), 3)


def test_the_live_module_is_dropped_by_json_and_missed_by_name() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    ir = capture(model)
    again = IR.from_json(ir.to_json())
    assert again == ir
    assert again.module is None
    with pytest.raises(ConfigError, match=r"dw\.capture\(model\)"):
        again.require_module()
    assert again.attach(model).require_module() is model


def test_capture_leaves_the_model_as_it_was() -> None:
    model = SmallGPT().eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    capture(model, torch.randint(0, 100, (2, 16)))
    assert not model.training
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("reads_a_value", [False, True], ids=["not traced", "recorded"])
def test_tensors_that_a_forward_writes_into_hold_what_they_held(reads_a_value: bool) -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(32, 32)
            self.register_buffer("calls", torch.tensor(0))
            self.row, self.attribute = torch.ones(1).expand(4), torch.tensor(0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.attribute.add_(1)
            if reads_a_value and self.calls.item() > 5:
                return x
            return self.layer(x) + self.row.sum() + (0 if reads_a_value else torch.zeros(3, 7))

    model = Counts()
    assert capture(model).source == ("graph" if reads_a_value else "static")
    assert model.calls.item() == model.attribute.item() == 0


def test_a_compiled_model_is_captured_as_the_model_inside() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    assert capture(torch.compile(model)) == capture(model)  # type: ignore[arg-type]


def test_a_capture_under_the_meta_device_equals_one_outside():
    # Users build and capture in one `with` block; masks are then evaluated under it too.
    config = transformers.LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
        inside = capture(model)
    assert inside == capture(model)
    assert next(op for op in inside.blocks[0].ops if op.kind == "attention").causal
