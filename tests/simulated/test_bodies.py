"""Bodies that are no good: refused in vLLM's shape, and nothing of them reaches a replica."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from tests.simulated.checks import right_tokens, wait_quiet
from tests.support.proxies import RunningProxy
from tests.support.replicas import SimulatedReplica

LIMIT = 20_000


@pytest.fixture(scope="module")
def proxy(pair: list[SimulatedReplica]) -> Iterator[RunningProxy]:
    with RunningProxy(*(replica.url for replica in pair), PROXY_MAX_BODY=str(LIMIT)) as proxy:
        yield proxy


def _rollouts(pair: list[SimulatedReplica]) -> int:
    return sum(replica.state()["calls"].get("POST /v1/completions", 0) for replica in pair)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"hello", "not JSON"),
        (b'{"model": "sim", "prompt": "a"} trailing', "not JSON"),
        (b'{"model": "sim", "prompt": "\xff\xfe"}', "not JSON"),
        (b'{"model": "s\xedm", "prompt": "a"}', "not JSON"),
        (b'{"model": "\\ud800", "prompt": "a"}', "not JSON"),
        ('{"model": "sim", "prompt": "a"}'.encode("utf-16"), "not JSON"),
        (b'{"model": "sim", "prompt": ' + b"[" * 5000, "not JSON"),
        (b"[]", "not valid"),
        (b"null", "not valid"),
        (b'"sim"', "not valid"),
        (b'{"model": 7, "prompt": "a"}', "not valid"),
        (b'{"prompt": "a"}', "`model` is missing"),
        (b'{"model": "", "prompt": "a"}', "`model` is missing"),
        (b'{"model": null, "prompt": "a"}', "`model` is missing"),
    ],
)
def test_what_cannot_be_read_is_a_400(
    pair: list[SimulatedReplica], proxy: RunningProxy, body: bytes, said: str
) -> None:
    before = _rollouts(pair)
    answer = proxy.client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert said in error["message"]
    assert (error["type"], error["code"]) == ("Bad Request", 400)
    assert answer.headers["X-Proxy-Error"] == "bad_request"
    assert _rollouts(pair) == before
    assert proxy.inflight() == 0


def _padded(size: int) -> bytes:
    body = b'{"model": "sim", "prompt": "a", "max_tokens": 8, "return_token_ids": true, "user": "%s"}'
    return body % (b"x" * (size - len(body) + 2))


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize", "/v1/load_lora_adapter", "/resume"])
@pytest.mark.parametrize("chunked", [False, True])
def test_too_large_is_a_413(pair: list[SimulatedReplica], proxy: RunningProxy, path: str, chunked: bool) -> None:
    before = _rollouts(pair)
    body = _padded(LIMIT + 1)
    content = iter([body[:7000], body[7000:]]) if chunked else body
    answer = proxy.client.post(path, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 413
    error = answer.json()["error"]
    assert error["code"] == 413
    assert "PROXY_MAX_BODY" in error["message"]
    assert _rollouts(pair) == before
    wait_quiet(proxy, *pair)


@pytest.mark.parametrize("chunked", [False, True])
def test_as_large_as_allowed_is_taken(proxy: RunningProxy, chunked: bool) -> None:
    body = _padded(LIMIT)
    assert len(body) == LIMIT
    content = iter([body[:7000], body[7000:]]) if chunked else body
    answer = proxy.client.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["token_ids"] == right_tokens("base:sim", prompt=[97])


def test_a_length_that_is_too_large_is_refused_before_the_body_comes(proxy: RunningProxy) -> None:
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=5) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: p\r\nContent-Length: 99999999999\r\n\r\n")
        assert connection.recv(20).startswith(b"HTTP/1.1 413")


def test_the_connection_is_good_for_the_next_request(proxy: RunningProxy) -> None:
    for _ in range(3):
        assert proxy.client.post("/v1/completions", content=_padded(LIMIT * 3)).status_code == 413
        assert proxy.complete("sim") == right_tokens("base:sim")
