"""A store holds whole policies or none, whatever happens to who writes it."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from proxy.artifacts.digest import WEIGHTS_FILE, adapter_digest
from proxy.artifacts.manifest import ADAPTER_FILES, MANIFEST_FILE, Manifest, describe_files, read_manifest
from proxy.contract import managed_name
from proxy.simulator.adapters import write_adapter
from trainer_client.errors import StoreError
from trainer_client.stores import ORPHAN_AGE_S, DirectoryStore


def commit(store: DirectoryStore, *, version: int) -> Manifest:
    """Publish a policy in the store."""
    with store.staging() as staged:
        digest = adapter_digest(write_adapter(staged, seed=version))
        manifest = Manifest(
            run=store.run,
            version=version,
            step=version,
            name=managed_name(store.run, version, digest),
            base_model="sim",
            digest=digest,
            files=describe_files(staged),
            created=datetime.now(UTC),
        )
        store.commit(staged, manifest)
    return manifest


def opened(root: Path, *, run: str = "run") -> DirectoryStore:
    store = DirectoryStore(root, run=run)
    with store.claim():
        return store


def visible(store: DirectoryStore) -> list[str]:
    return sorted(path.name for path in store.directory.iterdir() if path.name != ".lock")


def make_old(path: Path) -> None:
    os.utime(path, times=(0, path.stat().st_mtime - ORPHAN_AGE_S - 60))


def test_a_policy_is_found_under_its_name_with_its_manifest(tmp_path: Path) -> None:
    store = opened(tmp_path)
    manifest = commit(store, version=1)
    assert store.manifests() == [manifest]
    assert store.path_of(manifest.name) == tmp_path / "run" / manifest.name
    assert sorted(path.name for path in store.path_of(manifest.name).iterdir()) == sorted(
        [*ADAPTER_FILES, MANIFEST_FILE]
    )


def test_manifests_come_in_the_order_of_their_versions(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for version in (10, 2, 1):
        commit(store, version=version)
    assert [manifest.version for manifest in store.manifests()] == [1, 2, 10]


def test_other_users_of_the_machine_can_read_what_is_published(tmp_path: Path) -> None:
    store = opened(tmp_path)
    path = store.path_of(commit(store, version=1).name)
    umask = os.umask(0)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o777 & ~umask


def test_a_failed_staging_leaves_nothing(tmp_path: Path) -> None:
    store = opened(tmp_path)
    with pytest.raises(KeyboardInterrupt), store.staging() as staged:
        write_adapter(staged, seed=1)
        raise KeyboardInterrupt
    assert visible(store) == []


def test_what_dead_publishers_left_is_removed_at_the_next_claim(tmp_path: Path) -> None:
    store = opened(tmp_path)
    write_adapter(store.directory / ".staging-1-abcdef01", seed=1)
    with store.claim():
        assert visible(store) == []


def test_what_another_run_is_staging_is_not_touched(tmp_path: Path) -> None:
    theirs = tmp_path / "other" / ".staging-1-abcdef01"
    write_adapter(theirs, seed=1)
    opened(tmp_path)
    assert theirs.exists()


def test_a_directory_without_a_manifest_is_no_policy_but_its_version_is_taken(tmp_path: Path) -> None:
    store = opened(tmp_path)
    write_adapter(store.directory / "run-v7-abcdef01", seed=1)
    with store.claim():
        assert store.manifests() == []
        assert store.versions() == [7]


def test_an_old_directory_without_a_manifest_is_removed(tmp_path: Path) -> None:
    store = opened(tmp_path)
    kept = commit(store, version=1)
    orphan = write_adapter(store.directory / "run-v7-abcdef01", seed=1)
    foreign = write_adapter(store.directory / "notes", seed=1)
    for path in (orphan, foreign, store.path_of(kept.name)):
        make_old(path)
    with store.claim():
        assert visible(store) == ["notes", kept.name]


def test_a_broken_manifest_is_named(tmp_path: Path) -> None:
    store = opened(tmp_path)
    manifest = commit(store, version=1)
    (store.path_of(manifest.name) / MANIFEST_FILE).write_text("{")
    with pytest.raises(StoreError, match=rf"{manifest.name}/{MANIFEST_FILE} is not a manifest"):
        store.manifests()


def test_a_deleted_policy_is_gone_and_the_others_stay(tmp_path: Path) -> None:
    store = opened(tmp_path)
    first, second = commit(store, version=1), commit(store, version=2)
    store.delete(first.name)
    assert visible(store) == [second.name]


def test_an_acknowledged_unload_is_remembered_beyond_a_restart(tmp_path: Path) -> None:
    store = opened(tmp_path)
    name = commit(store, version=1).name
    assert not store.is_unloaded(name)
    store.mark_unloaded(name)
    assert opened(tmp_path).is_unloaded(name)


def test_two_publishers_of_one_run_exclude_each_other(tmp_path: Path) -> None:
    with (
        DirectoryStore(tmp_path, run="run").claim(),
        pytest.raises(StoreError, match="another publisher is writing run run"),
    ):
        opened(tmp_path)


def test_publishers_of_different_runs_share_a_store(tmp_path: Path) -> None:
    with DirectoryStore(tmp_path, run="one").claim():
        commit(opened(tmp_path, run="two"), version=1)


def test_a_killed_publisher_keeps_nobody_out(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from trainer_client.stores import DirectoryStore\n"
        "store = DirectoryStore(Path(sys.argv[1]), run='run')\n"
        "with store.claim(), store.staging(): os.kill(os.getpid(), 9)"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=15, check=False)
    assert killed.returncode == -9
    store = DirectoryStore(tmp_path, run="run")
    assert any(name.startswith(".staging-") for name in visible(store))
    with store.claim():
        assert visible(store) == []


def test_a_store_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=rf"store {tmp_path}/file cannot be used"):
        opened(tmp_path / "file")


def test_a_path_is_announced_without_dots_but_with_its_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "mount").symlink_to("disk")
    monkeypatch.chdir(tmp_path / "disk")
    assert DirectoryStore(tmp_path / "mount", run="run").root == tmp_path / "mount"
    assert DirectoryStore(Path("../disk"), run="run").root == tmp_path / "disk"


def test_readers_never_see_a_manifest_before_the_weights(tmp_path: Path) -> None:
    store = opened(tmp_path)
    path = store.path_of(commit(store, version=1).name)
    manifest = read_manifest(path)
    sizes = {file.path: file.size for file in manifest.files}
    assert (path / MANIFEST_FILE).stat().st_mtime_ns >= (path / WEIGHTS_FILE).stat().st_mtime_ns
    assert sizes[WEIGHTS_FILE] == (path / WEIGHTS_FILE).stat().st_size
