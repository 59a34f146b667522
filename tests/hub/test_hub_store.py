"""What is particular about a store in a bucket: landing, hashes, batches that fail in part, limits, and clear words."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from huggingface_hub import HfApi

from proxy.artifacts.bucket import BucketFolder
from proxy.artifacts.digest import WEIGHTS_FILE
from proxy.artifacts.manifest import ADAPTER_FILES, MANIFEST_FILE
from proxy.errors import SettingsError
from proxy.simulator.adapters import lora_config, lora_tensors
from tests.hub.conftest import BUCKET
from tests.hub.faults import Answer
from tests.hub.hub_process import TOKEN
from tests.hub.offline_hub import OfflineHub
from tests.support.fake_proxy import FakeProxy
from tests.support.replicas import wait_until
from tests.support.stores import files_of, put, store_at
from tests.support.tiny_model import REPO
from trainer_client import StoreError, TrainerClient
from trainer_client.stores import open_store

URL = f"hf://buckets/{BUCKET}/lora"
BATCH = f"POST /api/buckets/{BUCKET}/batch"


@pytest.fixture
def api(hub_of_this_process: OfflineHub, api: HfApi) -> HfApi:
    """A client of the Hub that this process finds, too."""
    return api


@pytest.fixture
def proxy() -> Iterator[FakeProxy]:
    with FakeProxy(sees_files=False) as proxy:
        yield proxy


def _client(proxy: FakeProxy) -> TrainerClient:
    return TrainerClient(proxy.url, store=URL, mount="/lora", run="run", max_staleness=1)


def _publish(client: TrainerClient, step: int) -> str:
    return client.publish((lora_tensors(rank=4, seed=step), lora_config(rank=4)), step=step).name


def _on_hub(api: HfApi) -> list[str]:
    return [entry.path for entry in api.list_bucket_tree(BUCKET, recursive=True) if entry.type == "file"]


def test_what_is_published_tells_the_hubs_own_hashes(api: HfApi, proxy: FakeProxy) -> None:
    with _client(proxy) as client:
        name = _publish(client, step=1)
    (load,) = proxy.loads
    assert load.policy is not None
    assert load.lora_path == f"/lora/run/{name}"
    folder = BucketFolder.parse(URL).child("run", name)
    listed = {info.path: info for info in api.get_bucket_paths_info(BUCKET, _on_hub(api))}
    assert listed.keys() == {folder.file(name) for name in (*ADAPTER_FILES, MANIFEST_FILE)}
    for file in load.policy.files:
        found = listed[folder.file(file.path)]
        assert (found.size, found.xet_hash) == (file.size, file.xet_hash)


def test_the_manifest_is_written_only_when_the_hub_lists_the_files(
    hub: OfflineHub, api: HfApi, proxy: FakeProxy
) -> None:
    hub.set_faults(landing_s=1.0, landing_of={f"*/{MANIFEST_FILE}": 0.0})
    with _client(proxy) as client:
        future = client.publish((lora_tensors(rank=4, seed=1), lora_config(rank=4)), step=1, wait=False)
        wait_until(lambda: BATCH in hub.calls, what="the files are sent")
        while not (there := _on_hub(api)):
            assert hub.calls.count(BATCH) == 1
        assert not any(path.endswith(MANIFEST_FILE) for path in there)
        name = future.result(10).name
    assert len(_on_hub(api)) == 3
    assert name in proxy.live


def test_an_announcement_does_not_wait_for_the_manifest_to_land(hub: OfflineHub, api: HfApi, proxy: FakeProxy) -> None:
    hub.set_faults(landing_of={f"*/{MANIFEST_FILE}": 3600.0})
    with _client(proxy) as client:
        names = [_publish(client, step=step) for step in (1, 2, 2)]
    assert [name.split("-")[1] for name in names] == ["v1", "v2", "v2"]
    assert len(_on_hub(api)) == 4


def test_numbering_goes_on_from_what_is_in_the_bucket(api: HfApi, proxy: FakeProxy) -> None:
    with _client(proxy) as client:
        first = _publish(client, step=1)
    with _client(proxy) as client:
        assert _publish(client, step=1) == first
        assert _publish(client, step=2).startswith("run-v2-")


def test_old_policies_leave_the_bucket_once_nobody_needs_them(api: HfApi, proxy: FakeProxy) -> None:
    with _client(proxy) as client:
        names = [_publish(client, step=step) for step in range(1, 5)]
    folders = {path.split("/")[2] for path in _on_hub(api)}
    assert names[0] not in folders
    assert set(names[-2:]) <= folders


def test_stale_listings_only_delay(hub: OfflineHub, api: HfApi, proxy: FakeProxy) -> None:
    hub.set_faults(stale_listing_s=0.6)
    with _client(proxy) as client:
        began = time.monotonic()
        names = [_publish(client, step=step) for step in (1, 2)]
        assert time.monotonic() - began >= 1.2
    assert [name.split("-")[1] for name in names] == ["v1", "v2"]
    wait_until(lambda: len(_on_hub(api)) == 6, what="both are listed")


def test_after_the_deadline_nothing_is_published_and_nothing_is_left(
    hub: OfflineHub, api: HfApi, proxy: FakeProxy
) -> None:
    store = store_at(URL)
    hub.set_faults(landing_of={f"*/{WEIGHTS_FILE}": 3600.0})
    with pytest.raises(StoreError) as raised:
        put(store, version=1, deadline=time.monotonic() + 1.0)
    assert f"{WEIGHTS_FILE} is not there" in str(raised.value)
    assert _on_hub(api) == []
    hub.set_faults(landing_of={})
    put(store, version=1)
    assert len(_on_hub(api)) == 3


def test_a_batch_that_fails_in_part_is_told_file_by_file_and_taken_back(hub: OfflineHub, api: HfApi) -> None:
    store = store_at(URL)
    hub.set_faults(refused={f"*/{WEIGHTS_FILE}": 1})
    with pytest.raises(StoreError) as raised:
        put(store, version=1)
    message = str(raised.value)
    assert "\n" not in message
    assert f"{WEIGHTS_FILE}: the test asked for this failure" in message
    assert "adapter_config" not in message
    assert _on_hub(api) == []
    put(store, version=1)
    assert len(_on_hub(api)) == 3


def test_a_manifest_that_fails_takes_the_files_with_it(hub: OfflineHub, api: HfApi) -> None:
    store = store_at(URL)
    hub.set_faults(refused={f"*/{MANIFEST_FILE}": 1})
    with pytest.raises(StoreError, match=MANIFEST_FILE):
        put(store, version=1)
    assert _on_hub(api) == []


def test_files_that_have_not_landed_are_deleted_all_the_same(hub: OfflineHub, api: HfApi) -> None:
    store = store_at(URL)
    hub.set_faults(landing_s=0.5)
    files_of(store).add("run-v1-00000000", {"adapter_config.json": b"{}"})
    files_of(store).remove_folder("run-v1-00000000")
    files_of(store).add("run-v2-00000000", {"adapter_config.json": b"{}"})
    wait_until(lambda: bool(_on_hub(api)), what="the later one has landed")
    assert _on_hub(api) == ["lora/run/run-v2-00000000/adapter_config.json"]


def test_the_hub_is_asked_again_only_when_it_says(hub: OfflineHub, api: HfApi) -> None:
    store = store_at(URL)
    hub.set_faults(answers=[Answer(429, "GET */tree/*", times=1, retry_after_s=2)])
    began = time.monotonic()
    put(store, version=1)
    assert time.monotonic() - began >= 2.0


def test_failures_while_bytes_go_up_cost_no_seconds(hub: OfflineHub, api: HfApi) -> None:
    # in a process of its own: hf_xet reads once, at its start, how long it waits before it tries again
    publish = (
        f"import time; from tests.support.stores import put, store_at;"
        f"store = store_at({URL!r}); put(store, version=1);"
        "input(); began = time.monotonic(); put(store, version=2); print(time.monotonic() - began)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", publish], cwd=REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    wait_until(lambda: any(path.endswith(MANIFEST_FILE) for path in _on_hub(api)), what="the first is there")
    hub.set_faults(answers=[Answer(503, "POST */xorbs/*", times=4)])
    out, _ = process.communicate("go\n", timeout=15)
    assert process.returncode == 0
    assert float(out) < 3, "hf_xet by itself draws each wait from 3 s and more"


@pytest.mark.parametrize(("given", "used"), [(None, "50ms"), ("2s", "2s")])
def test_the_users_own_retry_delay_stays(
    given: str | None, used: str, monkeypatch: pytest.MonkeyPatch, api: HfApi
) -> None:
    name = "HF_XET_CLIENT_RETRY_BASE_DELAY"
    monkeypatch.delenv(name, raising=False)
    if given is not None:
        monkeypatch.setenv(name, given)
    open_store(URL, run="run", mount="/lora")
    assert os.environ[name] == used


def test_a_bucket_that_is_not_there_is_named_with_the_remedy(api: HfApi) -> None:
    with pytest.raises(StoreError, match=r"bucket tester/none is not at http.*hf buckets create tester/none"):
        open_store("hf://buckets/tester/none", run="run", mount="/lora").prepare()


def test_a_token_that_may_not_is_told_but_not_printed(api: HfApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    store = open_store(URL, run="run", mount="/lora")
    with pytest.raises(StoreError, match=r"the token has no access to it \(HTTP 401\)") as raised:
        store.prepare()
    assert "hf_wrong" not in f"{raised.value} {store!r}"


def test_the_hub_may_be_named_by_the_caller(hub: OfflineHub, api: HfApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    with FakeProxy(sees_files=False) as proxy:
        with TrainerClient(proxy.url, store=URL, mount="/lora", endpoint=hub.url, run="run", max_staleness=1) as client:
            _publish(client, step=1)
        assert TOKEN not in repr(client)
    assert len(_on_hub(api)) == 3


@pytest.mark.parametrize("url", ["hf://buckets/tester", "hf://buckets/tester/runs//x"])
def test_a_url_without_a_bucket_is_refused_at_once(url: str) -> None:
    with pytest.raises(SettingsError, match="no folder in a bucket of the Hub"):
        open_store(url, run="run", mount="/lora")


def test_publishing_prints_no_bars(api: HfApi, capfd: pytest.CaptureFixture[str]) -> None:
    put(store_at(URL), version=1)
    assert capfd.readouterr() == ("", "")
