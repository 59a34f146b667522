"""What once crashed or hung, found by `python -m benchmarks.fuzz` and by reading. Each is refused in its own words."""

from __future__ import annotations

import io
import json
import struct
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest

from proxy.artifacts.bucket import BucketFolder, HubFile
from proxy.artifacts.check import inspect
from proxy.artifacts.checkpoint import INDEX, MODEL_CONFIG, read_checkpoint
from proxy.artifacts.digest import load_config
from proxy.artifacts.hub_listing import HubAccess, Landing
from proxy.artifacts.manifest import MANIFEST_FILE, verify_manifest
from proxy.artifacts.weights import read_header
from proxy.contract import Announcement, LoadRequest, version_of
from proxy.controlplane.announcing import refuse_early
from proxy.controlplane.answer import Answer
from proxy.errors import ArtifactError
from proxy.routing.load import usage_of
from proxy.settings import base_url
from proxy.simulator.adapters import lora_config
from trainer_client.errors import ProxyError
from trainer_client.proxy_api import ProxyApi

DEEP = "[" * 100_000
LONG_NUMBER = "9" * 5000
"""Python reads no number of more than 4,300 digits, and makes no float of one of 309."""


@pytest.mark.parametrize("entry", ['{"data_offsets":[1e999]}', '{"dtype":"F32","shape":[1e999],"data_offsets":[0,4]}'])
def test_infinite_offsets_and_shapes_in_weights(entry: str) -> None:
    header = f'{{"w":{entry}}}'.encode()
    with pytest.raises(ArtifactError, match="not safetensors"):
        read_header(io.BytesIO(struct.pack("<Q", len(header)) + header + bytes(4)), source="file")


