"""Plain PyTorch programs around an engine: each does what it does with the model itself."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import deepwell as dw
from deepwell.errors import UnsupportedError

D = 32
PROGRAMS: dict[str, Callable[[Callable[[nn.Module], Any]], Any]] = {}


def program(function: Callable[[Callable[[nn.Module], Any]], Any]) -> Callable[..., Any]:
    """Of what makes an engine of a model, or leaves it: returns tensors, in lists."""
    PROGRAMS[function.__name__.strip("_")] = function
    return function


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 64), nn.GELU(), nn.Linear(64, D)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class Function(nn.Module):
    """A forward written as a function of the module's own parts."""

    def __init__(self, forward: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


def step(model: Any, *args: Any) -> list[Any]:
    """Output and loss of a call, and gradients so far."""
    out = model(*args)
    loss = (out.float() * torch.linspace(-1, 2, out.numel()).view(out.shape)).sum()
    loss.backward()
    return [out, loss, [None if p.grad is None else p.grad.clone() for p in model.parameters()]]


def rows(*shape: int) -> Tensor:
    return torch.randn(*(shape or (6,)), D)


@program
def _tied_and_transposed(made: Any) -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        q, k = self.w.chunk(2)
        return F.linear(F.relu(F.linear(x, q, self.b)), q.t(), self.b) * F.linear(x, k) + self.tied(x)[..., :D]

    tied = nn.Linear(D, 2 * D)
    return step(made(Function(forward, w=tied.weight, b=nn.Parameter(torch.randn(D)), tied=tied)), rows())


@program
def _weight_norm_that_learns(made: Any) -> Any:
    model = made(nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(D, 64)), nn.GELU(), nn.Linear(64, D)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = []
    for _ in range(3):
        found.append(step(model, rows()))
        optimizer.step()
    return found


@program
def _weights_that_change_places(made: Any) -> Any:
    model, x = made(MLP()), rows()
    found = [step(model, x)]
    first, second = (layer[1] for layer in model.layers)
    first.weight, second.weight = second.weight, first.weight
    found.append(step(model, x))
    first.weight = second.weight
    found.append(step(model, x))
    model.layers[0] = model.layers[1]
    return [*found, step(model, x)]


@program
def _parametrized_and_pruned_after_a_call(made: Any) -> Any:
    model, x = made(MLP()), rows()
    found = [step(model, x)]
    prune.l1_unstructured(model.layers[0][1], "weight", 0.5)
    parametrize.register_parametrization(model.layers[1][1], "weight", nn.Tanh())
    found.append(step(model, x))
    prune.remove(model.layers[0][1], "weight")
    parametrize.remove_parametrizations(model.layers[1][1], "weight")
    return [*found, step(model, x)]


@program
def _weights_written_in_the_forward(made: Any) -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = self.a(x)
            self.a.weight.mul_(0.5)
        return self.b(F.relu(self.a(x))) + y

    model = made(Function(forward, a=nn.Linear(D, D), b=nn.Linear(D, D)))
    return [step(model, rows()), step(model, rows()), list(model.parameters())]


@program
def _functional_call_and_its_gradient(made: Any) -> Any:
    model, x = made(MLP()), rows()
    other = {name: 1.3 * p.detach() for name, p in model.named_parameters()}
    gradient = torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,)).square().mean())(other)
    return [model(x), torch.func.functional_call(model, other, (x,)), gradient, model(x)]


@program
def _optimizer_in_the_backward(made: Any) -> Any:
    model = made(MLP())

    def update(p: Tensor) -> None:
        p.data.sub_(0.01 * p.grad)
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)
    return [[step(model, rows())[0] for _ in range(3)], list(model.parameters())]


@program
def _average_of_weights(made: Any) -> Any:
    model = made(MLP())
    average, optimizer = AveragedModel(model), torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(2):
        step(model, rows())
        optimizer.step()
        average.update_parameters(model)
    return [average(rows()), list(average.parameters()), model(rows()), copy.deepcopy(model)(rows())]


