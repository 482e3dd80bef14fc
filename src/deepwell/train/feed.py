"""How a model takes a batch of tokens and gives its loss.

A batch is a dict of tensors: `input_ids`, and what is to be predicted: `labels` (as Hugging Face takes them: the label
of a token is the token itself, the model shifts) or `shift_labels` (already shifted: the label of a token is the next
one); -100 is not predicted. Others (`position_ids`, `attention_mask`) reach models that have an argument of that name.

    feed = Feed(model)
    loss = feed(engine, batch)        # the mean over the batch's predicted tokens, differentiable
    items = count_items(batch)        # how many those are

A step's loss is the sum over all its tokens divided by their number: each micro-batch counts by its share of them,
which is exact however many tokens are left out where.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepwell.errors import ConfigError

IGNORED = -100
Batch = Mapping[str, Tensor]
# A loss of the user's own: the mean over the batch's predicted tokens.
LossFunction = Callable[[nn.Module, Batch], Tensor]


def count_items(batch: Batch) -> int:
    """How many tokens of a batch are predicted. Waits for the device where the batch lies on one."""
    if "shift_labels" in batch:
        return int((batch["shift_labels"] != IGNORED).sum())
    labels = batch.get("labels", batch.get("input_ids"))
    if labels is None:
        return len(next(iter(batch.values()))) if batch else 0
    return int((labels[:, 1:] != IGNORED).sum())


def count_tokens(batch: Batch) -> int:
    """Tokens that the model reads."""
    ids = batch.get("input_ids", batch.get("inputs_embeds"))
    return 0 if ids is None else int(ids.shape[0] * ids.shape[1])


def vocabulary_of(model: nn.Module) -> int | None:
    """How many tokens a model knows; None where it does not say which of its embeddings is theirs."""
    found = getattr(model, "get_input_embeddings", lambda: None)()
    weight = getattr(found, "weight", None)
    return None if not isinstance(weight, Tensor) else weight.shape[0]


def check_tokens(batch: Batch, vocabulary: int | None) -> None:
    """Raise ConfigError for a token that the model does not know: on a GPU it would end the process without a word."""
    if vocabulary is None or "input_ids" not in batch or batch["input_ids"].is_cuda:
        return
    least, most = (int(value) for value in batch["input_ids"].aminmax())
    if least < 0 or most >= vocabulary:
        found = least if least < 0 else most
        raise ConfigError(
            f"data: token {found} of the batch is none of the model's {vocabulary} (0 to {vocabulary - 1})"
        )


def shifted(labels: Tensor) -> Tensor:
    """The label of each token is the next one; the last token of a row predicts nothing."""
    return F.pad(labels, (0, 1), value=IGNORED)[:, 1:].contiguous()


def targets_of(batch: Batch) -> Tensor:
    """The label of each token, shifted."""
    if "shift_labels" in batch:
        return batch["shift_labels"]
    return shifted(batch.get("labels", batch["input_ids"]))


class Feed:
    """Calls a model with a batch. `loss` replaces the model's own: it takes (engine, batch)."""

    def __init__(self, model: nn.Module, loss: LossFunction | None = None) -> None:
        self.own_loss = loss
        parameters = inspect.signature(model.forward).parameters.values()
        names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self.names = tuple(names)
        self.takes_any = any(p.kind == p.VAR_KEYWORD for p in parameters)
        self.takes_labels = "labels" in names
        required = [p for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
        targets = [name for name in names[1:2] if re.match(r"(targets?|labels?|y)(_|$)", name)]
        # model(tokens, targets) -> loss, as small codebases write it.
        self.takes_targets = not self.takes_labels and (bool(targets) or len(required) == 2)

    def __call__(self, engine: nn.Module, batch: Batch) -> Tensor:
        """The mean loss of the batch's predicted tokens."""
        if self.own_loss is not None:
            return _scalar(self.own_loss(engine, batch), "the loss function")
        if self.takes_labels:
            return _scalar(engine(**self.keywords(batch)), "the model")
        if "input_ids" not in batch:
            raise ConfigError(f"the batch has {', '.join(batch)} and no input_ids")
        tokens, targets = batch["input_ids"], targets_of(batch)
        if self.takes_targets:
            return _scalar(engine(tokens, targets), "the model")
        logits = engine(tokens)
        logits = getattr(logits, "logits", logits)
        if not isinstance(logits, Tensor) or logits.dim() != 3:
            raise ConfigError(
                "the model takes no labels and returns no [batch, tokens, vocabulary] logits; pass loss=, a function "
                "of (engine, batch) that returns the mean loss"
            )
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED)

    def keywords(self, batch: Batch) -> dict[str, Any]:
        """The keyword arguments of a model that computes its loss from `labels`."""
        given = dict(batch)
        if "shift_labels" in given:
            given["labels"] = given["shift_labels"]
        elif "labels" not in given:
            given["labels"] = given["input_ids"]
        extra = {"shift_labels"} if self.takes_any else set()
        found: dict[str, Any] = {k: v for k, v in given.items() if k in self.names or k in extra}
        if "use_cache" in self.names:
            found.setdefault("use_cache", False)  # nobody reads a key-value cache beside a loss
        if "shift_labels" in given and "shift_labels" not in found:
            raise ConfigError("the batch has shift_labels and the model takes none; give labels, which it shifts")
        return found


def _scalar(out: Any, who: str) -> Tensor:
    loss = getattr(out, "loss", None)
    if loss is None and isinstance(out, Mapping):
        loss = out.get("loss")
    if loss is None:
        loss = out[0] if isinstance(out, (tuple, list)) and out else out
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ConfigError(f"{who} returned {what} where a loss of one number is needed; pass loss=")
    return loss.reshape(()) if loss.dim() else loss


def to_device(batch: Batch, device: torch.device) -> dict[str, Tensor]:
    """The batch on the device; from pinned memory without waiting where that is a GPU."""
    if device.type != "cuda":
        return dict(batch)
    return {
        name: (value if value.is_cuda else value.pin_memory()).to(device, non_blocking=True)
        for name, value in batch.items()
    }
