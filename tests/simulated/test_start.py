"""How the proxy starts: bad configuration is one sentence and exit 64; what replicas lack is said where people look."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from proxy.settings import RETIRED_NAMES
from tests.simulated.checks import right_tokens
from tests.simulated.conftest import Adapters
from tests.support.proxies import RunningProxy, proxy_command
from tests.support.replicas import SimulatedReplica

GOOD = "http://127.0.0.1:8001"


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--host", "no such host"], 64, "cannot listen on port 8001 on no such host"),
        (["--port", "99999"], 2, "'--port'"),
        (["--max-loras", "0"], 2, "'--max-loras'"),
    ],
)
def test_a_simulator_that_cannot_start_says_why(arguments: list[str], status: int, said: str) -> None:
    ended = proxy_command({}, "sim", *arguments)
    assert (ended.returncode, ended.stdout, "Traceback" in ended.stderr) == (status, "", False)
    assert said in ended.stderr


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({}, "UPSTREAM_URLS is empty"),
        ({"UPSTREAM_URLS": ""}, "UPSTREAM_URLS is empty"),
        ({"UPSTREAM_URLS": "ftp://host"}, "not an http or https URL"),
        ({"UPSTREAM_URLS": "http://[::1"}, "UPSTREAM_URLS has 'http://[::1', which is not a URL"),
        ({"UPSTREAM_URLS": f"{GOOD},{GOOD}/"}, f"lists {GOOD} twice"),
        ({"UPSTREAM_URLS": "http://A:1 HTTP://a:1"}, "lists http://a:1 twice"),
        ({"UPSTREAM_URLS": "http://localhost:8000"}, "where the proxy itself listens"),
        ({"UPSTREAM_URLS": GOOD, "PROXY_PORT": "many"}, "PROXY_PORT='many'"),
        ({"UPSTREAM_URLS": GOOD, "PROXY_PROBE_S": "inf"}, "PROXY_PROBE_S='inf'"),
        ({"UPSTREAM_URLS": GOOD, "PROXY_HOST": "no such host"}, "on no such host cannot be bound"),
        ({"UPSTREAM_URLS": GOOD, "HF_TOKEN": "one\ntwo"}, "HF_TOKEN holds characters"),
    ],
)
def test_bad_configuration_is_one_sentence(environment: dict[str, str], said: str) -> None:
    ended = proxy_command(environment)
    assert ended.returncode == 64
    assert ended.stdout == ""
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1
    assert "two" not in ended.stderr


def test_a_taken_port_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = proxy_command({"UPSTREAM_URLS": GOOD, "PROXY_PORT": str(port)})
    assert ended.returncode == 64
    assert len(ended.stderr.strip().splitlines()) == 1
    assert f"Port {port} on 127.0.0.1 cannot be bound: it is in use" in ended.stderr


def test_retired_and_mistyped_names_are_logged_once() -> None:
    names = {**dict.fromkeys(RETIRED_NAMES, "16"), "PROXY_PROT": "8000"}
    with SimulatedReplica() as replica, RunningProxy(replica.url, **names) as proxy:
        proxy.complete("sim")
        log = proxy.log()
    for name in names:
        assert log.count(f"{name} is ignored: ") == 1


@pytest.mark.parametrize(
    ("settings", "said", "status"),
    [
        ({"runtime_lora_updating": False}, "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1", 404),
        ({"data_parallel_size": 2}, "--data-parallel-size 1", 404),
        ({"dev_mode": False}, "VLLM_SERVER_DEV_MODE=1", 200),
    ],
)
def test_what_a_replica_lacks_is_said(adapter: Adapters, settings: dict[str, Any], said: str, status: int) -> None:
    with (
        SimulatedReplica() as whole,
        SimulatedReplica(**settings) as lacking,
        RunningProxy(whole.url, lacking.url) as proxy,
    ):
        assert proxy.states() == ["ready", "ready"]
        first, second = proxy.replicas()
        assert first["lacks"] == []
        assert len(second["lacks"]) == 1 and said in second["lacks"][0]
        answer = proxy.load("policy-v1", adapter(1))
        assert answer.status_code == status
        assert said in answer.text and lacking.url in answer.text and whole.url not in answer.text
        managed = proxy.client.get("/proxy/policies").json()["policies"]
        assert [policy["name"] for policy in managed] == (["policy-v1"] if status == 200 else [])
        assert proxy.complete("sim") == right_tokens("base:sim")
        assert sum(said in line for line in proxy.log().splitlines()) == 1
        size = settings.get("data_parallel_size", 1)
        info = proxy.client.get("/server_info?config_format=json").json()
        assert info["vllm_config"]["parallel_config"]["data_parallel_size"] == size


def test_help_and_version() -> None:
    told = proxy_command({}, "--help")
    assert told.returncode == 0
    assert "UPSTREAM_URLS" in told.stdout
    assert proxy_command({}, "--version").stdout.startswith("lora-sync-proxy ")
