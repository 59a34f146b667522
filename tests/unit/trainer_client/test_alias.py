"""A name of the trainer's own for a policy, and being told the moment in which it is served."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from proxy.artifacts.manifest import read_manifest
from proxy.simulator.adapters import lora_config, lora_tensors
from tests.support.fake_proxy import FakeProxy, refusal
from trainer_client import AnnounceError, TrainerClient


def make_client(proxy: FakeProxy, tmp_path: Path, *, max_staleness: int = 1) -> TrainerClient:
    return TrainerClient(
        proxy.url, store=tmp_path / "store", run="run", max_staleness=max_staleness, retry_timeout_s=5, timeout_s=5
    )


def state_dict(seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    return dict(lora_tensors(rank=8, seed=seed)), dict(lora_config(rank=8))


def test_it_is_announced_and_kept_in_the_manifest(tmp_path: Path) -> None:
    with FakeProxy() as proxy, make_client(proxy, tmp_path) as client:
        policy = client.publish(state_dict(1), step=1, alias="trl-policy-v7")
        assert policy.alias == read_manifest(policy.path).alias == "trl-policy-v7"
        (announced,) = proxy.loads
        assert announced.policy is not None
        assert (announced.lora_name, announced.policy.alias) == (policy.name, "trl-policy-v7")


def test_the_same_bytes_under_another_alias_are_a_new_policy(tmp_path: Path) -> None:
    """A step that changes nothing must not leave TRL's next name unknown, nor one policy with two names."""
    with FakeProxy() as proxy, make_client(proxy, tmp_path, max_staleness=8) as client:
        versions = [client.publish(state_dict(1), step=1, alias=alias).version for alias in ("a", "b", "b", None)]
        assert versions == [1, 2, 2, 2]
        assert client.publish(state_dict(1), step=1, alias="a").version == 3
        assert [load.policy.alias for load in proxy.loads if load.policy] == ["a", "b", "b", "b", "a"]


def test_a_failed_announcement_is_repeated_with_its_alias(tmp_path: Path) -> None:
    with FakeProxy() as proxy, make_client(proxy, tmp_path) as client:
        proxy.script.append(refusal(500, "a replica refused it"))
        with pytest.raises(AnnounceError):
            client.publish(state_dict(1), step=1, alias="a")
        assert client.publish(state_dict(1), step=1, alias="a").version == 1


def test_who_asks_is_told_when_it_is_served_before_old_ones_are_unloaded(tmp_path: Path) -> None:
    with FakeProxy() as proxy, make_client(proxy, tmp_path, max_staleness=0) as client:
        told: list[tuple[list[str], list[str], str]] = []

        def look() -> None:
            told.append((list(proxy.live), list(proxy.unloads), threading.current_thread().name))

        first = client.publish(state_dict(1), step=1, on_live=look)
        second = client.publish(state_dict(2), step=2, wait=False, on_live=look).result(10)
        assert [(live, unloads) for live, unloads, _ in told] == [
            ([first.name], []),
            ([first.name, second.name], []),
        ]
        assert threading.current_thread().name not in {thread for _, _, thread in told}
        assert proxy.unloads == [first.name]


def test_nobody_is_told_of_a_policy_that_is_not_served(tmp_path: Path) -> None:
    with FakeProxy() as proxy, make_client(proxy, tmp_path) as client:
        proxy.script.append(refusal(500, "a replica refused it"))
        told: list[bool] = []
        with pytest.raises(AnnounceError):
            client.publish(state_dict(1), step=1, on_live=lambda: told.append(True))
        assert told == []
