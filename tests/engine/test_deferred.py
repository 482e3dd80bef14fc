"""Logits that wait for a reader are the model's own to autograd, to hooks and in every mode, or an error."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import deepwell as dw
from deepwell.engine.deferred import DeferredLogits
from deepwell.errors import NumericsError
from deepwell.formats.metrics import assert_bitwise_equal

EXACT = {"rtol": 2e-5, "atol": 2e-6}  # fp32 sums in another order


class Head(nn.Module):
    """A head that returns loss and logits, with a bias, a soft cap, and a loss that is scaled and has a second term."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.head = nn.RMSNorm(16), nn.Linear(16, 24)

    def forward(self, x: Tensor, y: Tensor, count: int = 3) -> tuple[Tensor, Tensor]:
        hidden = self.norm(x)
        logits = torch.tanh(self.head(hidden) / 3.0) * 3.0
        loss = F.cross_entropy(logits.float().view(-1, 24), y, reduction="sum") / count
        return loss + 0.1 * hidden.square().mean(), logits


def _inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(2, 9, 16), torch.randint(0, 24, (18,)).index_fill_(0, torch.tensor([4]), -100)


class _Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        ctx.save_for_backward(z)
        return z.square().mean()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (z,) = ctx.saved_tensors
        return grads[0] * 2 * z / z.numel()


def _read_without_gradients_first(loss: Tensor, z: Tensor) -> list[Tensor]:
    with torch.no_grad():
        best = z.argmax(-1)
    (loss + z.log_softmax(-1)[..., 0].mean()).backward()
    return [best, z]


def _read_in_inference_mode_first(loss: Tensor, z: Tensor) -> list[Tensor]:
    with torch.inference_mode():
        best = z.argmax(-1)
    (loss + z.square().mean()).backward()
    return [best]


def _autograd_function(loss: Tensor, z: Tensor) -> list[Tensor]:
    (loss + 10 * _Squares.apply(z)).backward()
    return []


def _reentrant_checkpoint(loss: Tensor, z: Tensor) -> list[Tensor]:
    (loss + checkpoint(lambda t: t.square().mean(), z, use_reentrant=True)).backward()
    return []


def _retained(loss: Tensor, z: Tensor) -> list[Tensor]:
    z.retain_grad()
    loss.backward()
    return [z.grad]


def _retained_with_another_reader(loss: Tensor, z: Tensor) -> list[Tensor]:
    z.retain_grad()
    (2 * loss + z.square().mean()).backward()
    return [z.grad]


def _hook_that_changes(loss: Tensor, z: Tensor) -> list[Tensor]:
    z.register_hook(lambda grad: grad * 3)
    loss.backward()
    return []


def _hook_that_writes(loss: Tensor, z: Tensor) -> list[Tensor]:
    z.register_hook(lambda grad: grad.mul_(0))
    loss.backward()
    return []


def _gradient_of_logits(loss: Tensor, z: Tensor) -> list[Tensor]:
    return [*torch.autograd.grad(loss, z, retain_graph=True), *torch.autograd.grad(loss + z.mean(), z)]


def _backward_to_logits_alone(loss: Tensor, z: Tensor) -> list[Tensor]:
    loss.backward(inputs=[z])
    return [z.grad]


def _written_in_place(loss: Tensor, z: Tensor) -> list[Tensor]:
    z.div_(2.0)
    z[..., 3] = -1.0
    (loss + z.square().mean()).backward()
    return [z]


def _twice(loss: Tensor, z: Tensor) -> list[Tensor]:
    z.retain_grad()
    loss.backward(retain_graph=True)
    loss.backward()
    return [z.grad]


def _loss_divided_in_place(loss: Tensor, z: Tensor) -> list[Tensor]:
    loss /= 4
    (loss + z.mean()).backward()
    return [loss]


def _under_autocast(loss: Tensor, z: Tensor) -> list[Tensor]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        values = z + 0
    (loss + values.square().mean()).backward()
    return [values]


USES = [
    _read_without_gradients_first, _read_in_inference_mode_first, _autograd_function, _reentrant_checkpoint, _retained,
    _retained_with_another_reader, _hook_that_changes, _hook_that_writes, _gradient_of_logits,
    _backward_to_logits_alone, _written_in_place, _twice, _loss_divided_in_place, _under_autocast,
]  # fmt: skip


@pytest.fixture(scope="module")
def pair() -> tuple[nn.Module, nn.Module]:
    model = Head()
    return model, dw.compile(model, precision="bf16")


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__.strip("_"))
def test_gradients_and_values_are_eagers(pair, use: Callable[[Tensor, Tensor], list[Tensor]]) -> None:
    (x, y), found = _inputs(), []
    for net in pair:
        given = x.clone().requires_grad_()
        loss, logits = net(given, y)
        assert isinstance(logits, DeferredLogits) == (net is not pair[0])
        seen = use(loss, logits)
        grads = [given.grad, *(p.grad for p in net.parameters())]
        found.append([loss, *seen, *(g for g in grads if g is not None)])
        net.zero_grad()
    eager, ours = found
    assert len(eager) == len(ours)
    for ref, got in zip(eager, ours, strict=True):
        torch.testing.assert_close(got.detach() + 0, ref.detach(), **EXACT)


