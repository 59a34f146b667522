"""What of TRL's `AsyncGRPOTrainer` has to be there. Pure: looks at a trainer, and says what it does not find.

Source: `trl/experimental/async_grpo/async_grpo_trainer.py` of TRL 1.14.0, 1.15.0 and 1.16.0, alike in all of this.
"""

from __future__ import annotations

import inspect
from functools import reduce
from typing import Any

SYNC = "_sync_weight_lora"
"""The method that is replaced: called with the time at which the sync began, it returns when its three phases ended."""

CALLER = "_sync_weight"
"""The method that calls it, at the start of the training and every `weight_sync_steps`."""

NEEDED = (
    CALLER,
    SYNC,
    "_lora_sync",
    "_lora_name",
    "_adapter_name",
    "_metrics",
    "model_version",
    "rollout_worker",
    "model",
    "state.global_step",
    "args.max_staleness",
    "accelerator.is_main_process",
    "accelerator.num_processes",
    "accelerator.unwrap_model",
    "add_callback",
)
"""What a trainer must have. Attributes that begin with an underscore are TRL's own affair and may change."""

WORKER_NEEDS = "update_model_version"
"""What its rollout worker must have; only rank 0 has a worker."""

TAKEN = "sample/staleness_mean"
"""TRL's metric with one value for each sample that it takes."""

DROPPED = "sample/dropped_stale_total"
"""TRL's metric with a 1 for each sample that it drops as too stale."""


def lacks(trainer: Any) -> list[str]:
    """Return what the trainer does not have, each as a clause; nothing if it fits."""
    kind = type(trainer).__name__
    if missing := [name for name in NEEDED if not _has(trainer, name)]:
        return [f"{kind} has no {name}" for name in missing]
    found = []
    if len(inspect.signature(getattr(trainer, SYNC)).parameters) != 1:
        found.append(f"{kind}.{SYNC} does not take one argument")
    if SYNC not in _names_in(getattr(trainer, CALLER)):
        found.append(f"{kind}.{CALLER} does not call {SYNC}")
    if trainer.accelerator.is_main_process and not hasattr(trainer.rollout_worker, WORKER_NEEDS):
        found.append(f"its rollout worker has no {WORKER_NEEDS}")
    return found


def _has(trainer: Any, name: str) -> bool:
    try:
        reduce(getattr, name.split("."), trainer)
    except AttributeError:
        return False
    return True


def _names_in(method: Any) -> tuple[str, ...]:
    code = getattr(inspect.unwrap(method), "__code__", None)
    return code.co_names if code else ()
