"""What is written of a model, and by which names: those of its own checkpoint, which the servers have read."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from transformers.core_model_loading import revert_weight_conversion

from trainer_client.errors import UnservableError

_BLOCK = re.compile(r".*?\.\d+\.|")
"""How the names of one layer begin: up to the first number in them."""

Tensors = Iterable[tuple[str, torch.Tensor]]


def in_checkpoint(model: Any, tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what a checkpoint of `model` holds, under its names there. One layer at a time is in memory.

    Raises UnservableError, in the end, if tensors that the servers tie have become different.
    """
    ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
    kept = ((name, tensor) for name, tensor in _untied(model, tensors) if name not in ignored)
    for _, block in itertools.groupby(kept, key=_block_of):
        # several tensors of a layer may be one in the checkpoint, and one may be several: experts, for instance
        yield from revert_weight_conversion(model, dict(block)).items()


def _block_of(named: tuple[str, torch.Tensor]) -> str:
    found = _BLOCK.match(named[0])
    return found[0] if found else ""


def _untied(model: Any, tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    """Leave out what is tied to another tensor, as checkpoints do."""
    tied: dict[str, str] = model.all_tied_weights_keys
    digests: dict[str, str] = {}
    for name, tensor in tensors:
        if name in tied or name in tied.values():
            digests[name] = hashlib.sha256(tensor.view(torch.uint8).numpy()).hexdigest()
        if name not in tied:
            yield name, tensor
    for name, source in tied.items():
        if name in digests and digests[name] != digests.get(source):
            raise UnservableError(
                f"{name} and {source} are one tensor in the base model, and so on the servers, but the adapter has "
                "made them two: train both as one (ensure_weight_tying=True in the LoraConfig), or neither"
            )
