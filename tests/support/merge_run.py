"""One rank of a training that FSDP2 shards over CPU processes: it publishes merged, and writes down what it was told.

Started once per rank by `tests/vllm/test_merge_fsdp.py`, with torch.distributed's environment.
"""

from __future__ import annotations

import argparse
import copy
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.support.peft_models import step_of_training, tiny_peft_model
from trainer_client import LoraSyncError, Merging, TrainerClient
from trainer_client.merging import merge as merging
from trainer_client.merging.shards import Shards

LORA: dict[str, Any] = {"use_dora": True, "modules_to_save": ["lm_head"], "target_modules": ["q_proj", "down_proj"]}


def main() -> None:
    """Run the story of the test."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    model = tiny_peft_model(**LORA)
    alone = copy.deepcopy(model)
    for layer in model.base_model.model.model.layers:
        fully_shard(layer.self_attn.q_proj)  # a layer of peft's itself, as wrapping by size does it
        fully_shard(layer)
    fully_shard(model)
    step_of_training(alone, seed=1)
    step_of_training(model, seed=1)  # the same data on every rank, so that one process can do the same
    if rank == 0:
        alone.merge_and_unload().save_pretrained(arguments.output / "expected")

    told: dict[str, Any] = {}
    with TrainerClient(
        arguments.url,
        store=arguments.output / "store",
        run="fsdp",
        max_staleness=1,
        keep_every=1,
        on_unservable="merge",
        merging=Merging(max_shard_bytes=20_000),
    ) as client:
        told["first"] = _tell(client, model, 1)
        told["again"] = _tell(client, model, 1)
        step_of_training(model, seed=2)
        with patch.object(merging, "Shards", FullDisk) if rank == 0 else nullcontext():
            told["full"] = _tell(client, model, 2)
        told["second"] = _tell(client, model, 2)
        step_of_training(model, seed=3)
        told["rewind"] = _tell(client, model, 1)
        told["background"] = type(client.publish(model, step=3, wait=False)).__name__
    told["current"] = client.current.name if client.current else None
    (arguments.output / f"rank-{rank}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


def _tell(client: TrainerClient, model: Any, step: int) -> dict[str, Any]:
    try:
        policy = client.publish(model, step=step)
    except LoraSyncError as error:
        return {"error": type(error).__name__, "text": str(error)}
    return {"policy": policy.name, "model": policy.model}


class FullDisk(Shards):
    """The first tensor finds no room."""

    def add(self, name: str, tensor: Any) -> None:
        """Fail."""
        raise OSError(28, "No space left on device")


if __name__ == "__main__":
    main()
