"""A weight-transfer backend for vLLM without a GPU: its NCCL backend, with gloo in NCCL's place.

vLLM finds it as a plugin when this folder is on PYTHONPATH. It takes what the NCCL backend takes (master_address,
master_port, rank_offset, world_size; names, dtype_names, shapes), so whoever drives it sends what TRL sends.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

TIMEOUT = timedelta(seconds=60)


def register() -> None:
    """Make the backend known to vLLM under the name `gloo`."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    WeightTransferEngineFactory.register_engine("gloo", "gloo_transfer_engine", "GlooWeightTransferEngine")


@dataclass
class Group:
    """One group of processes, apart from any that torch.distributed has."""

    group: Any

    @classmethod
    def join(cls, address: str, port: int, *, rank: int, world_size: int) -> Group:
        """Join the group of `world_size` processes whose store rank 0 opens at `address`. Waits for all of them."""
        import torch.distributed as dist

        store = dist.TCPStore(address, port, world_size, is_master=rank == 0, timeout=TIMEOUT)
        return cls(dist.ProcessGroupGloo(dist.PrefixStore("weights", store), rank, world_size, TIMEOUT))

    def broadcast(self, tensor: Any) -> None:
        """Send a tensor from rank 0, or receive it there."""
        import torch.distributed as dist

        options = dist.BroadcastOptions()
        options.rootRank = 0
        self.group.broadcast([tensor], options).wait()
