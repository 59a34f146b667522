"""Write the checkpoint of a model with its adapter merged, as vLLM reads it: config, shards, index."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from proxy.artifacts.checkpoint import MODEL_CONFIG
from proxy.errors import SettingsError
from trainer_client.errors import UnservableError
from trainer_client.merging.layers import merged_tensors, plain_class
from trainer_client.merging.names import in_checkpoint
from trainer_client.merging.shards import Shards
from trainer_client.progress import Progress, Tell, tell_nobody


def merge(
    model: Any,
    folder: Path | None,
    *,
    adapter: str,
    dtype: str | None,
    max_shard_bytes: int,
    tell: Tell = tell_nobody,
) -> list[Path]:
    """Write `adapter` of a PeftModel, merged into its base model, into `folder`, and return the files, config first.

    A collective if the model is sharded: every rank calls it, rank 0 with a folder and the others with None. Rank 0
    goes on with the others after an error, so that none of them waits for ever. The model does not change. `dtype` is
    the checkpoint's, None for the model's own. Raises UnservableError for what has no checkpoint that vLLM could read
    in place of the base model's, SettingsError for an unknown dtype.
    """
    base = model.get_base_model()
    _refuse(base)
    kind = model.peft_config[adapter]
    if kind.is_prompt_learning:
        raise UnservableError(f"{kind.peft_type.value} adds tokens and no weights, so that there is nothing to merge")
    wanted = _dtype(dtype)
    tensors = merged_tensors(base, adapter=adapter, dtype=wanted, keep=folder is not None)
    if folder is None:
        _go_through(tensors)
        return []
    total = sum(tensor.numel() * (wanted or tensor.dtype).itemsize for tensor in base.parameters())
    try:
        shards = Shards(folder, max_bytes=max_shard_bytes)
        for name, tensor in in_checkpoint(base, tensors):
            shards.add(name, tensor)
            tell(Progress("merging into the base model", min(shards.bytes, total), total))
        config = folder / MODEL_CONFIG
        config.write_text(_config(base, wanted or base.dtype))
        return [config, *shards.finish()]
    except Exception as error:
        _go_through(tensors)
        if isinstance(error, NotImplementedError):
            raise UnservableError(f"peft cannot merge {kind.peft_type.value} as it is set: {error}") from error
        raise


def _refuse(base: Any) -> None:
    if getattr(base, "is_quantized", False) or getattr(base, "hf_quantizer", None) is not None:
        raise UnservableError("the base model is quantized, and what is merged into it is not; load it unquantized")
    for name, tensor in base.named_parameters():
        if tensor.is_meta or hasattr(tensor, "ds_id"):
            where = "with DeepSpeed ZeRO" if hasattr(tensor, "ds_id") else "offloaded (on the meta device)"
            raise UnservableError(f"{name} is {where}, and cannot be gathered for a merge; shard with FSDP2 instead")


def _dtype(name: str | None) -> torch.dtype | None:
    dtype = getattr(torch, name.removeprefix("torch."), None) if name else None
    if name and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise SettingsError(f"dtype {name!r} is no floating type of torch; give one like 'bfloat16'.")
    return dtype


def _config(base: Any, dtype: torch.dtype) -> str:
    config = copy.deepcopy(base.config)
    config.architectures = [plain_class(base).__name__]
    config.dtype = str(dtype).removeprefix("torch.")
    return str(config.to_json_string(use_diff=True))


def _go_through(tensors: Iterable[object]) -> None:
    for _ in tensors:
        pass
