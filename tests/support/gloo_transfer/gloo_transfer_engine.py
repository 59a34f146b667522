"""The worker's side of `gloo_transfer`, imported by vLLM when it is asked for."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from gloo_transfer import Group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)


@dataclass
class GlooInitInfo(WeightTransferInitInfo):
    """As the NCCL backend's."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    packed: bool = False


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):
    """As the NCCL backend's: what will be broadcast, in order."""

    names: list[str] = field(default_factory=list)
    dtype_names: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)


class GlooWeightTransferEngine(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    """Receives a checkpoint's tensors from rank 0."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        rank = self.parallel_config.rank + init_info.rank_offset
        self._group = Group.join(
            init_info.master_address, init_info.master_port, rank=rank, world_size=init_info.world_size
        )

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        for name, dtype, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            self._group.broadcast(tensor)
            self.model.load_weights([(name, tensor)])

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        self._group = None
