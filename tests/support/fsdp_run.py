"""One rank of a training that FSDP2 shards over CPU processes: it publishes, and writes down what it was told.

Started once per rank by `tests/vllm/test_publish_fsdp.py`, with torch.distributed's environment.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from tests.support.peft_models import step_of_training, tiny_peft_model
from trainer_client import EarlierPublishError, LoraSyncError, Policy, TrainerClient


def main() -> None:
    """Run the story of the test."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    model = tiny_peft_model()
    if rank == 0:
        model.save_pretrained(arguments.output / "expected-1")
    for layer in model.base_model.model.model.layers:
        fully_shard(layer)
    fully_shard(model)

    with TrainerClient(arguments.url, store=arguments.output / "store", run="fsdp", max_staleness=8) as client:
        told: dict[str, Any] = {}
        with torch.no_grad():
            model(input_ids=torch.zeros(1, 4, dtype=torch.long))  # leaves FSDP2's outermost parameters unsharded
        told["first"] = _tell(lambda: client.publish(model, step=1))
        step_of_training(model, seed=rank)  # other data on every rank, as in data-parallel training
        _save_whole(model, arguments.output / "expected-2", rank)
        told["refused"] = _tell(lambda: client.publish(model, step=2))
        told["again"] = _tell(lambda: client.publish(model, step=2))
        future = client.publish(model, step=3, wait=False)  # the same bytes: refused, and told at the next call
        step_of_training(model, seed=10 + rank)
        told["earlier"] = _tell(lambda: client.publish(model, step=4))
        told["future"] = _tell(future.result)
        step_of_training(model, seed=20 + rank)
        told["rewind"] = _tell(lambda: client.publish(model, step=1))
        told["background"] = _tell(lambda: _of(client.publish(model, step=5, wait=False)))
        told["last"] = _tell(lambda: client.publish(model, step=6))
        told["current"] = client.current.name if client.current else None
    (arguments.output / f"rank-{rank}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


def _tell(call: Callable[[], Policy | str]) -> dict[str, Any]:
    try:
        policy = call()
    except LoraSyncError as error:
        inner = [type(one).__name__ for one in error.errors] if isinstance(error, EarlierPublishError) else []
        return {"error": type(error).__name__, "text": str(error), "inner": inner}
    return {"policy": policy.name if isinstance(policy, Policy) else policy}


def _of(future: Future[Policy]) -> str:
    return type(future).__name__


def _save_whole(model: Any, directory: Path, rank: int) -> None:
    """Write what every rank together holds, by peft's own means."""
    whole = {name: tensor.full_tensor() for name, tensor in model.state_dict().items() if "lora_" in name}
    if rank == 0:
        model.save_pretrained(directory, state_dict=whole)


if __name__ == "__main__":
    main()
