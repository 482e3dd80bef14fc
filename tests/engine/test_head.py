"""Head and loss become one, whatever is done to the logits between them, and other losses stay and are named."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import zoo_models
from torch import Tensor, nn

import deepwell as dw
from deepwell.engine.binding import Target
from deepwell.engine.passes.cross_entropy import rewrite_cross_entropy
from deepwell.formats.metrics import assert_bitwise_equal, sqnr_db
from deepwell.kernels.gemm import fp8 as gemm
from deepwell.kernels.head import linear_cross_entropy as kernels
from deepwell.kernels.head.autograd import linear_cross_entropy
from deepwell.kernels.tune import fastest

HEAD = (torch.Size([6, 5, 16]), torch.Size([24, 16]))


def _head_inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, w = torch.randn(HEAD[0], dtype=dtype), torch.randn(HEAD[1], dtype=dtype)
    return x, w, torch.randn(24, dtype=dtype), torch.randint(0, 24, (30,))


def _fused(graph: Any) -> tuple[int, int]:
    heads, deferred = rewrite_cross_entropy(graph)
    return len(heads), len(deferred)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_head_and_loss_become_one(run_pass, dtype, reduction) -> None:
    def loss(x: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, w).float().view(-1, 24), y, reduction=reduction)

    inputs = _head_inputs(dtype)
    got = run_pass(loss, _fused, *inputs)
    assert got.found == (1, 0)
    assert got.names()[-1] == "linear_cross_entropy"
    torch.testing.assert_close(got.out, loss(*inputs), rtol=1e-6, atol=0)


# What models do to their logits: bias (Phi, GPT-J), a row that is added (BART), a factor (Cohere), a divisor (Granite),
# a soft cap (Gemma 2), and what amounts to the same: two factors, a factor on the left, a cap written as one factor
# inside and one outside.
LOGITS = {
    "bias": F.linear,
    "row": lambda x, w, b: F.linear(x, w) + b.to(x.dtype),
    "factor": lambda x, w, b: F.linear(x, w) * 0.0625,
    "divisor": lambda x, w, b: F.linear(x, w) / 8.0,
    "both": lambda x, w, b: 3 * (F.linear(x, w, b) / 8.0),
    "cap": lambda x, w, b: torch.tanh(F.linear(x, w) / 3.0) * 3.0,
    "all": lambda x, w, b: 3.0 * torch.tanh((F.linear(x, w, b) * 0.5) / 3.0),
    "negative": lambda x, w, b: torch.tanh(F.linear(x, w) * 0.25) * -2.0,
    "cast first": lambda x, w, b: F.linear(x, w).float() / 8.0,
}


@pytest.mark.parametrize("logits", LOGITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_done_to_the_logits_is_done_in_the_kernel(run_pass, logits, dtype) -> None:
    def both(x: Tensor, w: Tensor, b: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        z = LOGITS[logits](x, w, b)
        return F.cross_entropy(z.float().view(-1, 24), y), z

    inputs = _head_inputs(dtype)
    got = run_pass(both, _fused, *inputs)
    assert got.found == (1, 1)
    assert not {"linear", "add", "tanh", "mul", "truediv"} & set(got.names())
    exact = both(*(t.double() if t.is_floating_point() else t for t in inputs))[0].float()
    torch.testing.assert_close(got.out[0], exact, rtol=1e-5 if dtype is torch.float32 else 2**-7, atol=0)
    assert_bitwise_equal(got.out[1], inputs[0])  # the head's input in the logits' place


class Head(nn.Module):
    """A head with bias, its own or a row that is added, scale and soft cap that returns loss and logits."""

    def __init__(self, has_row: bool = False) -> None:
        super().__init__()
        self.norm, self.head = nn.RMSNorm(16), nn.Linear(16, 24, bias=not has_row)
        self.row = nn.Parameter(torch.randn(1, 24)) if has_row else None

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.norm(x))
        logits = logits if self.row is None else logits + self.row
        logits = torch.tanh(logits * 0.5 / 3.0) * 3.0
        return F.cross_entropy(logits.view(-1, 24), y), logits


@pytest.mark.parametrize("has_row", [False, True])
def test_deferred_logits_take_every_step_of_the_models_own(has_row: bool) -> None:
    model = Head(has_row)
    x, _, _, y = _head_inputs()
    engine = dw.compile(model, precision="bf16")
    (loss, logits), (ref_loss, ref) = engine(x, y), model(x, y)
    torch.testing.assert_close(loss, ref_loss)
    assert type(logits).__name__ == "DeferredLogits"
    torch.testing.assert_close(logits + 0, ref)
    got = torch.autograd.grad(loss + logits.square().mean(), list(model.parameters()))
    wanted = torch.autograd.grad(ref_loss + ref.square().mean(), list(model.parameters()))
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, theirs)
    logits = engine(x, y)[1]
    with torch.no_grad():
        (model.row if has_row else model.head.bias).add_(1.0)
    with pytest.raises(dw.DeepwellError, match=r"read them before optimizer\.step"):
        logits.sum()


@pytest.mark.parametrize("frozen", ["head", "body", "bias", "none"])
def test_gradients_that_nobody_wants_are_not_computed(frozen, monkeypatch) -> None:
    model = Head()
    model.norm.requires_grad_(frozen != "body")
    model.head.weight.requires_grad_(frozen not in ("head",))
    model.head.bias.requires_grad_(frozen not in ("head", "bias"))
    asked: list[kernels.HeadOptions] = []
    plain = kernels.linear_cross_entropy

    def watch(*args: Any, head: kernels.HeadOptions, **kwargs: Any) -> Any:
        asked.append(head)
        return plain(*args, head=head, **kwargs)

    from deepwell.kernels.head import torch_ops as library_head

    monkeypatch.setattr(library_head, "linear_cross_entropy", watch)
    x, _, _, y = _head_inputs()
    dw.compile(model, precision="bf16")(x, y)[0].backward()
    assert [(head.dx, head.dw, head.db) for head in asked] == [
        {
            "head": (True, False, False),
            "body": (False, True, True),
            "bias": (True, True, False),
            "none": (True, True, True),
        }[frozen]
    ]
    got = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    model(x, y)[0].backward()
    for name, p in model.named_parameters():
        assert (p.grad is None) == (got[name] is None)
        if p.grad is not None:
            torch.testing.assert_close(got[name], p.grad)


def test_a_loss_of_bf16_logits_stays_bf16(run_pass) -> None:
    def loss(x: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, w).view(-1, 24), y)

    inputs = _head_inputs(torch.bfloat16)
    got = run_pass(loss, _fused, *inputs)
    assert got.found == (1, 0)
    assert got.out.dtype is torch.bfloat16


@pytest.mark.parametrize("returned", [lambda z: z, lambda z: z.contiguous()], ids=["as is", "contiguous"])
def test_logits_that_the_model_returns_are_deferred(run_pass, returned) -> None:
    # OPT returns and goes on with `.contiguous()` of them.
    def both(x: Tensor, w: Tensor, b: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = returned(F.linear(x, w))
        return F.cross_entropy(logits.view(-1, 24).float(), y), logits

    inputs = _head_inputs()
    got = run_pass(both, _fused, *inputs)
    assert got.found == (1, 1)
    assert_bitwise_equal(got.out[1], inputs[0])


def _weighted(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y, weight=torch.ones(24))


def _smoothed(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y, label_smoothing=0.1)


def _each(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y, reduction="none").mean()


def _each_in_old_words(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y, None, None, -100, False).sum()


def _to_probabilities(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, F.one_hot(y, 24).to(logits.dtype))


def _with_penalty(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y) + logits.logsumexp(-1).square().mean()


def _returned_cast(logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(logits, y), logits.double()


def _bent_twice(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(torch.tanh(torch.tanh(logits)), y)


def _scaled_by_a_tensor(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits * logits.detach().abs().amax(), y)


def _scaled_to_nothing(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits * 0.0, y)


def _inverted(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(1.0 / logits, y)


def _scaled_in_place(logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    before = logits.view(-1)
    logits *= 0.5
    return F.cross_entropy(logits, y), before * 1.0


def _read_before_the_cap(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(torch.tanh(logits / 3.0) * 3.0, y) + logits.square().mean()


NAMED = {
    _weighted: "class weights",
    _smoothed: "label smoothing",
    _each: "reduction 'none'",
    _each_in_old_words: "size_average or reduce",
    _to_probabilities: "no vector of class indices",
}


@pytest.mark.parametrize(
    "loss",
    [
        *NAMED, _with_penalty, _returned_cast, _bent_twice, _scaled_by_a_tensor, _scaled_to_nothing, _inverted,
        _scaled_in_place, _read_before_the_cap,
    ],
)  # fmt: skip
def test_another_loss_is_left_alone(run_pass, loss) -> None:
    def function(x: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
        return loss(F.linear(x, w).view(-1, 24), y)

    inputs = _head_inputs()
    got = run_pass(function, _fused, *inputs)
    assert got.found == (0, 0)
    torch.testing.assert_close(got.out, function(*inputs))


@pytest.mark.parametrize("loss", NAMED)
def test_the_report_says_why_all_logits_are_held(loss) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(16, 24, bias=False)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return loss(self.head(x).view(-1, 24), y)

    x, _, _, y = _head_inputs()
    engine = dw.compile(Model(), precision="bf16")
    engine(x, y).backward()
    assert [note for note in engine.report().notes if "all logits are held" in note and NAMED[loss] in note]


def test_a_float64_head_is_left_alone(run_pass) -> None:
    def plain(x: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, w).view(-1, 24), y)

    assert run_pass(plain, _fused, *_head_inputs(torch.float64)).found == (0, 0)


@pytest.mark.parametrize("model_type", ["phi", "gptj", "granite", "cohere", "gemma2", "opt"])
def test_published_heads_never_hold_all_logits(model_type, batch, monkeypatch) -> None:
    # Bias, bias, divisor, factor, soft cap, a copy of the logits. The largest logits that a linear makes: none.
    overrides = {"granite": {"logits_scaling": 8.0}}.get(model_type, {})
    model = zoo_models.tiny_model(model_type, **overrides).eval()
    ref = model(**batch)
    ref.loss.backward()
    wanted = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    engine = dw.compile(model, precision="bf16")
    out = engine(**batch)
    out.loss.backward()
    assert engine.options.counts["cross_entropy"] == 1
    assert out.logits._value is None  # nobody looked
    torch.testing.assert_close(out.loss, ref.loss, rtol=1e-5, atol=0)
    torch.testing.assert_close(out.logits + 0, ref.logits, rtol=1e-4, atol=1e-5)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, wanted[name], rtol=1e-3, atol=1e-5)


def test_the_function_counts_its_gradients() -> None:
    # autograd wants one result per argument, whatever `how` holds.
    x, w = torch.randn(5, 8, requires_grad=True), torch.randn(6, 8, requires_grad=True)
    y = torch.arange(5)
    loss = linear_cross_entropy(x, w, None, y, -100, "sum", False, 0.5, 4.0)
    loss.backward()
    assert x.grad is not None and w.grad is not None


class Tiny(nn.Module):
    """A head whose sizes FP8 takes, and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.lm_head = nn.Embedding(48, 32), nn.RMSNorm(32), nn.Linear(32, 48, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.lm_head(self.norm(self.embed(x))), y)


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0)], ids=str)
def test_an_fp8_head_of_an_fp32_model_is_computed_and_the_report_says_how(capability, monkeypatch) -> None:
    # A CPU that is taken for the GPU, with the restriction that torch has there.
    monkeypatch.setattr("deepwell.engine.compile.device_of", lambda tensors: Target(kind="cuda", capability=capability))
    monkeypatch.setattr("deepwell.engine.compile.use_inductor", lambda asked, device: False)
    monkeypatch.setattr(gemm, "_capability", lambda device: capability)
    product, written = kernels.fp8_gemm, []

    def of_torch(a: Tensor, scale_a: Tensor | None, b: Tensor, scale_b: Tensor, **how: Any) -> Tensor:
        if scale_a is None or scale_a.numel() > 1:  # scales of rows, left to the reader or not
            written.append(how["out_dtype"])
            if capability[0] != 9 and how["out_dtype"] is not torch.bfloat16:
                raise ValueError("Only bf16 high precision output types are supported for row-wise scaling.")
        return product(a, scale_a, b, scale_b, **how)

    monkeypatch.setattr(fastest, "fp8_gemm", of_torch)
    model, (x, y) = Tiny(), torch.randint(0, 48, (2, 64))
    policy = dw.PrecisionPolicy("bf16")
    policy.set_layer_precision("path:lm_head", "fp8", scaling="row")
    engine = dw.compile(model, precision_policy=policy, measure=False)
    loss = engine(x, y)
    loss.backward()
    got = model.lm_head.weight.grad.clone()
    model.zero_grad()
    ref = model(x, y)
    ref.backward()
    assert set(written) == {torch.float32 if capability[0] == 9 else torch.bfloat16} and loss.dtype is torch.float32
    torch.testing.assert_close(loss, ref, rtol=0.02, atol=0)
    assert sqnr_db(model.lm_head.weight.grad, got) > 20  # a layer's gradients (docs/numerics.md)
    reasons = {row.gemm: row.reason for row in engine.report().bindings if row.path == "lm_head"}
    said = [gemm for gemm, reason in reasons.items() if "has no fp32 products with row scales" in reason]
    assert said == ([] if capability[0] == 9 else ["fwd", "dgrad"])


@pytest.mark.parametrize("label", [24, -1])
def test_a_label_outside_the_vocabulary_is_torchs_error(run_pass, label: int) -> None:
    def loss(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, w).view(-1, 24), y)

    x, w, _, y = _head_inputs()
    assert run_pass(loss, _fused, x, w, y.masked_fill(y == 0, -100)).found == (1, 0)
    y[3] = label
    for function in (loss, torch.compile(loss, backend=lambda module, _: _fused(module.graph) and module.forward)):
        with pytest.raises(IndexError, match=f"Target {label} is out of bounds"):
            function(x, w, y)
