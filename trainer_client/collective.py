"""Weights that are sharded over several processes: gather them, and let every process learn the same outcome.

The only module that knows torch.distributed. It imports torch only where the caller's own tensors are torch's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, TypeVar

Value = TypeVar("Value")


def is_sharded(tensors: Iterable[Any]) -> bool:
    """Tell whether some tensor is a DTensor, as FSDP2 makes them, of which this process holds but a part."""
    return any(_is_dtensor(tensor) for tensor in tensors)


def is_first() -> bool:
    """Tell whether this process is rank 0, or alone."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return True
    return int(torch.distributed.get_rank()) == 0


def whole(tensor: Any) -> Any:
    """Return a tensor whole and on the CPU. A collective for a DTensor: every rank calls it, and in the same order."""
    if not _is_dtensor(tensor):
        return tensor.detach().cpu()
    mesh_device = tensor.device_mesh.device_type
    if tensor.device.type != mesh_device:  # shards offloaded to the CPU: the group can talk on its own device alone
        tensor = tensor.to(mesh_device)
    return tensor.full_tensor().detach().cpu()


def share(value: Value) -> Value:
    """Return rank 0's value on every rank. A collective of the default group, over pickle."""
    import torch.distributed

    box = [value]
    torch.distributed.broadcast_object_list(box, src=0)
    return box[0]


def _is_dtensor(tensor: Any) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor) and tensor.device_mesh.size() > 1
