"""What a replica tells about itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.replicas import Replica, wait_until


def test_health_and_ping_are_empty_200s(replica: Replica) -> None:
    for method, path in [("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")]:
        answer = replica.client.request(method, path)
        assert (answer.status_code, answer.text) == (200, ""), path


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/version", {"version": "0.32.0"}),
        ("/load", {"server_load": 0}),
        ("/get_world_size", {"world_size": 1}),
        ("/is_paused", {"is_paused": False}),
    ],
)
def test_small_facts(replica: Replica, path: str, expected: dict[str, object]) -> None:
    assert replica.client.get(path).json() == expected


def test_unknown_paths_and_methods_answer_in_the_frameworks_shape(replica: Replica) -> None:
    for method, path, status, text in [
        ("GET", "/nope", 404, "Not Found"),
        ("GET", "/health_generate", 404, "Not Found"),
        ("POST", "/health", 405, "Method Not Allowed"),
        ("GET", "/v1/completions", 405, "Method Not Allowed"),
        ("OPTIONS", "/v1/completions", 405, "Method Not Allowed"),
    ]:
        answer = replica.client.request(method, path)
        assert (answer.status_code, answer.json()) == (status, {"detail": text}), path
    assert replica.client.head("/health").status_code == 405


def test_models_lists_the_base_model_first_then_adapters_with_root_and_parent(
    replica: Replica, loaded: Callable[..., str]
) -> None:
    names = [loaded(1), loaded(2)]
    answer = replica.client.get("/v1/models").json()
    assert answer["object"] == "list"
    base, *adapters = answer["data"]
    assert base["id"] == replica.base_model
    assert base["parent"] is None
    assert base["max_model_len"] == 2048
    assert [card["id"] for card in adapters] == names
    for card in adapters:
        assert card["parent"] == replica.base_model
        assert card["root"].startswith("/")
        assert card["max_model_len"] is None
    for card in answer["data"]:
        assert set(card) == {
            "id", "object", "created", "owned_by", "root", "parent", "max_model_len", "permission"
        }  # fmt: skip


def test_server_info_tells_the_configuration(replica: Replica) -> None:
    info = replica.client.get("/server_info?config_format=json").json()
    assert set(info) == {"vllm_config", "vllm_env", "system_env"}
    config = info["vllm_config"]
    assert config["model_config"]["served_model_name"] == replica.base_model
    assert config["model_config"]["dtype"] == "torch.bfloat16"
    assert config["model_config"]["max_model_len"] == 2048
    lora = config["lora_config"]
    assert (lora["max_lora_rank"], lora["max_loras"], lora["max_cpu_loras"]) == (8, 3, 4)
    assert config["parallel_config"]["data_parallel_size"] == 1
    assert config["parallel_config"]["world_size"] == 1
    cache = config["cache_config"]
    assert (cache["block_size"], cache["num_gpu_blocks"]) == (32, 512)
    assert cache["kv_cache_size_tokens"] == 32 * 512
    assert cache["enable_prefix_caching"] is True
    assert config["scheduler_config"]["max_num_seqs"] == 16
    assert isinstance(config["instance_id"], str)
    assert info["vllm_env"]["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] is True
    assert info["vllm_env"]["VLLM_SERVER_DEV_MODE"] is True


def test_server_info_without_a_format_tells_the_configuration_as_text(replica: Replica) -> None:
    assert isinstance(replica.client.get("/server_info").json()["vllm_config"], str)


def test_metrics_count_tokens_and_name_the_cache(replica: Replica, prompt: list[int]) -> None:
    def counted(name: str) -> float:
        return replica.metric(f"vllm:{name}_total")

    before = {name: counted(name) for name in ("prompt_tokens", "generation_tokens", "prefix_cache_queries")}
    replica.complete(prompt=prompt, max_tokens=8)
    wait_until(lambda: counted("generation_tokens") >= before["generation_tokens"] + 8, what="tokens counted")
    assert counted("prompt_tokens") == before["prompt_tokens"] + 400
    assert counted("prefix_cache_queries") == before["prefix_cache_queries"] + 400
    assert replica.metric("vllm:num_requests_running", model_name=replica.base_model) == 0
    assert replica.metric("vllm:num_requests_waiting") == 0
    assert replica.metric("vllm:cache_config_info", block_size="32", num_gpu_blocks="512") == 1
    assert replica.metric("vllm:lora_requests_info", max_lora="3") > 0
