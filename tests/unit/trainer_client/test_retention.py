"""What leaves the store and when: the window stays, checkpoints stay, and nothing of anybody else is touched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from proxy.artifacts.manifest import MANIFEST_FILE, read_manifest
from proxy.errors import SettingsError
from proxy.simulator.adapters import lora_config, lora_tensors, write_adapter
from tests.support.fake_proxy import FakeProxy
from trainer_client import Policy, TrainerClient
from trainer_client.stores.files import STAGING


def make_client(proxy: FakeProxy, tmp_path: Path, **options: Any) -> TrainerClient:
    options = {"max_staleness": 0, **options}
    return TrainerClient(proxy.url, store=tmp_path / "store", run="run", retry_timeout_s=5, **options)


def publish(client: TrainerClient, seed: int) -> Policy:
    return client.publish((lora_tensors(rank=8, seed=seed), lora_config(rank=8)), step=seed)


def stored(tmp_path: Path) -> list[int]:
    """Versions whose files are in the store."""
    return sorted(
        read_manifest(path.parent).version for path in (tmp_path / "store" / "run").glob(f"*/{MANIFEST_FILE}")
    )


def orphan(tmp_path: Path, name: str, run: str = "run") -> Path:
    return write_adapter(tmp_path / "store" / run / name, seed=1)


def test_every_so_many_versions_the_files_stay_but_not_the_slot(tmp_path: Path) -> None:
    with FakeProxy() as proxy, make_client(proxy, tmp_path, keep_every=3) as client:
        names = [publish(client, seed).name for seed in range(1, 9)]
        assert stored(tmp_path) == [3, 6, 8]
        assert list(proxy.live) == names[-1:]


def test_checkpoints_are_unloaded_once_even_by_a_proxy_that_has_forgotten_them(tmp_path: Path) -> None:
    with FakeProxy() as proxy, make_client(proxy, tmp_path, keep_every=1) as client:
        first = publish(client, 1)
        publish(client, 2)
        proxy.forget()
        for seed in range(3, 8):
            publish(client, seed)
        assert proxy.unloads.count(first.name) == 2
        assert stored(tmp_path) == list(range(1, 8))


def test_a_checkpoint_that_a_restarted_proxy_found_on_a_replica_is_unloaded_again(tmp_path: Path) -> None:
    with FakeProxy() as proxy, make_client(proxy, tmp_path, keep_every=1) as client:
        first = publish(client, 1)
        publish(client, 2)
        proxy.forget()
        proxy.live[first.name] = str(first.path)
        last = publish(client, 3)
        assert list(proxy.live) == [last.name]
        assert first.path.exists()


@pytest.mark.parametrize("keep_every", [0, -1])
def test_keeping_every_none_is_refused(tmp_path: Path, keep_every: int) -> None:
    with FakeProxy(listening=False) as proxy, pytest.raises(SettingsError, match="keep_every is"):
        make_client(proxy, tmp_path, keep_every=keep_every)


def test_collecting_garbage_shows_what_nobody_needs_and_then_removes_it(tmp_path: Path) -> None:
    with FakeProxy() as proxy, make_client(proxy, tmp_path, keep_every=2) as client:
        policies = [publish(client, 1)]
        proxy.leased.add(policies[0].name)  # so that its files outlive the next publication
        policies += [publish(client, seed) for seed in (2, 3)]
        proxy.leased.clear()
        left = {
            orphan(tmp_path, "run-v9-abcdef01").name,
            orphan(tmp_path, f"{STAGING}1-abcdef01").name,
        }
        theirs = [orphan(tmp_path, "notes"), orphan(tmp_path, "run-v2-v9-abcdef01"), orphan(tmp_path, "x", run="other")]
        expected = {policies[0].name: "unloaded", **dict.fromkeys(left, "left by a publisher")}

        shown = client.gc(dry_run=True, min_age_s=0)
        assert {garbage.folder for garbage in shown} == set(expected)
        assert all(garbage.why.startswith(expected[garbage.folder]) for garbage in shown)
        assert all(garbage.size > 1000 and not garbage.removed for garbage in shown)
        assert stored(tmp_path) == [1, 2, 3]

        assert {garbage.folder for garbage in client.gc(min_age_s=0) if garbage.removed} == set(expected)
        assert stored(tmp_path) == [2, 3]
        assert all(path.exists() for path in theirs)
        assert client.gc(min_age_s=0) == []


def test_what_may_still_arrive_on_a_mount_is_no_garbage_yet(tmp_path: Path) -> None:
    with FakeProxy() as proxy, make_client(proxy, tmp_path) as client:
        publish(client, 1)
        late = orphan(tmp_path, "run-v9-abcdef01")
        assert client.gc() == []
        assert publish(client, 2).version == 10
        assert late.exists()


def test_collecting_waits_for_publications_that_go_on(tmp_path: Path) -> None:
    with FakeProxy() as proxy, make_client(proxy, tmp_path) as client:
        publish(client, 1)
        future = client.publish((lora_tensors(rank=8, seed=2), lora_config(rank=8)), step=2, wait=False)
        assert client.gc(min_age_s=0) == []
        assert future.done()
        assert stored(tmp_path) == [2]


def test_a_version_that_was_begun_is_never_used_again(tmp_path: Path) -> None:
    with FakeProxy() as proxy, make_client(proxy, tmp_path) as client:
        orphan(tmp_path, "run-v41-abcdef01")
        assert publish(client, 1).version == 42
