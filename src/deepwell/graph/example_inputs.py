"""Example inputs for tracing: what to call a model with when the user gave nothing.

Token ids for language models, a float tensor of the width of the first layer for everything else. The sequence length
is a prime that no dimension of the model shares, so that later stages can tell the sequence axis from every other axis
by its size.
"""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from deepwell.errors import CaptureError, ConfigError

DEFAULT_BATCH = 2
PRIMES = (
    37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97, 101, 103, 107, 109, 113, 127, 31, 29, 23, 19, 17, 13, 11,
    7, 5,
)  # fmt: skip
CHUNK_MULTIPLE = 64
LONGEST = 4096  # no guessed input is longer: the trace would hold tensors of length squared
POSITION_LIMITS = (
    "max_position_embeddings", "n_positions", "max_target_positions", "max_seq_len", "max_sequence_length",
    "max_length_positions", "n_ctx", "block_size",
)  # fmt: skip
TARGET_NAMES = ("labels", "targets", "target")
PASS_HINT = "pass example_inputs (a tensor, a tuple of arguments or a dict of keyword arguments)"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleInputs:
    """The call `model(*args, **kwargs)` to trace, with the batch and sequence length it stands for."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    batch: int | None = None
    seq_len: int | None = None
    guessed: bool = False

    def named_tensors(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Every tensor of the call under the name of the forward parameter it goes to (`past.0` for nested ones)."""
        named: dict[str, torch.Tensor] = {}
        for name, value in self._bound(model):
            for path, leaf in torch.utils._pytree.tree_flatten_with_path(value)[0]:
                if isinstance(leaf, torch.Tensor):
                    suffix = "".join(
                        f".{getattr(key, 'idx', getattr(key, 'key', getattr(key, 'name', '')))}" for key in path
                    )
                    named[name + suffix] = leaf
        return named

    def _bound(self, model: nn.Module) -> Iterator[tuple[str, Any]]:
        positional = [
            p.name
            for p in inspect.signature(model.forward).parameters.values()
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        for i, value in enumerate(self.args):
            yield (positional[i] if i < len(positional) else f"arg{i}"), value
        yield from self.kwargs.items()


def resolve_inputs(model: nn.Module, example_inputs: Any, batch: int, seq_len: int | None) -> ExampleInputs:
    """The user's example inputs as a call, or guessed ones when `example_inputs` is None.

    Raises ConfigError for a type that is no call and CaptureError where nothing can be guessed.
    """
    if example_inputs is None:
        return guess_inputs(model, batch=batch, seq_len=seq_len)
    if isinstance(example_inputs, ExampleInputs):
        return example_inputs
    if isinstance(example_inputs, torch.Tensor):
        inputs = ExampleInputs(args=(example_inputs,))
    elif isinstance(example_inputs, Mapping):
        inputs = ExampleInputs(kwargs=dict(example_inputs))
    elif isinstance(example_inputs, (tuple, list)):
        inputs = ExampleInputs(args=tuple(example_inputs))
    else:
        raise ConfigError(
            f"example_inputs is a {type(example_inputs).__name__}; "
            "pass a tensor, a tuple of arguments or a dict of keyword arguments"
        )
    batch_seen, seq_seen = _batch_and_length(inputs.named_tensors(model))
    return ExampleInputs(args=inputs.args, kwargs=inputs.kwargs, batch=batch_seen, seq_len=seq_seen)


def _batch_and_length(tensors: Mapping[str, torch.Tensor]) -> tuple[int | None, int | None]:
    """Batch and sequence length of given inputs: of the token ids if there are any, else of the first tensor."""
    ids = [t for name, t in tensors.items() if name.endswith("input_ids") and t.dim() == 2]
    for tensor in ids + list(tensors.values()):
        if tensor.dim() >= 3 or (tensor.dim() == 2 and not tensor.is_floating_point()):
            return tensor.shape[0], tensor.shape[1]
        if tensor.dim() >= 1:
            return tensor.shape[0], None
    return None, None


def guess_inputs(model: nn.Module, *, batch: int = DEFAULT_BATCH, seq_len: int | None = None) -> ExampleInputs:
    """Inputs for a model that came without any.

    Models whose forward takes `input_ids` get token ids, and labels where it takes labels, so that the loss is traced
    too. Other modules get a tensor that fits their first layer. Raises CaptureError where that layer says nothing about
    the input.
    """
    parameters = inspect.signature(model.forward).parameters
    length = seq_len if seq_len is not None else distinctive_length(model, batch)
    if "input_ids" in parameters:
        return _token_inputs(model, "input_ids", batch, length)
    required = [
        p.name
        for p in parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if len(required) != 1:
        wanted = ", ".join(required) or "no argument that can be guessed"
        raise CaptureError(f"{type(model).__name__}.forward needs {wanted}: {PASS_HINT}")
    first = _first_layer(model)
    if isinstance(first, nn.Embedding):
        return _token_inputs(model, required[0], batch, length)
    tensor = _fitting_tensor(model, first, batch, length)
    return ExampleInputs(kwargs={}, args=(tensor,), batch=batch, seq_len=length, guessed=True)


def _token_inputs(model: nn.Module, name: str, batch: int, length: int) -> ExampleInputs:
    parameters = inspect.signature(model.forward).parameters
    vocab = _vocabulary(model)
    device = _device(model)
    # Two draws: one tensor passed twice would be a single placeholder, and labels could not be distinguished from ids.
    kwargs: dict[str, Any] = {name: _tokens(vocab, batch, length, device, seed=0)}
    target = next((t for t in TARGET_NAMES if t in parameters), None)
    if target is not None:
        kwargs[target] = _tokens(vocab, batch, length, device, seed=1)
    if "use_cache" in parameters:
        # Training keeps no key-value cache; with one, every layer would add its cache tensors to the outputs.
        kwargs["use_cache"] = False
    return ExampleInputs(kwargs=kwargs, batch=batch, seq_len=length, guessed=True)


def _tokens(vocab: int, batch: int, length: int, device: torch.device, *, seed: int) -> torch.Tensor:
    if device.type == "meta":
        return torch.empty(batch, length, dtype=torch.long, device=device)
    generator = torch.Generator().manual_seed(seed)  # its own generator: the user's random state stays as it was
    return torch.randint(0, vocab, (batch, length), generator=generator).to(device)


def _vocabulary(model: nn.Module) -> int:
    """The smallest table that token ids may index: one wrong id is an index error on a real device."""
    getter = getattr(model, "get_input_embeddings", None)
    try:
        table = getter() if callable(getter) else _first_layer(model)
    except NotImplementedError:  # a model of two towers, as CLIP is, need not say which of its tables is the one
        table = next((module for module in model.modules() if isinstance(module, nn.Embedding)), None)
    rows = getattr(table, "num_embeddings", None) or getattr(getattr(table, "weight", None), "shape", (0,))[0]
    config_rows = getattr(getattr(model, "config", None), "vocab_size", None)
    known = [n for n in (rows, config_rows) if isinstance(n, int) and n > 0]
    if not known:
        raise CaptureError(f"{type(model).__name__} shows no vocabulary size: {PASS_HINT}")
    return min(known)


def _fitting_tensor(model: nn.Module, first: nn.Module | None, batch: int, length: int) -> torch.Tensor:
    shape: tuple[int, ...]
    if isinstance(first, (nn.Linear, nn.Bilinear)):
        shape = (batch, length, first.in_features if isinstance(first, nn.Linear) else first.in1_features)
    elif isinstance(first, (nn.LayerNorm, nn.RMSNorm)):
        shape = (batch, length, *first.normalized_shape)
    elif isinstance(first, nn.MultiheadAttention):
        shape = (batch, length, first.embed_dim)
    elif isinstance(first, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        shape = (batch, first.in_channels, *([length] * len(first.kernel_size)))
    else:
        found = "has no layer with weights" if first is None else f"begins with {type(first).__name__}"
        raise CaptureError(f"the input of {type(model).__name__} cannot be guessed, it {found}: {PASS_HINT}")
    dtype = next((p.dtype for p in first.parameters() if p.dtype.is_floating_point), torch.get_default_dtype())
    device = _device(model)
    if device.type == "meta":
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device=device, dtype=dtype)


def _first_layer(model: nn.Module) -> nn.Module | None:
    """The first module in definition order that holds parameters of its own."""
    return next((m for m in model.modules() if next(m.parameters(recurse=False), None) is not None), None)


def _device(model: nn.Module) -> torch.device:
    tensor = next(model.parameters(), next(model.buffers(), None))
    return torch.device("cpu") if tensor is None else tensor.device


def distinctive_length(model: nn.Module, batch: int) -> int:
    """A prime that fits the model's positions and equals no dimension of it, alone or times the batch."""
    taken = {size for tensor in (*model.parameters(), *model.buffers()) for size in tensor.shape}
    config = getattr(model, "config", None)
    taken |= {v for v in getattr(config, "__dict__", {}).values() if isinstance(v, int) and not isinstance(v, bool)}
    limit = min(_position_limits(config), default=max(PRIMES))
    fitting = [p for p in PRIMES if p <= limit]
    for prime in fitting:
        if not taken & {prime, prime - 1, prime + 1, batch * prime}:
            return prime
    if not fitting:
        return max(1, limit)
    return fitting[0]


def other_lengths(model: nn.Module, inputs: ExampleInputs) -> Iterator[ExampleInputs]:
    """Guessed inputs with lengths that a prime cannot serve: a multiple of usual chunk sizes, the full positions."""
    if not inputs.guessed:
        return
    limit = min(_position_limits(getattr(model, "config", None)), default=CHUNK_MULTIPLE)
    for length in sorted({min(CHUNK_MULTIPLE, limit), min(limit, LONGEST)} - {inputs.seq_len}):
        yield guess_inputs(model, batch=inputs.batch or DEFAULT_BATCH, seq_len=length)


def _position_limits(config: Any) -> list[int]:
    configs = [config, getattr(config, "text_config", None), getattr(config, "decoder", None)]
    values = [getattr(c, name, None) for c in configs if c is not None for name in POSITION_LIMITS]
    return [v for v in values if isinstance(v, int) and not isinstance(v, bool) and v > 0]