@pytest.mark.parametrize("named", [1, [], None, "..", "", "a\0.safetensors", "a/b.safetensors", "..\\x.safetensors"])
def test_an_index_that_names_no_file(tmp_path: Path, named: Any) -> None:
    (tmp_path / MODEL_CONFIG).write_text("{}")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"w": named}}))
    with pytest.raises(ArtifactError, match="no file in its own directory"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("told", [5, "A", [1, None], {}])
def test_architectures_that_are_no_list_of_names(tmp_path: Path, told: Any) -> None:
    header = b"{}"
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    (tmp_path / MODEL_CONFIG).write_text(json.dumps({"architectures": told}))
    assert all(isinstance(name, str) for name in read_checkpoint(tmp_path).architectures)


def test_a_deep_adapter_config() -> None:
    with pytest.raises(ArtifactError, match="not JSON"):
        load_config(DEEP.encode(), source="file")


@pytest.mark.parametrize("pattern", ["([a-z0-9_.]+)+!", "(.*)*x", "(a|b){9}", ".*.*.*!", "(a|a)?" * 9, "a{9999999999}"])
def test_a_rank_pattern_that_takes_for_ever(pattern: str) -> None:
    name = "base_model.model.model.layers.10.self_attn.q_proj.lora_A.weight"
    header = b'{"%b":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]}}' % name.encode()
    weights = io.BytesIO(struct.pack("<Q", len(header)) + header + bytes(16))
    config = json.dumps({**lora_config(rank=2), "rank_pattern": {pattern: 2}}).encode()
    began = time.process_time()
    with pytest.raises(ArtifactError, match="rank_pattern"):
        inspect(config, weights, source="file")
    assert time.process_time() - began < 1


@pytest.mark.parametrize(
    "pattern", ["q_proj", r"layers\.\d+\.self_attn\.[qkv]_proj", "model.layers.(0|1).*", "(?:up|down)_proj"]
)
def test_a_rank_pattern_as_people_write_it_is_taken(pattern: str) -> None:
    config = json.dumps({**lora_config(rank=2), "rank_pattern": {pattern: 4}}).encode()
    header = b"{}"
    found = inspect(config, io.BytesIO(struct.pack("<Q", len(header)) + header), source="file")
    assert found.config.max_rank == 4


@pytest.mark.parametrize("path", ["a\0b", "a\ud800"])
def test_a_manifest_whose_file_no_file_can_be(tmp_path: Path, path: str) -> None:
    told = {
        "run": "r", "version": 1, "step": 0, "name": "p", "base_model": "", "digest": "a" * 64,
        "config_digest": "a" * 64, "created": "2026-01-01T00:00:00Z",
        "files": [{"path": path, "size": 1, "sha256": "b"}],
    }  # fmt: skip
    (tmp_path / MANIFEST_FILE).write_text(json.dumps(told))
    announced = Announcement.model_validate({**told, "files": []})
    with pytest.raises(ArtifactError):
        verify_manifest(tmp_path, announced, "p")


def test_a_path_with_nul_in_it() -> None:
    refused = refuse_early(LoadRequest(lora_name="p", lora_path="/a\0b"), base_models=(), roots=("/tmp",))
    assert refused is not None and refused.status == 400 and "zero byte" in refused.message


def test_a_version_of_5000_digits_is_none() -> None:
    assert version_of(f"p-v{LONG_NUMBER}") is None
    assert version_of("p-v123456789012345678") == 123456789012345678


@pytest.mark.parametrize("digits", ["9" * 400, LONG_NUMBER])
def test_a_usage_of_hundreds_of_digits_is_none(digits: str) -> None:
    usage = usage_of(b'"usage":{"prompt_tokens":3,"completion_tokens":%b}' % digits.encode())
    assert usage.completion_tokens is None


@pytest.mark.parametrize(
    ("status", "headers", "content"),
    [
        (429, {"Retry-After": LONG_NUMBER}, ""),
        (503, {"Retry-After": "9" * 400}, ""),
        (429, {"RateLimit": f'"api";r=0;t={LONG_NUMBER}'}, ""),
        (429, {"RateLimit": '"api";r=0;t=' + "9" * 400}, ""),
        (200, {}, DEEP),
    ],
    ids=["digits", "no float", "limit's digits", "limit", "deep"],
)
def test_an_answer_of_the_hub_that_makes_no_sense(status: int, headers: dict[str, str], content: str) -> None:
    landing = Landing(
        BucketFolder("me/runs"), [HubFile("x")], hub=HubAccess("http://h", {}), deadline=1, clock=lambda: 0
    )
    try:
        landing.learn(httpx2.Response(status, headers=headers, text=content))
    except ArtifactError as error:
        assert "the Hub answers" in str(error)  # it asks to wait for longer than there is
    assert not landing.whole


def test_a_size_of_the_hub_that_is_no_number() -> None:
    landing = Landing(
        BucketFolder("me/runs"), [HubFile("x", 1)], hub=HubAccess("http://h", {}), deadline=9, clock=lambda: 0
    )
    landing.learn(httpx2.Response(200, text="[]"))
    landing.learn(httpx2.Response(200, headers={"X-Xet-Hash": "a", "X-Linked-Size": "many"}))
    assert "-1 bytes" in repr(landing._unseen)


def test_a_replica_whose_answer_is_deep_is_not_json() -> None:
    answer = Answer(200, DEEP)
    assert answer.json() is None and answer.ok and answer.message


def test_a_proxy_whose_refusal_is_deep() -> None:
    api = ProxyApi("http://proxy", timeout_s=1, connect_timeout_s=1, retry_timeout_s=0)
    api._http = httpx2.Client(
        transport=httpx2.MockTransport(lambda _: httpx2.Response(400, stream=httpx2.ByteStream(DEEP.encode())))
    )
    with pytest.raises(ProxyError, match="HTTP 400"):
        api.resume()


@pytest.mark.parametrize(
    "url", ["http://ā", "http://a b", "http://a/b c HTTP/1.1", "http://a\n", "http://a/\r\nx: y", "http://a\0"]
)
def test_a_url_that_would_not_stay_one_line(url: str) -> None:
    with pytest.raises(ValueError, match="character"):
        base_url(url)


def test_a_url_with_an_empty_user() -> None:
    with pytest.raises(ValueError, match="credentials"):
        base_url("http://@host")
