"""Kept FP8 weights: the same numbers as without them, one quantization for a change, never a stale one."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import zoo_models
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import deepwell as dw
from deepwell.engine import compile as compile_module
from deepwell.engine.backend import BackendOptions, compile_graph
from deepwell.engine.binding import Target
from deepwell.formats.metrics import assert_bitwise_equal
from deepwell.train.adamw.optimizer import AdamWDW

FP8 = "fp8_row|fp8_row|fp8_row"


class MLP(nn.Module):
    """Two linears that share an input, so that their codes are one group, and one behind them."""

    def __init__(self, k: int = 32, hidden: int = 64, n: int = 32) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(k, hidden), nn.Linear(k, hidden)
        self.down = nn.Linear(hidden, n, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.gate(x)) * self.up(x))


def fp8_options(model: nn.Module, cache_weights: bool = True, scheme: str = FP8, **more: Any) -> BackendOptions:
    linears = [n for n, m in model.named_modules() if hasattr(m, "weight") and m.weight.dim() == 2 and n != "lm_head"]
    return BackendOptions(
        schemes=dict.fromkeys(linears, scheme),
        cache_weights=cache_weights,
        parameters=lambda: model.named_parameters(remove_duplicate=False),
        **more,
    )


def compiled(model: nn.Module, options: BackendOptions) -> Callable[..., Any]:
    return torch.compile(model, backend=lambda graph, inputs: compile_graph(graph, inputs, options))


def gradients(model: nn.Module, out: Tensor, x: Tensor) -> list[Tensor]:
    found = torch.autograd.grad(out.square().sum(), (x, *(p for p in model.parameters() if p.requires_grad)))
    return list(found)


def assert_as_uncached(model: nn.Module, run: Callable[..., Any], x: Tensor) -> None:
    """Output and all gradients are bit for bit those of a model compiled now, without kept codes."""
    out = run(x)
    got = gradients(model, out, x)
    fresh = compiled(model, fp8_options(model, cache_weights=False))(x)
    assert_bitwise_equal(out, fresh)
    for mine, theirs in zip(got, gradients(model, fresh, x), strict=True):
        assert_bitwise_equal(mine, theirs)


# ---- the same numbers, and how often weights are quantized ----


@pytest.mark.parametrize(
    "optimizer",
    [lambda p: torch.optim.AdamW(p, lr=1e-2), lambda p: AdamWDW(p, lr=1e-2)],
    ids=["AdamW", "AdamWDW"],
)
def test_training_is_bit_for_bit_that_without_kept_codes(optimizer, batch) -> None:
    runs = []
    for cached in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = zoo_models.tiny_model("llama", num_key_value_heads=2, num_hidden_layers=1).bfloat16()
        options = fp8_options(model, cached)
        run, step, losses = compiled(model, options), optimizer(model.parameters()), []
        for _ in range(3):
            for micro_batch in range(4):
                loss = run(input_ids=batch["input_ids"].roll(micro_batch, 1), labels=batch["labels"]).loss
                loss.backward()
                losses.append(loss.detach())
            step.step()
            step.zero_grad()
        runs.append((losses, [p.detach() for p in model.parameters()]))
    assert options.counts["cached_weights"] == len(options.weight_cache.groups) == 4  # qkv, o, gate and up, down
    # Three steps of four micro-batches: each group once for each step.
    assert [codes.times_quantized for codes in options.weight_cache.groups.values()] == [3] * 4
    assert options.graphs == 1
    for cached, plain in zip(*reversed(runs), strict=True):
        for mine, theirs in zip(cached, plain, strict=True):
            assert_bitwise_equal(mine, theirs)


def test_codes_cost_two_bytes_a_weight() -> None:
    model = MLP()
    options = fp8_options(model)
    compiled(model, options)(torch.randn(8, 32))
    assert options.weight_cache.num_bytes == 2 * sum(p.numel() for p in model.parameters() if p.dim() == 2)


@pytest.mark.parametrize("sizes", [(32, 64, 32), (20, 36, 10)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_size_and_dtype(sizes, dtype) -> None:
    model, x = MLP(*sizes).to(dtype), torch.randn(7, sizes[0], dtype=dtype, requires_grad=True)
    options = fp8_options(model)
    assert_as_uncached(model, compiled(model, options), x)
    assert options.counts["cached_weights"] == 2


@pytest.mark.parametrize("scheme", ["fp8_row|fp8_row|bf16", "fp8_row|bf16|fp8_row", "bf16|fp8_row|fp8_row"])
def test_mixed_schemes_keep_codes_only_where_both_products_read_them(scheme) -> None:
    model, x = MLP(), torch.randn(8, 32, requires_grad=True)
    options = fp8_options(model, scheme=scheme)
    out = compiled(model, options)(x)
    fresh = compiled(model, fp8_options(model, False, scheme))(x)
    assert_bitwise_equal(out, fresh)
    for mine, theirs in zip(gradients(model, out, x), gradients(model, fresh, x), strict=True):
        assert_bitwise_equal(mine, theirs)
    assert options.counts["cached_weights"] == (2 if scheme == "fp8_row|fp8_row|bf16" else 0)


# ---- weights that change under it ----


def _edit_in_place(model: nn.Module) -> None:
    with torch.no_grad():
        model.up.weight.mul_(-2)


def _one_number(model: nn.Module) -> None:
    with torch.no_grad():
        model.down.weight[3, 5] += 0.5


def _load(model: nn.Module) -> None:
    model.load_state_dict({name: -2 * value for name, value in model.state_dict().items()})


def _assign(model: nn.Module) -> None:
    model.load_state_dict({name: -2 * value for name, value in model.state_dict().items()}, assign=True)


def _swap_data(model: nn.Module) -> None:
    model.up.weight.data = -2 * model.up.weight.data


def _replace_parameter(model: nn.Module) -> None:
    model.up.weight = nn.Parameter(-2 * model.up.weight.detach())


def _foreign_optimizer(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = torch.full_like(p, 3.0)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.zero_grad()


def _own_optimizer(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = torch.full_like(p, 3.0)
    AdamWDW(model.parameters(), lr=0.1).step()
    model.zero_grad()


def _through_a_view(model: nn.Module) -> None:
    with torch.no_grad():
        model.up.weight.view(-1)[:7].fill_(3.0)


def _through_numpy(model: nn.Module) -> None:
    model.up.weight.detach().numpy()[:] *= -2  # no version counter moves


def _odd_memory(model: nn.Module) -> None:
    w = model.up.weight
    w.data = torch.zeros(w.numel() + 1)[1:].view(w.shape).copy_(-2 * w.data)


CHANGES = {
    "in place": _edit_in_place,
    "one number": _one_number,
    "load": _load,
    "assign": _assign,
    "data": _swap_data,
    "replaced": _replace_parameter,
    "SGD": _foreign_optimizer,
    "AdamWDW": _own_optimizer,
    "view": _through_a_view,
    "numpy": _through_numpy,
    "odd memory": _odd_memory,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_no_way_of_editing_leaves_a_stale_code(change) -> None:
    model, x = MLP(), torch.randn(8, 32, requires_grad=True)
    options = fp8_options(model)
    run = compiled(model, options)
    before = run(x).detach()
    change(model)
    assert not torch.equal(run(x), before)
    assert_as_uncached(model, run, x)
    change(model)  # and once more: the second edit is seen as the first was
    assert_as_uncached(model, run, x)


@pytest.mark.usefixtures("cxx_compiler")
def test_inductor_reads_the_codes_of_each_call() -> None:
    # Never a constant, neither of the graph nor of its cache.
    model, x = MLP().bfloat16(), torch.randn(16, 32, dtype=torch.bfloat16, requires_grad=True)
    options = fp8_options(model, use_inductor=True)
    plain = fp8_options(model, False, use_inductor=True)
    run, uncached = compiled(model, options), compiled(model, plain)
    seen = []
    for _ in range(3):
        out, ref = run(x), uncached(x)
        assert_bitwise_equal(out, ref)
        for mine, theirs in zip(gradients(model, out, x), gradients(model, ref, x), strict=True):
            assert_bitwise_equal(mine, theirs)
        seen.append(out.detach())
        _edit_in_place(model)
    assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])
    # down was never edited; gate and up share their codes.
    assert sorted(codes.times_quantized for codes in options.weight_cache.groups.values()) == [1, 3]


def test_a_weight_that_the_model_writes_itself_is_not_kept() -> None:
    class Clipped(MLP):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.down.weight.view(-1).clamp_(-0.05, 0.05)  # through a view, in the graph
            return super().forward(x)

    model, x = Clipped(), torch.randn(8, 32)
    options = fp8_options(model)
    run = compiled(model, options)
    with torch.no_grad():
        for _ in range(2):
            model.down.weight.mul_(5)
            out = run(x)
            assert model.down.weight.abs().max() <= 0.05
            assert_bitwise_equal(out, compiled(MLP.__call__.__get__(model), fp8_options(model, False))(x))
    assert options.counts["cached_weights"] == 1  # gate and up


# ---- forwards that wait for their backward ----


def test_two_forwards_of_the_same_weights_may_wait_for_their_backward() -> None:
    model, x = MLP(), torch.randn(8, 32, requires_grad=True)
    run = compiled(model, fp8_options(model))
    first, second = run(x), run(2 * x)
    apart = gradients(model, run(x), x)
    for mine, theirs in zip(gradients(model, first, x), apart, strict=True):
        assert_bitwise_equal(mine, theirs)
    gradients(model, second, x)


def test_a_backward_through_codes_that_are_gone_is_an_error_not_a_wrong_gradient() -> None:
    model, x = MLP(), torch.randn(8, 32, requires_grad=True)
    run = compiled(model, fp8_options(model))
    out = run(x)
    _edit_in_place(model)
    run(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(model, out, x)


# ---- several graphs, tied and frozen weights, copies ----


def test_training_evaluation_and_other_shapes_share_the_codes() -> None:
    model, x = MLP(), torch.randn(8, 32)
    options = fp8_options(model)
    run = compiled(model, options)
    run(x).sum().backward()
    with torch.inference_mode():
        run(x)
    with torch.no_grad():
        run(x)
    for tokens in (5, 13, 16):
        run(torch.randn(tokens, 32)).sum().backward()
    assert options.graphs > 2
    assert [codes.times_quantized for codes in options.weight_cache.groups.values()] == [1, 1]


def test_a_first_call_in_inference_mode_does_not_spoil_training() -> None:
    model, x = MLP(), torch.randn(8, 32, requires_grad=True)
    run = compiled(model, fp8_options(model))
    with torch.inference_mode():
        run(x.detach())
    assert_as_uncached(model, run, x)


def test_tied_and_frozen_weights_and_weights_stored_the_other_way() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(32, 32, bias=False) for _ in range(3))
            self.b.weight = self.a.weight
            self.c.weight.requires_grad_(False)
            self.kn = nn.Module()
            self.kn.weight = nn.Parameter(torch.randn(32, 48) * 0.1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.c(F.relu(self.b(F.relu(self.a(x)))))
            return torch.addmm(torch.zeros(48), y, self.kn.weight)

    model, x = Tied(), torch.randn(8, 32, requires_grad=True)
    options = fp8_options(model)
    run = compiled(model, options)
    for _ in range(2):
        assert_as_uncached(model, run, x)
        with torch.no_grad():
            model.b.weight.mul_(-1.5)
            model.c.weight.add_(0.1)
    assert options.counts["cached_weights"] == 4 and len(options.weight_cache.groups) == 3


def test_regions_under_checkpointing_read_kept_codes() -> None:
    class Checkpointed(MLP):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(checkpoint(super().forward, x, use_reentrant=False))

    model, x = Checkpointed(), torch.randn(8, 32, requires_grad=True)
    options = fp8_options(model)
    run = compiled(model, options)
    for _ in range(2):
        assert_as_uncached(model, run, x)
        _edit_in_place(model)
    # Inside and outside are the same weights: one buffer has one name, and the other place quantizes for itself.
    assert options.counts["cached_weights"] == 2


def test_hugging_face_checkpointing_reads_kept_codes(batch) -> None:
    model = zoo_models.tiny_model("llama", num_hidden_layers=1).bfloat16()
    model.gradient_checkpointing_enable()
    options = fp8_options(model)
    run = compiled(model, options)
    for _ in range(2):
        run(**batch).loss.backward()
    assert options.counts["cached_weights"] == 4
    assert options.weight_cache.times_quantized() == 4


# ---- through the engine ----


@pytest.fixture
def hopper(monkeypatch) -> None:
    """Bind as on a Hopper GPU, and run the references."""
    monkeypatch.setattr(compile_module, "device_of", lambda tensors: Target(kind="cuda", capability=(9, 0)))


def _engine(model: nn.Module, **more: Any) -> Any:
    return dw.compile(model, precision_policy=dw.PrecisionPolicy("mxfp8"), inductor=False, measure=False, **more)


@pytest.mark.usefixtures("hopper")
def test_an_engine_keeps_codes_when_asked_and_says_so() -> None:
    model, x = MLP(), torch.randn(8, 32)
    plain, cached = _engine(model), _engine(model, cache_weights=True)
    assert_bitwise_equal(cached(x), plain(x))
    assert cached.report().passes["cached_weights"] == 2 and "cached_weights" not in plain.report().passes
    assert any("FP8 values of 2 groups of weights are kept" in note for note in cached.report().notes)
    cached.eval()
    _edit_in_place(model)
    assert_bitwise_equal(cached(x), plain(x))


@pytest.mark.usefixtures("hopper")
def test_a_copied_engine_has_its_own_codes() -> None:
    model, x = MLP(), torch.randn(8, 32, requires_grad=True)
    student = _engine(model, cache_weights=True)
    out = student(x)
    teacher = copy.deepcopy(student)
    with torch.no_grad():
        for p in teacher.parameters():
            p.mul_(-2)
        taught = teacher(x)
    assert not torch.equal(out, taught)
    assert_as_uncached(model, student, x)
    gradients(model, out, x)  # its codes are still there, whatever the copy did
    assert teacher.model is not model and teacher.options.weight_cache is not student.options.weight_cache
    assert teacher.options.rewritten == {"gate", "up", "down"}
    assert_as_uncached(teacher.model, teacher, x)


@pytest.mark.usefixtures("hopper")
def test_steps_with_other_formats_share_the_codes() -> None:
    model, x = MLP(), torch.randn(8, 32)
    policy = dw.PrecisionPolicy("mxfp8")
    policy.set_layer_precision("path:down", "bf16", steps=(10, None))
    engine = dw.compile(model, precision_policy=policy, inductor=False, measure=False, cache_weights=True)
    first = engine(x)
    engine.at_step(10)(x)
    assert_bitwise_equal(engine.at_step(0)(x), first)
    assert engine.options.weight_cache.times_quantized() == 2


# ---- on a GPU ----


@pytest.mark.gpu
@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_on_a_gpu_training_is_bit_for_bit_that_without_kept_codes(cuda_graphs, batch) -> None:
    inputs = {name: value.cuda() for name, value in batch.items()}
    runs = []
    for cached in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = zoo_models.tiny_model("llama", num_key_value_heads=2).bfloat16().cuda()
        model.get_input_embeddings().requires_grad_(False)  # its gradient is summed by atomics, in any order
        engine = dw.compile(model, precision="mxfp8", measure=False, cache_weights=cached, cuda_graphs=cuda_graphs)
        step, losses = AdamWDW(model.parameters(), lr=1e-3), []
        for _ in range(4):
            for _ in range(4):
                loss = engine(**inputs).loss
                loss.backward()
                losses.append(loss.detach().clone())
            step.step()
            step.zero_grad()
        runs.append((losses, [p.detach() for p in model.parameters()]))
    assert [codes.times_quantized for codes in engine.options.weight_cache.groups.values()] == [4] * 8
    for cached, plain in zip(*reversed(runs), strict=True):
        for mine, theirs in zip(cached, plain, strict=True):
            assert_bitwise_equal(mine, theirs)
