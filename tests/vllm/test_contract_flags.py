"""A replica without VLLM_ALLOW_RUNTIME_LORA_UPDATING and VLLM_SERVER_DEV_MODE, but with --api-key."""

from __future__ import annotations

from collections.abc import Callable

from tests.support.replicas import Replica

NEEDS_A_FLAG = [
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/unload_lora_adapter"),
    ("POST", "/pause"),
    ("POST", "/resume"),
    ("GET", "/is_paused"),
    ("GET", "/server_info"),
    ("POST", "/reset_prefix_cache"),
    ("GET", "/get_world_size"),
    ("GET", "/weight_info"),
    ("POST", "/update_weight_version"),
    ("POST", "/abort_requests"),
]


def test_a_plain_replica_with_a_key(own_replica: Callable[..., Replica]) -> None:
    replica = own_replica(plain=True)
    client = replica.client

    for method, path in NEEDS_A_FLAG:
        answer = client.request(method, path, json={})
        assert (answer.status_code, answer.json()) == (404, {"detail": "Not Found"}), path

    key = client.headers.pop("authorization")
    for given in ({}, {"authorization": "Bearer wrong"}, {"x-api-key": key.removeprefix("Bearer ")}):
        for method, path in [
            ("GET", "/v1/models"),
            ("POST", "/v1/completions"),
            ("POST", "/v1/chat/completions"),
            ("POST", "/v1/load_lora_adapter"),
        ]:
            answer = client.request(method, path, headers=given)
            assert (answer.status_code, answer.json()) == (401, {"error": "Unauthorized"}), path
    for path in ("/health", "/ping", "/version", "/load", "/metrics"):
        assert client.get(path).status_code == 200, path
    assert client.post("/tokenize", json={"prompt": "x"}).status_code == 200

    for right in (key, key.replace("Bearer", "bearer")):
        assert client.get("/v1/models", headers={"authorization": right}).status_code == 200
