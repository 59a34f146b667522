"""A store holds whole policies or none, whatever happens to who writes it: one suite for every kind of store."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from proxy.artifacts.check import inspect_directory
from proxy.artifacts.digest import CONFIG_FILE, WEIGHTS_FILE
from proxy.artifacts.manifest import ADAPTER_FILES, MANIFEST_FILE, Manifest, read_manifest
from proxy.contract import managed_name
from proxy.errors import SettingsError
from proxy.simulator.adapters import write_adapter
from tests.support.stores import FaultyFiles, files_of, manifest_of, put, store_at
from trainer_client.errors import StoreError
from trainer_client.stores import open_store
from trainer_client.stores.files import STAGING, Content, Sent, nobody
from trainer_client.stores.policy_store import ORPHAN_AGE_S, PolicyStore

KINDS = ["directory", "memory", "hub"]


@pytest.fixture(params=KINDS)
def location(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "hub":
        request.getfixturevalue("hub_of_this_process").api().create_bucket("tester/runs")
        return "hf://buckets/tester/runs/store"
    return str(tmp_path / "store") if request.param == "directory" else f"memory://{tmp_path.name}/store"


def visible(store: PolicyStore) -> list[str]:
    return sorted(files_of(store).list())


def write_unfinished(store: PolicyStore, folder: str) -> None:
    """Leave a policy's files without a manifest, as a killed publisher does."""
    with store.claim():
        files_of(store).add(folder, {CONFIG_FILE: b"{}", WEIGHTS_FILE: b"weights"})


# every kind of store


def test_a_policy_is_found_under_its_name_with_its_manifest(location: str) -> None:
    store = store_at(location)
    manifest = put(store, version=1)
    assert store.contents().manifests == (manifest,)
    assert sorted(files_of(store).list()[manifest.name]) == sorted([*ADAPTER_FILES, MANIFEST_FILE])
    assert store_at(location).contents().newest == manifest


def test_manifests_come_in_the_order_of_their_versions(location: str) -> None:
    store = store_at(location)
    for version in (1, 2, 10):
        put(store, version=version)
    assert [manifest.version for manifest in store.contents().manifests] == [1, 2, 10]


def test_a_folder_without_a_manifest_is_no_policy_but_its_version_is_taken(location: str) -> None:
    store = store_at(location)
    write_unfinished(store, "run-v7-abcdef01")
    contents = store.contents()
    assert not contents.manifests
    assert contents.versions == {7}
    assert contents.unfinished == ("run-v7-abcdef01",)


def test_what_a_killed_publisher_left_is_an_orphan_once_it_is_old(location: str) -> None:
    store = store_at(location)
    kept = put(store, version=1)
    write_unfinished(store, "run-v7-abcdef01")
    write_unfinished(store, "notes")
    with store.claim():
        contents = store.contents()
        assert store.orphans(contents, min_age_s=ORPHAN_AGE_S) == []
        assert store.orphans(contents, min_age_s=0.0) == ["run-v7-abcdef01"]
        store.delete("run-v7-abcdef01")
    assert visible(store) == ["notes", kept.name]


def test_a_deleted_policy_is_gone_and_the_others_stay(location: str) -> None:
    store = store_at(location)
    first, second = put(store, version=1), put(store, version=2)
    store.delete(first.name)
    store.delete(first.name)
    assert visible(store) == [second.name]


def test_an_acknowledged_unload_is_remembered_beyond_a_restart(location: str) -> None:
    store = store_at(location)
    name = put(store, version=1).name
    assert store.contents().unloaded == set()
    store.mark_unloaded(name)
    assert store_at(location).contents().unloaded == {name}


def test_runs_share_a_store_without_touching_each_other(location: str) -> None:
    one, two = store_at(location, run="one"), store_at(location, run="one-v2")
    theirs = put(two, version=1)
    with one.claim():
        put(two, version=2)
        assert one.contents().versions == set()
    assert two.contents().manifests[0] == theirs


def test_a_broken_manifest_is_named(location: str) -> None:
    store = store_at(location)
    manifest = put(store, version=1)
    files_of(store).write(manifest.name, MANIFEST_FILE, b"{")
    with pytest.raises(StoreError, match=rf"{manifest.name}/{MANIFEST_FILE} is not a manifest"):
        store_at(location).contents()


def test_the_manifest_of_something_else_is_named_and_not_touched(location: str) -> None:
    store = store_at(location)
    manifest = put(store, version=1)
    files_of(store).add("run-v2-abcdef01", {MANIFEST_FILE: manifest.content()})
    with pytest.raises(StoreError, match=f"is the manifest of {manifest.name}"):
        store.contents()


def test_a_publisher_that_came_in_between_is_noticed_before_anything_is_published(location: str) -> None:
    store = store_at(location)
    write_unfinished(store, "run-v3-abcdef01")
    with pytest.raises(StoreError, match="another publisher has written run-v3-abcdef01"):
        put(store, version=3)
    assert visible(store) == ["run-v3-abcdef01"]


def test_after_its_deadline_nothing_is_published(location: str) -> None:
    store = store_at(location)
    with pytest.raises(StoreError, match="took too long, so it is not published"):
        put(store, version=1, deadline=time.monotonic() - 1)
    assert visible(store) == []


@pytest.mark.parametrize("call", ["add", "list", "write"])
def test_a_failure_at_any_point_leaves_nothing_and_the_next_try_works(location: str, call: str) -> None:
    store = store_at(location)
    with FaultyFiles(store, call), pytest.raises(OSError, match="broken"):
        put(store, version=1)
    assert visible(store) == []
    assert store.contents().manifests == ()
    assert put(store, version=1) == store.contents().newest


