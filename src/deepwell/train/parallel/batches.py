"""What a rank reads of its samples: context parallelism splits their sequences, tensor parallelism what is predicted.

Labels are shifted before they are split: the last token of one part predicts the first of the next.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from deepwell.errors import ConfigError, UnsupportedError
from deepwell.train.feed import Batch, shifted
from deepwell.train.parallel.mesh import Meshes


def part_of(batch: Batch, meshes: Meshes, model: nn.Module) -> Batch:
    """This rank's part: of cp, a part of every sequence; of tp, all its tokens and a part of their labels.

    Raises ConfigError and UnsupportedError where it cannot be split for the model.
    """
    layout, ranks = meshes.layout, meshes.ranks
    has_router_loss = getattr(getattr(model, "config", None), "output_router_logits", False)
    if layout.tp > 1 and has_router_loss and "attention_mask" in batch:
        raise UnsupportedError(
            "tp: the batch has an attention_mask, and output_router_logits=True adds a loss of routers that masks "
            "whole sequences, of which a rank of tp routes a part; leave out the mask (pack the sequences), or the loss"
        )
    if layout.cp > 1:
        batch = split_context(batch, layout.cp, ranks.get_local_rank("cp"))
    return split_labels(batch, layout.tp, ranks.get_local_rank("tp")) if layout.tp > 1 else batch


def split_context(batch: Batch, cp: int, rank: int) -> dict[str, Tensor]:
    """The part of a batch that one of `cp` ranks reads: input_ids, position_ids, shift_labels.

    Raises ConfigError where sequences do not divide, UnsupportedError where a batch has a mask of its own.
    """
    if "input_ids" not in batch:
        raise ConfigError(f"cp: the batch has {', '.join(batch)} and no input_ids")
    tokens = batch["input_ids"]
    length = tokens.shape[1]
    if length % cp:
        raise ConfigError(f"sequences of {length} tokens cannot be split over cp {cp}; their length must divide")
    mask, positions = batch.get("attention_mask"), batch.get("position_ids")
    if mask is not None and not bool(mask.all()):
        raise UnsupportedError("cp: the batch has an attention_mask with padding; pack the sequences, or leave cp at 1")
    whole = torch.arange(length, device=tokens.device).expand_as(tokens)
    if positions is not None and not torch.equal(positions.expand_as(tokens), whole):
        raise UnsupportedError("cp: position_ids restart at documents, and masks of documents are not split; "
                               "leave cp at 1, or the documents unmasked")  # fmt: skip
    labels = batch["shift_labels"] if "shift_labels" in batch else shifted(batch.get("labels", tokens))
    given = {"input_ids": tokens, "position_ids": whole, "shift_labels": labels}
    return {name: value.chunk(cp, dim=1)[rank].contiguous() for name, value in given.items()}


def split_labels(batch: Batch, tp: int, rank: int) -> Batch:
    """The part of a batch's labels that one of `tp` ranks predicts; every rank reads all tokens."""
    labels = batch["shift_labels"] if "shift_labels" in batch else shifted(batch.get("labels", batch["input_ids"]))
    if labels.shape[1] % tp:
        raise ConfigError(
            f"the batch has {labels.shape[1]} tokens a row, which tp {tp} does not divide; take another seq_len"
        )
    mine = labels.chunk(tp, 1)[rank].contiguous()
    return {**{key: value for key, value in batch.items() if key != "labels"}, "shift_labels": mine}
