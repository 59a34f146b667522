"""Registered names and adapters in memory are two different things."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from proxy.simulator.adapters import write_adapter
from proxy.simulator.lora import AdapterMemory, LoraRequest, Registry
from proxy.simulator.lora_directory import AdapterNotFoundError
from proxy.simulator.tokens import adapter_weights


def requests(tmp_path: Path, count: int) -> list[LoraRequest]:
    return [
        LoraRequest(id=seed, name=f"a{seed}", path=str(write_adapter(tmp_path / f"a{seed}", seed=seed)), inplace=False)
        for seed in range(count)
    ]


def test_a_reload_of_a_known_name_keeps_its_id_and_a_later_load_gets_a_new_one() -> None:
    registry = Registry()
    first = registry.request(name="a", path="/1", inplace=False)
    registry.register(first)
    assert registry.request(name="a", path="/2", inplace=True).id == first.id
    registry.forget("a")
    assert "a" not in registry
    assert registry.request(name="a", path="/1", inplace=False).id != first.id


def test_the_least_recently_used_adapter_leaves_memory(tmp_path: Path) -> None:
    memory = AdapterMemory(capacity=2, max_rank=8)
    first, second, third = requests(tmp_path, 3)
    for lora in (first, second, first, third):
        memory.use(lora)
    assert memory.get(first)
    assert memory.get(second) is None
    assert repr(memory) == "AdapterMemory(2/2)"


def test_an_adapter_in_use_stays(tmp_path: Path) -> None:
    memory = AdapterMemory(capacity=1, max_rank=8)
    first, second = requests(tmp_path, 2)
    memory.use(first)
    memory.use(second, in_use={first.id})
    assert memory.get(first)


def test_files_are_looked_at_again_only_after_they_left_memory(tmp_path: Path) -> None:
    memory = AdapterMemory(capacity=1, max_rank=8)
    first, second = requests(tmp_path, 2)
    before = memory.use(first).digest
    write_adapter(Path(first.path), seed=9)
    assert memory.use(first).digest == before
    memory.use(second)
    assert memory.use(first).digest == adapter_weights(Path(first.path)) != before


def test_a_dropped_adapter_whose_directory_is_gone_cannot_be_used(tmp_path: Path) -> None:
    memory = AdapterMemory(capacity=1, max_rank=8)
    first, second = requests(tmp_path, 2)
    memory.use(first)
    memory.use(second)
    shutil.rmtree(first.path)
    with pytest.raises(AdapterNotFoundError):
        memory.use(first)


def test_an_adapter_loaded_in_place_is_read_every_time(tmp_path: Path) -> None:
    memory = AdapterMemory(capacity=1, max_rank=8)
    path = write_adapter(tmp_path / "a", seed=1)
    lora = LoraRequest(id=1, name="a", path=str(path), inplace=True)
    before = memory.use(lora).digest
    write_adapter(path, seed=2)
    assert memory.use(lora).digest != before