@program
def _no_rows_and_one_row_and_many(made: Any) -> Any:
    model = made(nn.Sequential(nn.Linear(D, 64), nn.SiLU(), nn.Linear(64, D)))
    return [step(model, rows(*shape)) for shape in ((0,), (1,), (2, 0), (2, 3, 4), (5,))] + [model(torch.randn(D))]


@program
def _moved_to_other_dtypes(made: Any) -> Any:
    model, found = made(MLP()), []
    for dtype in (torch.float32, torch.float64, torch.float32):
        model.zero_grad()
        found.append(step(model.to(dtype), rows().to(dtype)))
    return found


@program
def _cache_that_grows(made: Any) -> Any:
    def forward(self: Any, x: Tensor, past: Any = None) -> Any:
        k, v = self.k(x), self.v(x)
        if past is not None:
            k, v = torch.cat([past[0], k], 1), torch.cat([past[1], v], 1)
        return F.scaled_dot_product_attention(self.q(x), k, v), (k, v)

    model, past, found = made(Function(forward, **{name: nn.Linear(D, D) for name in "qkv"})), None, []
    with torch.no_grad():
        for _ in range(5):
            out, past = model(rows(2, 1), past)
            found.append(out)
    return [found, past]


@program
def _checkpointed_as_a_whole(made: Any) -> Any:
    model, x = made(MLP()), rows().requires_grad_()
    return [step(lambda_of(model, reentrant), x) for reentrant in (False, True)] + [x.grad]


def lambda_of(model: Any, reentrant: bool) -> Any:
    """A call of a model under a checkpoint, with the model's parameters."""
    call = Function(lambda self, x: checkpoint(model, x, use_reentrant=reentrant))
    call.parameters = model.parameters  # type: ignore[method-assign]
    return call


@program
def _a_buffer_and_a_number_that_change(made: Any) -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.calls += 1
        self.mean = 0.9 * self.mean + x.mean(0).detach()
        return self.a(self.norm(x) + self.mean) * self.calls

    model = Function(forward, a=nn.Linear(D, D), norm=nn.BatchNorm1d(D), calls=0)
    model.register_buffer("mean", torch.zeros(D))
    model = made(model)
    found = [step(model, rows()) for _ in range(3)]
    return [found, model.eval()(rows()), list(model.buffers()), torch.tensor(model.calls)]


@program
def _backwards_in_threads(made: Any) -> Any:
    model = made(MLP())
    losses = [model(rows(size)).square().sum() for size in (3, 4, 5)]
    threads = [threading.Thread(target=loss.backward) for loss in losses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [losses, [p.grad for p in model.parameters()]]


def tensors(found: Any) -> list[Tensor]:
    values = found.values() if isinstance(found, dict) else found if isinstance(found, list | tuple) else None
    if values is not None:
        return [tensor for value in values for tensor in tensors(value)]
    return [] if found is None else [found.detach()]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_does_with_an_engine_what_it_does_with_the_model(name: str) -> None:
    results = []
    for made in (lambda model: model, lambda model: dw.compile(model, precision="bf16", inductor=False)):
        torch.manual_seed(0)
        results.append(tensors(PROGRAMS[name](made)))
    eagers, ours = results
    assert len(eagers) == len(ours) > 0
    for got, want in zip(ours, eagers, strict=True):
        scale = max(1e-3, float(want.abs().max())) if want.numel() else 1.0
        torch.testing.assert_close(got, want, rtol=0, atol=2e-5 * scale)


def test_forward_mode_gradients_are_refused_and_named() -> None:
    from torch.autograd import forward_ad

    model, x = MLP(), rows()
    engine = dw.compile(model, precision="bf16", inductor=False)
    with forward_ad.dual_level(), pytest.raises(UnsupportedError, match=r"torch\.func\.jvp"):
        engine(forward_ad.make_dual(x, torch.ones_like(x)))
    for got, want in zip(*(torch.func.jvp(m, (x,), (x,)) for m in (engine, model)), strict=True):
        torch.testing.assert_close(got, want)
