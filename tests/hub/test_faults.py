"""Each fault of the offline Hub, as somebody who calls huggingface_hub meets it."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import BucketBatchError, HfHubHTTPError, RemoteEntryNotFoundError

from tests.hub.conftest import BUCKET
from tests.hub.faults import Answer, Faults
from tests.hub.offline_hub import OfflineHub
from tests.support.replicas import wait_until

_DIRECTORY: list[tuple[str | Path | bytes, str]] = [
    (b"{}", "v1/adapter_config.json"),
    (b"weights", "v1/adapter_model.safetensors"),
]


def _listed(api: HfApi) -> list[str]:
    return [entry.path for entry in api.list_bucket_tree(BUCKET, recursive=True)]


def _known(api: HfApi, path: str) -> bool:
    return bool(list(api.get_bucket_paths_info(BUCKET, [path])))


def test_files_are_shown_only_when_they_have_landed(hub: OfflineHub, api: HfApi) -> None:
    hub.set_faults(landing_s=0.5)
    started = time.monotonic()
    api.batch_bucket_files(BUCKET, add=_DIRECTORY)
    uploaded = time.monotonic()
    assert _listed(api) == []
    assert not _known(api, "v1/adapter_config.json")
    with pytest.raises(RemoteEntryNotFoundError):
        api.get_bucket_file_metadata(BUCKET, "v1/adapter_config.json")
    wait_until(lambda: len(_listed(api)) == 2, limit_s=5)
    assert started + 0.5 <= time.monotonic() < uploaded + 1.5
    assert api.get_bucket_file_metadata(BUCKET, "v1/adapter_config.json").size == 2


def test_what_is_replaced_stays_until_the_new_has_landed(hub: OfflineHub, api: HfApi) -> None:
    api.batch_bucket_files(BUCKET, add=[(b"old", "file")])
    hub.set_faults(landing_s=0.5)
    api.batch_bucket_files(BUCKET, add=[(b"newer", "file")])
    assert [info.size for info in api.get_bucket_paths_info(BUCKET, ["file"])] == [3]
    wait_until(lambda: [info.size for info in api.get_bucket_paths_info(BUCKET, ["file"])] == [5], limit_s=5)


def test_a_directory_can_land_torn(hub: OfflineHub, api: HfApi) -> None:
    hub.set_faults(landing_of={"*.safetensors": 1})
    api.batch_bucket_files(BUCKET, add=_DIRECTORY)
    assert _listed(api) == ["v1/adapter_config.json"]
    wait_until(lambda: len(_listed(api)) == 2, limit_s=5)


def test_one_file_of_a_batch_fails_and_the_others_are_there(hub: OfflineHub, api: HfApi) -> None:
    hub.set_faults(refused={"*.safetensors": 1})
    with pytest.raises(BucketBatchError) as raised:
        api.batch_bucket_files(BUCKET, add=_DIRECTORY)
    assert [failure["path"] for failure in raised.value.failures] == ["v1/adapter_model.safetensors"]
    assert _listed(api) == ["v1/adapter_config.json"]
    api.batch_bucket_files(BUCKET, add=_DIRECTORY)
    assert len(_listed(api)) == 2


def test_all_files_of_a_batch_fail(hub: OfflineHub, api: HfApi) -> None:
    hub.set_faults(refused={"*": None})
    with pytest.raises(BucketBatchError) as raised:
        api.batch_bucket_files(BUCKET, add=_DIRECTORY)
    assert raised.value.response.status_code == 422
    assert len(raised.value.failures) == 2
    assert _listed(api) == []


@pytest.mark.parametrize("status", [500, 503])
def test_a_server_error_is_repeated_by_the_client(hub: OfflineHub, api: HfApi, status: int) -> None:
    hub.set_faults(answers=[Answer(status, "POST */batch", times=1)])
    api.batch_bucket_files(BUCKET, add=_DIRECTORY)
    assert len(_listed(api)) == 2
    assert hub.calls.count(f"POST /api/buckets/{BUCKET}/batch") == 2


def test_a_server_error_of_a_call_that_is_not_repeated_is_raised(hub: OfflineHub) -> None:
    hub.set_faults(answers=[Answer(503, "POST *")])
    with pytest.raises(HfHubHTTPError, match="503"):
        hub.api().create_bucket(BUCKET)


def test_an_answer_can_be_lost_after_the_call_was_carried_out(hub: OfflineHub) -> None:
    hub.set_faults(answers=[Answer(502, f"POST /api/buckets/{BUCKET}", times=1, carried_out=True)])
    with pytest.raises(HfHubHTTPError, match="502"):
        hub.api().create_bucket(BUCKET)
    assert hub.api().bucket_info(BUCKET).id == BUCKET


def test_the_store_can_fail_while_bytes_go_up(hub: OfflineHub, api: HfApi) -> None:
    hub.set_faults(answers=[Answer(503, "POST */xorbs/*", times=1)])
    api.batch_bucket_files(BUCKET, add=_DIRECTORY)
    assert len(_listed(api)) == 2


def test_a_client_that_asks_too_often_waits_as_long_as_it_is_told(hub: OfflineHub, api: HfApi) -> None:
    hub.set_faults(answers=[Answer(429, "POST */paths-info", times=1, retry_after_s=1)])
    started = time.monotonic()
    assert not _known(api, "missing")
    assert time.monotonic() - started >= 1


def test_a_429_that_is_not_repeated_says_how_long_to_wait(hub: OfflineHub) -> None:
    hub.set_faults(answers=[Answer(429, retry_after_s=7)])
    with pytest.raises(HfHubHTTPError) as raised:
        hub.api().create_bucket(BUCKET)
    assert raised.value.response.headers["retry-after"] == "7"
    assert "Retry after 7 seconds" in str(raised.value)


def test_listings_can_be_stale_while_a_head_is_not(hub: OfflineHub, api: HfApi) -> None:
    hub.set_faults(stale_listing_s=0.5)
    api.batch_bucket_files(BUCKET, add=[(b"x", "file")])
    assert _listed(api) == []
    assert not _known(api, "file")
    assert api.get_bucket_file_metadata(BUCKET, "file").size == 1
    wait_until(lambda: _known(api, "file") and _listed(api) == ["file"], limit_s=5)


def test_a_share_of_the_calls_fails_and_the_same_ones_every_time() -> None:
    def outcomes() -> list[bool]:
        faults, draw = Faults(answers=[Answer(500, share=0.2)]), random.Random(0)
        return [faults.answer_to("GET /x", draw) is not None for _ in range(200)]

    assert outcomes() == outcomes()
    assert 20 <= sum(outcomes()) <= 60
