"""What goes into the offline Hub through the real huggingface_hub and hf_xet comes out the same."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import hf_xet
import httpx2
import numpy as np
import pytest
from huggingface_hub import HfApi, HfFileSystem
from huggingface_hub.errors import BucketNotFoundError, EntryNotFoundError, HfHubHTTPError, RemoteEntryNotFoundError

from tests.hub.conftest import BUCKET
from tests.hub.hub_process import TOKEN, USER
from tests.hub.offline_hub import OfflineHub

_MB = 1_000_000
FILES = {
    "v1/empty": b"",
    "v1/adapter_config.json": b'{"r": 8}',
    "v1/noise.bin": random.Random(1).randbytes(5 * _MB),
    "v1/zeros.bin": bytes(_MB),
    "v1/text.txt": b"all work and no play\n" * 50_000,
    "v1/floats.bin": np.random.default_rng(1).normal(size=500_001).astype(np.float32).tobytes() + b"odd",
    "v10/one byte é.bin": b"x",
}
"""Contents that Xet packs in every way it has: as they are, with LZ4, and grouped by bytes; some chunks come twice."""


def _download(api: HfApi, paths: list[str], directory: Path) -> dict[str, bytes]:
    local = {path: directory / f"{number}" for number, path in enumerate(paths)}
    api.download_bucket_files(BUCKET, list(local.items()), raise_on_missing_files=True)
    return {path: file.read_bytes() for path, file in local.items()}


def _paths(api: HfApi, prefix: str | None = None, *, recursive: bool = True) -> list[str]:
    return [entry.path for entry in api.list_bucket_tree(BUCKET, prefix, recursive=recursive)]


def test_a_bucket_has_one_owner_and_one_life(hub: OfflineHub) -> None:
    api = hub.api()
    assert api.whoami()["name"] == USER
    assert api.create_bucket("runs", private=True).bucket_id == BUCKET
    with pytest.raises(HfHubHTTPError, match="409"):
        api.create_bucket(BUCKET)
    api.create_bucket(BUCKET, exist_ok=True)
    with pytest.raises(HfHubHTTPError, match="403"):
        api.create_bucket("somebody/runs")
    assert [bucket.id for bucket in api.list_buckets()] == [BUCKET]
    assert api.bucket_info(BUCKET).private
    api.delete_bucket(BUCKET)
    with pytest.raises(BucketNotFoundError):
        api.bucket_info(BUCKET)


def test_a_stranger_is_let_in_nowhere(hub: OfflineHub) -> None:
    with pytest.raises(HfHubHTTPError, match="401"):
        HfApi(endpoint=hub.url, token="hf_wrong").create_bucket(BUCKET)


def test_uploading_to_a_missing_bucket_fails(hub: OfflineHub) -> None:
    with pytest.raises(ConnectionError):
        hub.api().batch_bucket_files("tester/nothing", add=[(b"x", "x")])


def test_bytes_come_back_as_they_went(api: HfApi, tmp_path: Path) -> None:
    api.batch_bucket_files(BUCKET, add=[(content, path) for path, content in FILES.items()])
    assert _download(api, list(FILES), tmp_path) == FILES
    info = api.bucket_info(BUCKET)
    assert (info.total_files, info.size) == (len(FILES), sum(map(len, FILES.values())))


def test_files_from_disk_are_listed_with_the_hash_that_hf_xet_computes(api: HfApi, tmp_path: Path) -> None:
    local = []
    for number, content in enumerate(FILES.values()):
        (tmp_path / str(number)).write_bytes(content)
        local.append(str(tmp_path / str(number)))
    api.batch_bucket_files(BUCKET, add=list(zip(local, FILES, strict=True)))
    listed = {info.path: (info.xet_hash, info.size) for info in api.get_bucket_paths_info(BUCKET, [*FILES, "missing"])}
    hashed = [(file.hash, file.file_size) for file in hf_xet.hash_files(local)]
    assert listed == dict(zip(FILES, hashed, strict=True))


@pytest.mark.parametrize("path", FILES)
def test_a_plain_download_needs_no_xet(hub: OfflineHub, api: HfApi, path: str) -> None:
    api.batch_bucket_files(BUCKET, add=[(FILES[path], path)])
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with httpx2.Client(headers=headers, trust_env=False) as client:
        answer = client.get(f"{hub.url}/buckets/{BUCKET}/resolve/{path}")
    assert (answer.status_code, answer.content) == (200, FILES[path])
    metadata = api.get_bucket_file_metadata(BUCKET, path)
    assert metadata.size == len(FILES[path])
    assert answer.headers["etag"] == f'"{metadata.xet_file_data.file_hash}"'


def test_parts_of_a_file_can_be_read(hub: OfflineHub, api: HfApi) -> None:
    content = FILES["v1/noise.bin"]
    api.batch_bucket_files(BUCKET, add=[(content, "noise.bin")])
    files = HfFileSystem(endpoint=hub.url, token=TOKEN, skip_instance_cache=True)
    with files.open(f"hf://buckets/{BUCKET}/noise.bin", "rb", block_size=_MB // 10) as file:
        for start, end in [(0, 1), (1_234_567, 1_234_999), (4 * _MB, 4 * _MB + 300_000), (5 * _MB - 1, 5 * _MB)]:
            file.seek(start)
            assert file.read(end - start) == content[start:end]


def test_fsspec_writes_and_reads_a_bucket(hub: OfflineHub, api: HfApi) -> None:
    files = HfFileSystem(endpoint=hub.url, token=TOKEN, skip_instance_cache=True)
    files.pipe(f"hf://buckets/{BUCKET}/v1/config.json", b"{}")
    assert files.cat(f"hf://buckets/{BUCKET}/v1/config.json") == b"{}"
    assert files.ls(f"hf://buckets/{BUCKET}/v1", detail=False) == [f"buckets/{BUCKET}/v1/config.json"]
    files.rm(f"hf://buckets/{BUCKET}/v1/config.json")
    assert _paths(api) == []


def test_a_prefix_is_lexical_and_a_listing_can_stop_at_directories(api: HfApi) -> None:
    paths = ["v1/a", "v1/deep/b", "v10/c", "top"]
    api.batch_bucket_files(BUCKET, add=[(b"x", path) for path in paths])
    assert _paths(api) == sorted(paths)
    assert _paths(api, recursive=False) == ["top", "v1", "v10"]
    assert _paths(api, "v1") == ["v1/a", "v1/deep/b", "v10/c"]
    assert _paths(api, "v1/") == ["v1/a", "v1/deep/b"]
    assert _paths(api, "v1", recursive=False) == ["v1/a", "v1/deep", "v10"]
    assert _paths(api, "v1/", recursive=False) == ["v1/a", "v1/deep"]


def test_long_listings_come_in_pages(api: HfApi) -> None:
    paths = [f"file-{number:04}" for number in range(2001)]
    api.batch_bucket_files(BUCKET, add=[(b"x", path) for path in paths])
    assert _paths(api) == paths


def test_files_are_replaced_copied_and_deleted(api: HfApi, tmp_path: Path) -> None:
    api.batch_bucket_files(BUCKET, add=[(b"old", "a"), (b"other", "b")])
    api.batch_bucket_files(BUCKET, add=[(b"new", "a")])
    [info] = api.get_bucket_paths_info(BUCKET, ["a"])
    api.batch_bucket_files(BUCKET, copy=[("bucket", BUCKET, info.xet_hash, "c")], delete=["b", "never there"])
    assert _paths(api) == ["a", "c"]
    assert _download(api, ["a", "c"], tmp_path) == {"a": b"new", "c": b"new"}
    with pytest.raises(EntryNotFoundError):
        _download(api, ["b"], tmp_path)
    with pytest.raises(RemoteEntryNotFoundError):
        api.get_bucket_file_metadata(BUCKET, "b")


_PUBLISH = """
import random, sys
from huggingface_hub import HfApi
content = random.Random(3).randbytes(2_000_000) + sys.argv[1].encode()
HfApi().batch_bucket_files("tester/runs", add=[(content, sys.argv[1])])
"""


def test_another_process_finds_it_by_its_environment_and_uploads_only_what_is_new(
    hub: OfflineHub, api: HfApi, tmp_path: Path
) -> None:
    stored = []
    for name in ("first", "second"):
        own_cache = {"HF_XET_CACHE": str(tmp_path / name)}
        environment = {**os.environ, **hub.environment(), **own_cache}
        subprocess.run([sys.executable, "-c", _PUBLISH, name], env=environment, check=True, timeout=15)
        stored.append(hub.stored_bytes)
    assert _paths(api) == ["first", "second"]
    assert stored[0] > 2 * _MB
    assert stored[1] - stored[0] < _MB / 10


def test_the_feed_tells_of_every_change(hub: OfflineHub, api: HfApi) -> None:
    api.batch_bucket_files(BUCKET, add=[(b"before", "before")])
    url = f"{hub.url}/api/buckets/{BUCKET}/events"
    seen = []
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with httpx2.Client(headers=headers, trust_env=False, timeout=5) as client, client.stream("GET", url) as feed:
        for line in feed.iter_lines():
            if line == "event: ready":
                api.batch_bucket_files(BUCKET, add=[(b"new", "new")], delete=["before"])
            if "changes" in (data := json.loads(line.removeprefix("data: ")) if line.startswith("data: ") else {}):
                seen += [(change["op"], change["path"]) for change in data["changes"]]
            if len(seen) == 2:
                break
    assert sorted(seen) == [("add", "new"), ("delete", "before")]
