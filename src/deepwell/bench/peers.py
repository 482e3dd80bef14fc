"""The peers of the race: PyTorch itself, torchao's FP8 training and Liger, each as its makers would run it.

A peer that is not installed, or has no such op, raises UnsupportedError with a line that says so; the table keeps the
line in place of a time.
"""

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from deepwell.bench.llama import MLP, Llama, RMSNorm
from deepwell.errors import ConfigError, UnsupportedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A way to run the model without Deepwell: `build` takes the model and gives what a step calls."""

    name: str
    about: str
    build: Callable[[nn.Module], Callable[..., Any]]
    uses_fp8: bool = False


def _eager(model: nn.Module) -> Callable[..., Any]:
    return model


def _compiled(model: nn.Module, mode: str | None = None) -> Callable[..., Any]:
    return torch.compile(model, mode=mode)


def _torchao(recipe: str) -> Callable[[nn.Module], Callable[..., Any]]:
    def build(model: nn.Module) -> Callable[..., Any]:
        float8 = _need("torchao.float8", "torchao")
        config = float8.Float8LinearConfig.from_recipe_name(recipe)

        def is_lowered(module: nn.Module, name: str) -> bool:
            """The head stays in bf16, as torchao advises and as Deepwell's recipes do."""
            return isinstance(module, nn.Linear) and name.rpartition(".")[2] not in ("head", "lm_head")

        float8.convert_to_float8_training(model, config=config, module_filter_fn=is_lowered)
        return torch.compile(model)

    return build


def _liger(model: nn.Module, how: Callable[[nn.Module], Callable[..., Any]] = _eager) -> Callable[..., Any]:
    """Liger's RMSNorm, SwiGLU and fused head and loss; on a Hugging Face model also its RoPE, by its own patch."""
    if not isinstance(model, Llama):
        liger = _need("liger_kernel.transformers", "liger-kernel")
        return _patched_apart(model, lambda: liger.apply_liger_kernel_to_llama(model=model), how)
    norm = _need("liger_kernel.transformers.rms_norm", "liger-kernel").LigerRMSNorm
    silu_mul = _need("liger_kernel.ops.swiglu", "liger-kernel").LigerSiLUMulFunction
    fused_loss = _need("liger_kernel.transformers", "liger-kernel").LigerFusedLinearCrossEntropyLoss()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, RMSNorm):
                replacement = norm(child.weight.shape[0], eps=child.eps).to(child.weight)
                replacement.weight = child.weight
                setattr(parent, name, replacement)
            elif isinstance(child, MLP):
                child.__dict__["forward"] = _liger_mlp(child, silu_mul)
    return how(_LigerLlama(model, fused_loss))


def _patched_apart(
    model: nn.Module, patch: Callable[[], None], how: Callable[[nn.Module], Callable[..., Any]]
) -> Callable[..., Any]:
    """The model after a patch that also renames things in its source's module: there only while this model is called.

    Else models that are built later, and graphs that were compiled before, would run the peer's kernels too.
    """
    home = sys.modules[type(model).__module__]
    before = dict(vars(home))
    patch()
    names = {name: value for name, value in vars(home).items() if before.get(name, value) is not value}
    for name in names:
        setattr(home, name, before[name])
    run = how(model)

    def call(*args: Any, **kwargs: Any) -> Any:
        with _renamed(home, names):
            return run(*args, **kwargs)

    return call


@contextmanager
def _renamed(home: ModuleType, names: Mapping[str, Any]) -> Iterator[None]:
    before = {name: getattr(home, name) for name in names}
    try:
        for name, value in names.items():
            setattr(home, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(home, name, value)


def _liger_mlp(mlp: MLP, silu_mul: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: mlp.down_proj(silu_mul.apply(mlp.gate_proj(x), mlp.up_proj(x)))


class _LigerLlama(nn.Module):
    """The plain decoder with Liger's head and loss."""

    def __init__(self, model: Llama, fused_loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model, self.fused_loss = model, fused_loss

    def forward(self, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        hidden = self.model.hidden_states(tokens_BS)
        return self.fused_loss(self.model.head.weight, hidden.flatten(0, 1), targets_BS.flatten())


def _need(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UnsupportedError(f"{package} is not installed here ({error}): pip install {package}") from error


PEERS = {
    name: Peer(name=name, about=about, build=build, uses_fp8=name.startswith("torchao"))
    for name, about, build in (
        ("eager", "PyTorch, not compiled", _eager),
        ("torch", "torch.compile, default", _compiled),
        (
            "torch-max",
            "torch.compile, max-autotune without CUDA graphs",
            partial(_compiled, mode="max-autotune-no-cudagraphs"),
        ),
        ("torch-max-cg", "torch.compile, max-autotune", partial(_compiled, mode="max-autotune")),
        ("torchao", "torchao tensorwise, compiled", _torchao("tensorwise")),
        ("torchao-row", "torchao rowwise, compiled", _torchao("rowwise")),
        ("torchao-row-gw", "torchao rowwise, weight gradients in bf16, compiled", _torchao("rowwise_with_gw_hp")),
        ("liger", "Liger kernels, not compiled", _liger),
        ("liger-compiled", "Liger kernels, the rest by torch.compile", partial(_liger, how=_compiled)),
    )
}


def parse_peers(names: str) -> tuple[Peer, ...]:
    """Peers from a comma-separated list; empty for an empty one. Raises ConfigError where one is not known."""
    found = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in found if name not in PEERS]
    if unknown:
        raise ConfigError(f"--peers: {', '.join(unknown)} is not known; peers are {', '.join(PEERS)}")
    return tuple(PEERS[name] for name in dict.fromkeys(found))
