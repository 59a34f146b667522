"""Several requests, adapters and clients at once."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from tests.support.replicas import LONG, Replica, wait_until

STARTS_WITHIN_S = 30
NOTICED_WITHIN_S = 2
"""0.1 s on an idle machine; the long generation would go on for many seconds."""


def raw_request(replica: Replica, path: str, **body: object) -> socket.socket:
    content = json.dumps({"ignore_eos": True, **LONG, **body}).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    host, port = replica.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=60)
    connection.sendall(head.encode() + content)
    return connection


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [5, 6, 7], "n": 4}),
        ("/v1/completions", {"prompt": [5, 6, 7], "n": 4, "stream": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "n": 4}),
    ],
    ids=["whole", "stream", "chat"],
)
def test_a_client_that_goes_away_aborts_its_request(replica: Replica, path: str, body: dict[str, object]) -> None:
    with raw_request(replica, path, **body):
        wait_until(lambda: replica.running() == 4, limit_s=STARTS_WITHIN_S, what="running")
    wait_until(lambda: replica.running() == 0, limit_s=NOTICED_WITHIN_S, what="aborted")


def test_a_half_closed_client_counts_as_gone(replica: Replica) -> None:
    with raw_request(replica, "/v1/completions", prompt=[5, 6, 7], n=4) as connection:
        wait_until(lambda: replica.running() == 4, limit_s=STARTS_WITHIN_S, what="running")
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(100) == b""
    wait_until(lambda: replica.running() == 0, limit_s=NOTICED_WITHIN_S, what="aborted")


def test_a_client_that_goes_away_while_its_request_is_held_takes_it_along(replica: Replica) -> None:
    replica.client.post("/pause?mode=keep")
    with raw_request(replica, "/v1/completions", prompt=[5, 6, 7]), replica.opened_stream():
        pass
    wait_until(
        lambda: replica.client.post("/abort_requests", json={}).json()["aborted"] == 0, what="nothing left to abort"
    )


def test_requests_for_more_adapters_than_slots_wait(replica: Replica, loaded: Callable[..., str]) -> None:
    names = [loaded(seed) for seed in (1, 2, 3, 4)]
    with ExitStack() as running:
        for name in names[:3]:
            running.enter_context(replica.in_flight(name, n=1))
        with ThreadPoolExecutor(1) as threads:
            fourth = threads.submit(replica.completion, names[3], **LONG)
            wait_until(
                lambda: replica.metric("vllm:num_requests_waiting_by_reason", reason="deferred") == 1,
                limit_s=STARTS_WITHIN_S,
                what="deferred",
            )
            assert replica.running() == 3
            assert replica.metric("vllm:num_requests_waiting") == 1
            assert replica.metric("vllm:num_requests_waiting_by_reason", reason="capacity") == 0
            assert replica.complete() == replica.complete()  # the base model needs no slot
            assert not fourth.done()
            replica.client.post("/abort_requests", json={})


def test_requests_for_more_adapters_than_slots_are_all_answered_rightly(
    replica: Replica, loaded: Callable[..., str]
) -> None:
    names = [loaded(seed) for seed in range(1, 7)]
    alone = [replica.complete(name) for name in names]
    with ThreadPoolExecutor(12) as threads:
        together = list(threads.map(replica.complete, names * 2))
    assert together == alone * 2


def test_more_sequences_than_run_at_once_wait_for_capacity(replica: Replica) -> None:
    with replica.in_flight(n=16), ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(replica.completion)
        wait_until(
            lambda: replica.metric("vllm:num_requests_waiting_by_reason", reason="capacity") == 1 or waiting.done(),
            limit_s=STARTS_WITHIN_S,
            what="waiting",
        )
        assert not waiting.done()
        replica.client.post("/abort_requests", json={})


def test_loads_go_through_while_requests_run(replica: Replica, loaded: Callable[..., str]) -> None:
    with replica.in_flight(loaded(1), n=8) as sent:
        loaded(2)
        assert not sent.done()


def test_an_idle_connection_is_closed_after_five_seconds(replica: Replica) -> None:
    host, port = replica.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=15) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")
        since = time.monotonic()
        assert connection.recv(1000) == b""
        assert 3 < time.monotonic() - since < 8
