"""A client that goes away, at every moment of its request: the replica stops at once and every lease comes back."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from proxy.demo.processes import free_port
from tests.simulated.checks import PROMPT, WaitingProxy, right_tokens, wait_quiet
from tests.simulated.conftest import Adapters
from tests.support.proxies import RunningProxy
from tests.support.replicas import SimulatedReplica, simulators, wait_until


@pytest.fixture(scope="module")
def replicas() -> Iterator[list[SimulatedReplica]]:
    with simulators(3) as replicas:
        yield replicas


@pytest.fixture(scope="module")
def proxy(replicas: list[SimulatedReplica], adapter: Adapters) -> Iterator[RunningProxy]:
    with RunningProxy(*(replica.url for replica in replicas)) as proxy:
        assert proxy.load("policy-v1", adapter(1)).status_code == 200
        yield proxy


def _request(*, model: str = "policy-v1", **fields: Any) -> bytes:
    body = json.dumps({"model": model, "prompt": PROMPT, "max_tokens": 3000, **fields}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: p\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    return head % len(body) + body


def _connect(proxy: RunningProxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=10)


def _counts(replicas: list[SimulatedReplica], what: str) -> int:
    return sum(replica.state()[what] for replica in replicas)


def test_while_it_waits_for_a_whole_answer(replicas: list[SimulatedReplica], proxy: RunningProxy) -> None:
    aborted = _counts(replicas, "aborted")
    connections = [_connect(proxy) for _ in range(20)]
    for connection in connections:
        connection.sendall(_request())
    wait_until(lambda: _counts(replicas, "in_flight") == 20, what="20 rollouts run")
    assert proxy.inflight() == proxy.policy("policy-v1")["leases"] == 20
    for connection in connections:
        connection.close()
    wait_quiet(proxy, *replicas)
    assert _counts(replicas, "aborted") == aborted + 20


def test_with_a_reset(replicas: list[SimulatedReplica], proxy: RunningProxy) -> None:
    connection = _connect(proxy)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    connection.sendall(_request())
    wait_until(lambda: _counts(replicas, "in_flight") == 1, what="the rollout runs")
    connection.close()
    wait_quiet(proxy, *replicas)


@pytest.mark.parametrize("sent", [20, 150])
def test_before_it_has_sent_everything(replicas: list[SimulatedReplica], proxy: RunningProxy, sent: int) -> None:
    started = proxy.stats()["router"]["routed"]
    connection = _connect(proxy)
    connection.sendall(_request()[:sent])
    connection.close()
    assert proxy.complete("policy-v1")
    assert proxy.stats()["router"]["routed"] == started + 1
    wait_quiet(proxy, *replicas)


def test_right_after_its_answer(replicas: list[SimulatedReplica], proxy: RunningProxy) -> None:
    for _ in range(10):
        with _connect(proxy) as connection:
            connection.sendall(_request(max_tokens=1))
            assert connection.recv(15).startswith(b"HTTP/1.1 200")
    wait_quiet(proxy, *replicas)


def test_while_no_replica_is_ready(adapter: Adapters) -> None:
    port = free_port()
    with WaitingProxy(f"http://127.0.0.1:{port}") as proxy:
        connections = [_connect(proxy) for _ in range(5)]
        for connection in connections:
            connection.sendall(_request(model="sim"))
        for connection in connections[1:]:
            connection.close()
        with SimulatedReplica(port=port) as replica:
            proxy.wait_states("ready")
            wait_until(lambda: replica.state()["in_flight"] == 1, what="only the client that stayed is served")
            connections[0].close()
            wait_quiet(proxy, replica)
            assert replica.state()["calls"]["POST /v1/completions"] == 1


def test_the_load_of_a_caller_that_left_goes_on(
    replicas: list[SimulatedReplica], proxy: RunningProxy, adapter: Adapters
) -> None:
    body = json.dumps({"lora_name": "left-v1", "lora_path": str(adapter(2))}).encode()
    head = b"POST /v1/load_lora_adapter HTTP/1.1\r\nHost: p\r\nContent-Length: %d\r\n\r\n"
    replicas[0].set_faults(late={"attempts": 2})
    try:
        with _connect(proxy) as connection:
            connection.sendall(head % len(body) + body)
            wait_until(lambda: proxy.policy("left-v1").get("state") == "loading", what="it is loading")
        # TRL's caller would be gone for good; TrainerClient announces again and must find it live or join it.
        again = proxy.load("left-v1", adapter(2))
    finally:
        replicas[0].clear_faults()
    assert again.status_code == 200, again.text
    assert proxy.policy("left-v1")["state"] == "live"
    assert len(proxy.policy("left-v1")["held_by"]) == 3
    assert proxy.complete("left-v1") == right_tokens(adapter(2))
    assert proxy.unload("left-v1").status_code == 200
