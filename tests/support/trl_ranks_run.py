"""One rank of a stand-in TRL trainer whose syncs are publications; its model is peft's, sharded by FSDP2 or whole.

Started once per rank by `tests/vllm/test_trl_ranks.py`, with torch.distributed's environment.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.peft_models import step_of_training, tiny_peft_model
from tests.support.trl_trainers import AsyncGRPOTrainer
from trainer_client import LoraSyncError, TrainerClient
from trainer_client.integrations.trl import use

MAX_STALENESS = 8


def main() -> None:
    """Make five syncs and end, and write down what each told."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--sharded", action="store_true")
    parser.add_argument("--background", action="store_true")
    asked = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    trainer = AsyncGRPOTrainer(max_staleness=MAX_STALENESS)
    trainer.model = model = tiny_peft_model()
    trainer.accelerator.num_processes = dist.get_world_size()
    if rank > 0:
        trainer.accelerator.is_main_process, trainer.rollout_worker = False, None
    if asked.sharded:
        for layer in model.base_model.model.model.layers:
            fully_shard(layer)
        fully_shard(model)

    client = TrainerClient(asked.url, store=asked.output / "store", run="ranks", max_staleness=MAX_STALENESS)
    use(trainer, client, wait=not asked.background)
    told = []
    for sync in range(5):
        told.append(_tell(trainer._sync_weight))
        step_of_training(model, seed=10 * sync + (rank if asked.sharded else 0))
        trainer.state.global_step += 1
    told.append(_tell(lambda: trainer._call("on_train_end")))
    try:
        client.close()
    except LoraSyncError as error:
        print(f"told again: {error}")
    seen: dict[str, Any] = {"told": told}
    if rank == 0:
        seen |= {"version": trainer.model_version, "workers": trainer.rollout_worker.told}
    (asked.output / f"rank-{rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


def _tell(call: Callable[[], None]) -> str:
    try:
        call()
    except LoraSyncError as error:
        return type(error).__name__
    return "fine"


if __name__ == "__main__":
    main()
