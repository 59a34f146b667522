"""How many adapters vLLM must have room for, and of which rank. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from proxy.artifacts.config import LARGEST_RANK, MAX_LORA_RANKS, parse_config, read_config
from proxy.errors import SettingsError


def max_loras(max_staleness: int) -> int:
    """Return vLLM's --max-loras: max_staleness + 1 live policies, and one more that is loaded before the oldest goes.

    The same as TRL's `AsyncGRPOTrainer` asks for. Raises SettingsError if `max_staleness` is negative.
    """
    if max_staleness < 0:
        raise SettingsError(
            f"max_staleness is {max_staleness}; give the number of versions a rollout may lag, 0 or more."
        )
    return max_staleness + 2


def max_cpu_loras(loras: int) -> int:
    """Return vLLM's --max-cpu-loras for `loras` slots: twice as many.

    An unload never removes an adapter from vLLM's cache on the CPU. When a live one is pushed out, vLLM reads it from
    disk again at its next request, and the engine dies if the files are gone.
    """
    return 2 * loras


def max_lora_rank(rank: int) -> int:
    """Round a rank up to the next value that vLLM takes. Raises SettingsError above the largest, 512, or below 1."""
    if not 1 <= rank <= LARGEST_RANK:
        raise SettingsError(f"rank {rank} cannot be served: vLLM takes adapters of rank 1 to {LARGEST_RANK}.")
    return next(limit for limit in MAX_LORA_RANKS if limit >= rank)


def rank_of(lora_config: Any) -> int:
    """Return the largest rank of any module (r and rank_pattern).

    `lora_config` is a peft LoraConfig, its fields as a mapping, the path of an adapter's directory, or a rank.
    Raises SettingsError when it holds no rank, ArtifactError when the directory's config is missing or broken.
    """
    if isinstance(lora_config, int):
        return lora_config
    if isinstance(lora_config, str | Path):
        return read_config(Path(lora_config)).max_rank
    read = lora_config.get if isinstance(lora_config, Mapping) else partial(getattr, lora_config)
    ranks = {"r": read("r", None), "rank_pattern": read("rank_pattern", None)}
    if ranks["r"] is None:
        raise SettingsError(
            f"this {type(lora_config).__name__} has no rank r; give a LoraConfig, a directory or a rank."
        )
    return parse_config(ranks, source="the LoRA config").max_rank


def vllm_args(*, max_staleness: int, rank: int | None = None) -> list[str]:
    """Return the arguments of `vllm serve` with which every policy of the window finds a slot.

    Without `rank` they leave --max-lora-rank out, which is 16 in vLLM then.
    """
    slots = max_loras(max_staleness)
    arguments = ["--enable-lora", "--max-loras", str(slots), "--max-cpu-loras", str(max_cpu_loras(slots))]
    return arguments if rank is None else [*arguments, "--max-lora-rank", str(max_lora_rank(rank))]
