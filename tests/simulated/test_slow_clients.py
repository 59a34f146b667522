"""Clients that send byte by byte, send too much, or say nothing: none of them holds a connection for ever."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.simulated.checks import right_tokens
from tests.support.proxies import RunningProxy
from tests.support.raw_http import LIMIT_S, connected, say, statuses, until_closed
from tests.support.replicas import SimulatedReplica, wait_until

START = b"POST /v1/completions HTTP/1.1\r\nhost: p\r\n"


@pytest.fixture(scope="module")
def proxy(pair: list[SimulatedReplica]) -> Iterator[RunningProxy]:
    with RunningProxy(pair[0].url, PROXY_REQUEST_TIMEOUT_S="1") as proxy:
        yield proxy


def trickle(connection: socket.socket, raw: bytes) -> bytes:
    """Send a byte every 50 ms until the proxy answers or closes; return what it said. It must not take them all."""
    connection.settimeout(0.05)
    for at in range(len(raw)):
        try:
            connection.sendall(raw[at : at + 1])
            return connection.recv(1) and connection.recv(65536)
        except TimeoutError:
            continue
        except ConnectionError:
            return b""
    raise AssertionError(f"{len(raw)} bytes were taken, one at a time")


@pytest.mark.parametrize(
    "raw",
    [START + b"x: y\r\n" * 40, START + b"content-length: 500\r\n\r\n" + b"{" * 300, b"G" * 300, b"GET /" + b"a" * 300],
    ids=["headers", "body", "method", "path"],
)
def test_a_client_that_sends_byte_by_byte_is_answered_and_closed(proxy: RunningProxy, raw: bytes) -> None:
    with connected(proxy.port) as connection:
        said = trickle(connection, raw)
    assert said.startswith(b"TTP/1.1 400" if raw.startswith(b"GG") else b"TTP/1.1 408")
    assert proxy.inflight() == 0


@pytest.mark.parametrize("raw", [b"", b"\r\n"], ids=["silent", "line breaks"])
def test_a_client_that_asks_for_nothing_is_closed(proxy: RunningProxy, raw: bytes) -> None:
    with connected(proxy.port) as connection:
        connection.sendall(raw)
        until_closed(connection)


def test_a_hundred_slow_clients_keep_nobody_from_being_served(proxy: RunningProxy) -> None:
    with ExitStack() as slow:
        connections = [slow.enter_context(connected(proxy.port)) for _ in range(100)]
        for connection in connections:
            connection.sendall(START + b"content-length: 10\r\n\r\n{")
        assert proxy.complete("sim") == right_tokens("base:sim")
        assert all(b" 408 " in until_closed(connection) for connection in connections)


def test_a_body_that_comes_on_is_waited_for(proxy: RunningProxy) -> None:
    """3 MB in longer than the limit: each MB gives as much time again."""
    size = 3 * 1024 * 1024
    with connected(proxy.port) as connection:
        connection.sendall(START + b"connection: close\r\ncontent-length: %d\r\n\r\n" % size)
        began = time.monotonic()
        for sent in range(0, size, size // 24):
            connection.sendall(b" " * (size // 24))
            wait_until(lambda to=began + 2 * (sent + size // 24) / size: time.monotonic() > to, what="its time")  # type: ignore[misc]
        assert statuses(until_closed(connection)) == [400], "white space is no request, but it came whole"


def test_a_rollout_that_takes_longer_than_the_limit_is_not_a_slow_client(
    proxy: RunningProxy, pair: list[SimulatedReplica]
) -> None:
    body = b'{"model":"sim","prompt":"a","max_tokens":1}'
    head = START + b"connection: close\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
    pair[0].hang()
    try:
        with connected(proxy.port) as connection:
            began = time.monotonic()
            connection.sendall(head + body + b"\r\n")  # some clients end a body with a line break
            wait_until(lambda: time.monotonic() - began > 2.5, what="the limit has passed twice")
            pair[0].unhang()
            assert statuses(until_closed(connection)) == [200]
    finally:
        pair[0].unhang()


def test_a_body_that_goes_on_after_its_refusal_ends(proxy: RunningProxy) -> None:
    """The 413 is out; what the client still sends is not taken for ever."""
    with connected(proxy.port) as connection:
        connection.sendall(START + b"transfer-encoding: chunked\r\n\r\n")
        chunk = b"100000\r\n" + b"x" * 0x100000 + b"\r\n"
        deadline = time.monotonic() + LIMIT_S
        with pytest.raises(ConnectionError):
            while time.monotonic() < deadline:
                connection.sendall(chunk)


@pytest.mark.parametrize(
    "raw",
    [
        START + b"x: " + b"y" * 40_000 + b"\r\n\r\n",
        START + b"".join(b"x-%d: y\r\n" % number for number in range(5000)) + b"\r\n",
        b"GET /health?" + b"a" * 40_000 + b" HTTP/1.1\r\nhost: p\r\n\r\n",
        START + b"x: " + b"y" * 3_000_000,
        b"G" + b"E" * 100_000,
        b"GET /" + b"a" * 3_000_000,
    ],
    ids=["value", "many", "query", "endless value", "endless method", "endless path"],
)
def test_a_head_above_32_kb_is_refused(proxy: RunningProxy, raw: bytes) -> None:
    assert statuses(say(proxy.port, raw)) == ([400] if raw.startswith(b"GEE") else [431])


def test_a_head_below_is_taken(proxy: RunningProxy) -> None:
    assert statuses(say(proxy.port, b"GET /health HTTP/1.1\r\nhost: p\r\nx: " + b"y" * 30_000 + b"\r\n\r\n")) == [
        200,
        200,
    ]
