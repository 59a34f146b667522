"""Merge an adapter into its base model tensor by tensor, without touching the model that is being trained.

peft's own layers do it: each is copied with its tensors whole, on the CPU and in float32, and the copy merges itself.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

from trainer_client.collective import whole


def merged_tensors(
    model: Any, *, adapter: str, dtype: torch.dtype | None, keep: bool, prefix: str = ""
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of the base model, `adapter` merged into it, by the base model's own names.

    `model` is the base model with peft's layers in it. Tensors are whole and on the CPU, floating ones in `dtype`
    (None: as they are). A collective if the model is sharded: every rank goes through it, and those that do not `keep`
    are given nothing.
    """
    if isinstance(model, ModulesToSaveWrapper):
        model = dict(model.modules_to_save.items()).get(adapter, model.original_module)
    if isinstance(model, BaseTunerLayer | AuxiliaryTrainingWrapper):
        yield from _merged_layer(model, adapter, dtype, keep, prefix)
        return
    for name, tensor in _own_tensors(model):
        full = whole(tensor)
        if keep:
            yield prefix + name, _as(dtype, full)
    for name, child in model.named_children():
        yield from merged_tensors(child, adapter=adapter, dtype=dtype, keep=keep, prefix=f"{prefix}{name}.")


def _merged_layer(
    layer: Any, adapter: str, dtype: torch.dtype | None, keep: bool, prefix: str
) -> Iterator[tuple[str, torch.Tensor]]:
    base = layer.token_adapter if isinstance(layer, AuxiliaryTrainingWrapper) else layer
    before = {name: tensor.dtype for name, tensor in base.get_base_layer().state_dict().items()}
    copied = _copied(layer, keep)
    if copied is None:
        return
    if hasattr(copied, "unload_and_optionally_merge_module"):
        plain = copied.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=[adapter])
    else:
        copied.merge(safe_merge=False, adapter_names=[adapter])
        plain = copied.get_base_layer()
    for name, tensor in plain.state_dict().items():
        yield prefix + name, _as(dtype or before[name], tensor)


def _copied(layer: Any, keep: bool) -> Any:
    """Return a copy of a layer with whole tensors in float32, or None for a rank that only helps to gather them.

    Whatever wraps the layer for a distributed training stays behind: FSDP2's class and hooks cannot be copied.
    """
    memo: dict[int, Any] = {}
    for module in layer.modules():
        for _, tensor in _own_tensors(module, persistent_only=False):
            full = whole(tensor)
            if keep and id(tensor) not in memo:
                full = full.to(torch.float32 if full.is_floating_point() else full.dtype, copy=True)
                memo[id(tensor)] = torch.nn.Parameter(full, False) if isinstance(tensor, torch.nn.Parameter) else full
    if not keep:
        return None
    for module in reversed(list(layer.modules())):  # children first: parents find them copied
        bare = memo[id(module)] = object.__new__(plain_class(module))
        kept = {name: value for name, value in vars(module).items() if not _belongs_to_training(name)}
        vars(bare).update(copy.deepcopy(kept, memo))
        vars(bare).update({name: OrderedDict() for name in vars(module) if _is_hooks(name)})
    return memo[id(layer)]


def plain_class(module: Any) -> Any:
    """Return the class that a module had before FSDP2 gave it one of its own."""
    from torch.distributed.fsdp import FSDPModule

    return next(kind for kind in type(module).__mro__ if not issubclass(kind, FSDPModule))


def _own_tensors(module: Any, *, persistent_only: bool = True) -> Iterator[tuple[str, Any]]:
    hidden = module._non_persistent_buffers_set if persistent_only else ()
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None and name not in hidden:
            yield name, tensor


def _is_hooks(name: str) -> bool:
    return name.startswith("_") and "_hooks" in name


def _belongs_to_training(name: str) -> bool:
    """Whether an attribute was put on the module by torch's or accelerate's wrappers: their hooks and state."""
    return "hook" in name or name.startswith("__composable") or name in ("forward", "_old_forward")


def _as(dtype: torch.dtype | None, tensor: torch.Tensor) -> torch.Tensor:
    if dtype is not None and tensor.is_floating_point():
        tensor = tensor.to(dtype)
    return tensor.detach().contiguous()
