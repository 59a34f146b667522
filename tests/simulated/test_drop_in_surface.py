"""Every route, status, key and header that TRL and the published setup rely on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.simulated.checks import PROMPT, right_tokens
from tests.simulated.conftest import Adapters
from tests.support.proxies import RunningProxy
from tests.support.replicas import SimulatedReplica


@pytest.fixture(scope="module")
def replicas() -> Iterator[list[SimulatedReplica]]:
    """Two replicas that differ in what counts for the fleet."""
    with (
        SimulatedReplica(max_loras=6, max_lora_rank=64, max_model_len=4096) as first,
        SimulatedReplica(max_loras=4, max_lora_rank=16, max_model_len=2048) as second,
    ):
        yield [first, second]


@pytest.fixture(scope="module")
def proxy(replicas: list[SimulatedReplica]) -> Iterator[RunningProxy]:
    with RunningProxy(*(replica.url for replica in replicas)) as proxy:
        yield proxy


def test_what_trl_asks_at_its_start(replicas: list[SimulatedReplica], proxy: RunningProxy) -> None:
    health = proxy.client.get("/health")
    assert (health.status_code, health.content) == (200, b"")
    config = proxy.client.get("/server_info?config_format=json").json()["vllm_config"]
    assert config["lora_config"]["max_loras"] == 4
    assert config["lora_config"]["max_lora_rank"] == 16
    assert config["parallel_config"]["data_parallel_size"] == 1
    first = proxy.client.get("/v1/models").json()["data"][0]
    assert (first["id"], first["max_model_len"], first["parent"]) == ("sim", 2048, None)
    assert proxy.client.get("/get_world_size").json() == {"world_size": 2}


def test_one_sync_as_trl_makes_it(replicas: list[SimulatedReplica], proxy: RunningProxy, adapter: Adapters) -> None:
    assert proxy.client.post("/pause?mode=keep").status_code == 200
    loaded = proxy.load("trl-policy-v1", adapter(1), load_inplace=False)
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'trl-policy-v1' added successfully.")
    assert proxy.client.post("/resume").status_code == 200
    seed = 8_123_456_789_012_345_678
    body = {
        "model": "trl-policy-v1",
        "prompt": PROMPT,
        "max_tokens": 8,
        "temperature": 1.0,
        "logprobs": 0,
        "return_token_ids": True,
        "seed": seed,
    }
    answer = proxy.client.post("/v1/completions", json=body)
    choice = answer.json()["choices"][0]
    assert choice["token_ids"] == right_tokens(adapter(1), seed=seed)
    assert len(choice["logprobs"]["token_logprobs"]) == 8
    assert answer.headers["X-Proxy-Upstream"] in ("0", "1")
    assert answer.headers["X-Proxy-Route"] == "unmatched"
    entry = proxy.client.get("/v1/models").json()["data"][1]
    assert (entry["id"], entry["root"], entry["parent"]) == ("trl-policy-v1", str(adapter(1)), "sim")
    assert proxy.policy("trl-policy-v1")["version"] == 1
    unloaded = proxy.unload("trl-policy-v1")
    assert (unloaded.status_code, unloaded.text) == (
        200,
        "Success: LoRA adapter 'trl-policy-v1' removed successfully.",
    )


def test_the_stats_of_the_published_setup(replicas: list[SimulatedReplica], proxy: RunningProxy) -> None:
    before = proxy.stats()["router"]
    for _ in range(2):
        proxy.complete("sim", prompt=list(range(100)))
    stats = proxy.stats()
    assert [upstream["url"] for upstream in stats["upstreams"]] == [replica.url for replica in replicas]
    assert all({"url", "inflight", "routed"} <= upstream.keys() for upstream in stats["upstreams"])
    router = stats["router"]
    assert {"routed", "affinity", "spilled", "unmatched", "tracked_blocks"} <= router.keys()
    assert router["routed"] == before["routed"] + 2
    assert router["unmatched"] == before["unmatched"] + 1
    assert router["affinity"] == before["affinity"] + 1
    assert router["tracked_blocks"] > 0


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/health", 200),
        ("GET", "/ping", 200),
        ("POST", "/ping", 200),
        ("GET", "/proxy/live", 200),
        ("GET", "/proxy/ready", 200),
        ("GET", "/proxy/stats", 200),
        ("GET", "/proxy/replicas", 200),
        ("GET", "/proxy/policies", 200),
        ("GET", "/metrics", 200),
        ("GET", "/version", 200),
        ("POST", "/reset_prefix_cache", 200),
        ("GET", "/v1/completions", 405),
        ("GET", "/v1/load_lora_adapter", 405),
        ("POST", "/health", 405),
        ("GET", "/proxy/policies/nobody", 404),
        ("GET", "/", 307),
        ("GET", "/proxy/dashboard", 200),
        ("GET", "/proxy/dashboard/page.css", 200),
        ("GET", "/proxy/dashboard/../app.py", 404),
        ("GET", "/proxy/dashboard/nothing.js", 404),
        ("GET", "/docs", 404),
        ("GET", "/openapi.json", 404),
        ("POST", "/collective_rpc", 404),
        ("POST", "/sleep", 404),
        ("POST", "/scale_elastic_ep", 404),
        ("GET", "/sim/state", 404),
    ],
)
def test_every_path_answers_or_says_that_it_is_not_forwarded(
    proxy: RunningProxy, method: str, path: str, status: int
) -> None:
    answer = proxy.client.request(method, path)
    assert answer.status_code == status
    if status >= 400:
        error = answer.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["code"] == status
        assert answer.headers["X-Proxy-Error"]


def test_metrics_count_what_happened(proxy: RunningProxy, adapter: Adapters) -> None:
    assert proxy.load("measured", adapter(2)).status_code == 200
    proxy.complete("measured")
    text = proxy.client.get("/metrics").text
    assert 'lora_sync_rollouts_total{outcome="answered"' in text
    assert 'lora_sync_load_seconds_count{outcome="live"}' in text