def test_files_that_arrive_torn_are_not_published(location: str) -> None:
    store = store_at(location)
    files = files_of(store)
    add = files.add

    def torn(folder: str, contents: Mapping[str, Content], *, sent: Sent = nobody) -> None:
        add(folder, {name: content[:-1] for name, content in contents.items() if isinstance(content, bytes)})

    files.add = torn  # type: ignore[method-assign]
    seen = r"adapter_config\.json (is of \d+ bytes after \d+ bytes were written|has \d+ bytes there, not \d+)"
    with pytest.raises(StoreError, match=seen):
        put(store, version=1, deadline=time.monotonic() + 0.5)
    assert visible(store) == []


@pytest.mark.parametrize("in_memory", [True, False])
def test_what_is_in_a_file_arrives_as_what_is_in_memory(location: str, tmp_path: Path, in_memory: bool) -> None:
    content = bytes(range(256)) * 100_000
    (tmp_path / "large").write_bytes(content)
    files, counted = files_of(store_at(location)), list[int]()
    files.add("run-v1-00000000", {"large": content if in_memory else tmp_path / "large"}, sent=counted.append)
    assert files.read("run-v1-00000000", "large") == content
    assert sum(counted) == len(content)


# directories


def test_other_users_of_the_machine_can_read_what_is_published(tmp_path: Path) -> None:
    store = store_at(str(tmp_path))
    path = store.path_of(put(store, version=1).name)
    umask = os.umask(0)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o777 & ~umask


def test_what_dead_publishers_were_writing_is_an_orphan_at_once(tmp_path: Path) -> None:
    store = store_at(str(tmp_path))
    write_adapter(tmp_path / "run" / f"{STAGING}1-abcdef01", seed=1)
    with store.claim():
        assert store.orphans(store.contents()) == [f"{STAGING}1-abcdef01"]


def test_two_publishers_of_one_run_exclude_each_other(tmp_path: Path) -> None:
    with (
        store_at(str(tmp_path)).claim(),
        pytest.raises(StoreError, match="another publisher is writing run run"),
        store_at(str(tmp_path)).claim(),
    ):
        pass


def test_a_store_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    store = open_store(tmp_path / "file", run="run")
    with pytest.raises(StoreError, match=rf"store {tmp_path}/file/run cannot be used"):
        store.prepare()


def test_a_path_is_announced_without_dots_but_with_its_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "mount").symlink_to("disk")
    monkeypatch.chdir(tmp_path / "disk")
    assert open_store(tmp_path / "mount", run="run").path_of("x") == tmp_path / "mount" / "run" / "x"
    assert open_store("../disk", run="run").path_of("x") == tmp_path / "disk" / "run" / "x"


def test_readers_never_see_a_manifest_before_the_weights(tmp_path: Path) -> None:
    store = store_at(str(tmp_path))
    path = store.path_of(put(store, version=1).name)
    sizes = {file.path: file.size for file in read_manifest(path).files}
    assert (path / MANIFEST_FILE).stat().st_mtime_ns >= (path / WEIGHTS_FILE).stat().st_mtime_ns
    assert sizes[WEIGHTS_FILE] == (path / WEIGHTS_FILE).stat().st_size


# where replicas see it


@pytest.mark.parametrize(
    ("location", "mount", "path"),
    [
        ("/data/store", None, "/data/store/run/x"),
        ("/data/store", "/lora", "/lora/run/x"),
        ("file:///data/store", None, "/data/store/run/x"),
        ("memory://bucket/store", "/lora", "/lora/run/x"),
    ],
)
def test_replicas_see_a_policy_under_the_mount(location: str, mount: str | None, path: str) -> None:
    assert str(open_store(location, run="run", mount=mount).path_of("x")) == path


@pytest.mark.parametrize(
    ("location", "mount", "words"),
    [
        ("memory://bucket", None, "replicas cannot open memory://bucket itself; give mount="),
        ("/data", "lora", "mount 'lora' is not absolute"),
        ("nosuch://bucket", "/lora", "store nosuch://bucket cannot be used: Protocol not known: nosuch"),
        ("sftp://bucket", "/lora", "store sftp://bucket cannot be used: .*paramiko"),
    ],
)
def test_a_store_that_cannot_work_is_refused_at_once(location: str, mount: str | None, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        open_store(location, run="run", mount=mount)


def test_an_error_of_the_library_below_names_the_url(location: str) -> None:
    store = open_store("memory://gone/store", run="run", mount="/lora")
    with pytest.raises(StoreError, match="reading memory://gone/store/run/x/y failed: FileNotFoundError"):
        files_of(store).read("x", "y")


def test_a_policy_of_ours_is_what_its_adapter_was(tmp_path: Path) -> None:
    store = store_at(str(tmp_path / "store"))
    manifest = put(store, version=3)
    found = inspect_directory(store.path_of(manifest.name))
    expected: Manifest = manifest_of(found, run="run", version=3)
    same: dict[str, Any] = {"created": manifest.created}
    assert expected.model_copy(update=same) == manifest
    assert manifest.name == managed_name("run", 3, found.digest)


def test_a_hub_that_is_out_of_reach_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)  # huggingface_hub tries again for 23 s
    store = open_store("hf://buckets/me/runs", run="r", mount="/lora", endpoint="http://127.0.0.1:1")
    with pytest.raises(StoreError, match=r"see whether this machine reaches http://127\.0\.0\.1:1 \(HF_ENDPOINT\)"):
        store.prepare()
