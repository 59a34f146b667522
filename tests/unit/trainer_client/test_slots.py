"""vLLM's arguments follow from the window and the rank."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from proxy.artifacts.config import MAX_LORA_RANKS
from proxy.errors import ArtifactError, SettingsError
from proxy.simulator.adapters import write_adapter
from trainer_client.slots import max_lora_rank, max_loras, rank_of, vllm_args


@pytest.mark.parametrize(("max_staleness", "slots"), [(0, 2), (1, 3), (4, 6)])
def test_one_slot_more_than_live_policies(max_staleness: int, slots: int) -> None:
    assert max_loras(max_staleness) == slots


def test_the_arguments_of_a_run() -> None:
    assert vllm_args(max_staleness=4, rank=12) == [
        "--enable-lora",
        "--max-loras",
        "6",
        "--max-cpu-loras",
        "12",
        "--max-lora-rank",
        "16",
    ]


def test_without_a_rank_vllm_keeps_its_own() -> None:
    assert "--max-lora-rank" not in vllm_args(max_staleness=0)


@pytest.mark.parametrize(("rank", "rounded"), [(1, 1), (2, 8), (8, 8), (9, 16), (129, 256), (300, 320), (512, 512)])
def test_a_rank_is_rounded_up_to_what_vllm_takes(rank: int, rounded: int) -> None:
    assert max_lora_rank(rank) == rounded
    assert rounded in MAX_LORA_RANKS


@pytest.mark.parametrize("rank", [-1, 0, 513])
def test_a_rank_that_vllm_does_not_serve_is_refused(rank: int) -> None:
    with pytest.raises(SettingsError, match=f"rank {rank} cannot be served"):
        max_lora_rank(rank)


def test_a_negative_staleness_is_refused() -> None:
    with pytest.raises(SettingsError, match="max_staleness is -1"):
        max_loras(-1)


@pytest.mark.parametrize(
    "lora_config",
    [
        32,
        {"r": 32},
        {"r": 8, "rank_pattern": {"q_proj": 32}},
        SimpleNamespace(r=8, rank_pattern={"q_proj": 32}),
        SimpleNamespace(r=32, rank_pattern=None),
    ],
)
def test_the_largest_rank_of_any_module_counts(lora_config: Any) -> None:
    assert rank_of(lora_config) == 32


def test_the_rank_of_a_directory_is_read_from_its_config(tmp_path: Path) -> None:
    write_adapter(tmp_path, seed=1, rank=4)
    assert rank_of(tmp_path) == rank_of(str(tmp_path)) == 4


@pytest.mark.parametrize("lora_config", [{}, object(), {"r": None}])
def test_a_config_without_a_rank_is_refused(lora_config: Any) -> None:
    with pytest.raises(SettingsError, match="has no rank r"):
        rank_of(lora_config)


def test_a_directory_without_an_adapter_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"adapter_config\.json cannot be read"):
        rank_of(tmp_path)