def test_the_default_step_computes_no_logits_and_no_gradient_of_them(pair, monkeypatch) -> None:
    from deepwell.engine import deferred

    monkeypatch.setattr(deferred, "_values", lambda *_: pytest.fail("logits were computed"))
    loss, logits = pair[1](*_inputs())
    loss.backward()
    assert logits._value is None and logits.requires_grad and not logits.is_leaf
    pair[1].zero_grad()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_reads_logits_inside_and_behind_the_block(pair, mode) -> None:
    model, engine = pair
    with mode():
        inside, behind = engine(*_inputs())[1], engine(*_inputs())[1]
        ref = model(*_inputs())[1]
        torch.testing.assert_close(inside.softmax(-1), ref.softmax(-1), **EXACT)
    assert not behind.requires_grad
    torch.testing.assert_close(torch.from_numpy(behind.softmax(-1).numpy()), ref.softmax(-1), **EXACT)
    assert behind.numpy().shape == (2, 9, 24) and torch.tensor(behind.tolist()).shape == behind.shape


def test_values_leave_as_plain_tensors(pair) -> None:
    logits = pair[1](*_inputs())[1]
    file = io.BytesIO()
    torch.save(logits, file)
    file.seek(0)
    assert_bitwise_equal(torch.load(file).detach(), logits.detach())
    assert type(copy.deepcopy(logits.detach())) is Tensor
    with pytest.raises(RuntimeError, match="requires grad"):
        logits.numpy()


def _fused_step(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True).step()


def _adamw_dw(model: nn.Module) -> None:
    from deepwell.train.adamw.optimizer import AdamWDW

    for p in model.parameters():
        p.grad = torch.ones_like(p)
    AdamWDW(model.parameters(), lr=1e-6).step()


def _one_sign(model: nn.Module) -> None:
    model.head.weight.data[3, 5] *= -1


def _swapped_rows(model: nn.Module) -> None:
    model.head.weight.data[[1, 2]] = model.head.weight.data[[2, 1]]


def _signs_of_odd_columns(model: nn.Module) -> None:
    model.head.weight.data[:, 1::2] *= -1  # the upper half of every 64-bit word


def _bias(model: nn.Module) -> None:
    model.head.bias.data.add_(1e-3)


@pytest.mark.parametrize("change", [_fused_step, _adamw_dw, _one_sign, _swapped_rows, _signs_of_odd_columns, _bias])
def test_logits_of_changed_weights_are_an_error_however_they_were_changed(pair, change) -> None:
    logits = pair[1](*_inputs())[1]
    change(pair[0])
    with pytest.raises(NumericsError, match=r"read them before optimizer\.step"):
        logits.sum()
    with pytest.raises(NumericsError, match=r"read them before optimizer\.step"):
        logits.detach().numpy()
    pair[0].zero_grad()


def test_logits_that_leave_in_two_forms_or_a_loss_in_two_ways_are_not_deferred() -> None:
    class Two(Head):
        def forward(self, x: Tensor, y: Tensor, count: int = 3) -> Any:
            logits = self.head(x)
            loss = F.cross_entropy(logits.view(-1, 24), y)
            return (loss, loss.exp(), logits) if count else (loss, logits, logits * 2)

    model = Two()
    engine = dw.compile(model, precision="bf16")
    for count in (0, 1):
        got, ref = engine(*_inputs(), count), model(*_inputs(), count)
        assert not any(isinstance(value, DeferredLogits) for value in got)
        for mine, theirs in zip(got, ref, strict=True):
            torch.testing.assert_close(mine, theirs, **EXACT)


def test_logits_of_a_loss_of_several_numbers_are_watched() -> None:
    class Weighed(Head):
        def forward(self, x: Tensor, y: Tensor, by: Any = 3) -> Any:
            loss, logits = super().forward(x, y)
            return loss * by + by, logits

    model, by, grads = Weighed(), torch.tensor([0.5, -1.0, 3.0]), []
    for net in (model, dw.compile(model, precision="bf16")):
        loss, logits = net(*_inputs(), by)
        assert isinstance(logits, DeferredLogits) == (net is not model)
        logits.retain_grad()
        loss.dot(torch.tensor([1.0, 2.0, -1.0])).backward()
        grads.append([logits.grad, *(p.grad for p in net.parameters())])
        net.zero_grad()
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(theirs, mine, **EXACT)


def test_compiled_functions_read_them(pair) -> None:
    loss, logits = pair[1](*_inputs())
    ref_loss, ref = pair[0](*_inputs())
    compiled = torch.compile(lambda z: z.square().mean(), backend="aot_eager")
    for term in (compiled, lambda z: torch.func.grad(lambda t: t.square().sum())(z).mean()):
        torch.testing.assert_close(term(logits), term(ref), **EXACT)
    weight = pair[0].head.weight
    got, wanted = (torch.autograd.grad(a + compiled(z), weight)[0] for a, z in ((loss, logits), (ref_loss, ref)))
    torch.testing.assert_close(got, wanted, **EXACT)
