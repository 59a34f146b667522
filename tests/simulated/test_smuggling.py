"""Requests that two readers could read in two ways are refused, or reach a replica in one way only."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.simulated.checks import right_tokens
from tests.support.proxies import RunningProxy
from tests.support.raw_http import say, statuses
from tests.support.replicas import wait_until
from tests.support.wire import Wire

BODY = b'{"model":"sim","prompt":"a","max_tokens":1}'
LENGTH = b"content-length: %d\r\n" % len(BODY)
CHUNKED = b"transfer-encoding: chunked\r\n\r\n"
CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
SIZE = b"%x" % len(BODY)
START = b"POST /v1/completions HTTP/1.1\r\nhost: p\r\ncontent-type: application/json\r\n"
INSIDE = b"POST /collective_rpc HTTP/1.1\r\nhost: p\r\ncontent-length: 0\r\n\r\n"
"""What is to be smuggled: a path that is not open."""

REFUSED = {
    "length and chunks": START + LENGTH + CHUNKED + CHUNKS,
    "chunks and length": START + b"transfer-encoding: chunked\r\n" + LENGTH + b"\r\n" + CHUNKS,
    "a length twice": START + LENGTH + LENGTH + b"\r\n" + BODY,
    "two lengths": START + LENGTH + b"content-length: 3\r\n\r\n" + BODY,
    "a list of lengths": START + b"content-length: 5, 5\r\n\r\nhello",
    "a length with a sign": START + b"content-length: +%d\r\n\r\n" % len(BODY) + BODY,
    "a negative length": START + b"content-length: -1\r\n\r\n" + BODY,
    "a length in hex": START + b"content-length: 0x2b\r\n\r\n" + BODY,
    "an empty length": START + b"content-length:\r\n\r\n" + BODY,
    "a length beyond 64 bits": START + b"content-length: 18446744073709551659\r\n\r\n" + BODY,
    "a space before the colon": START + b"content-length : %d\r\n\r\n" % len(BODY) + BODY,
    "a space before the other colon": START + b"transfer-encoding : chunked\r\n\r\n" + CHUNKS,
    "an unknown coding": START + b"transfer-encoding: xchunked\r\n\r\n" + CHUNKS,
    "a coding in quotes": START + b'transfer-encoding: "chunked"\r\n\r\n' + CHUNKS,
    "a coding behind a vertical tab": START + b"transfer-encoding:\x0bchunked\r\n\r\n" + CHUNKS,
    "chunked, but not last": START + b"transfer-encoding: chunked, identity\r\n\r\n" + CHUNKS,
    "chunked, then another line": START + CHUNKED[:-2] + b"transfer-encoding: identity\r\n\r\n" + CHUNKS,
    "a folded line": START + LENGTH + b"x: a\r\n b\r\n\r\n" + BODY,
    "a folded coding": START + b"transfer-encoding:\r\n chunked\r\n\r\n" + CHUNKS,
    "a folded length": START + b"content-length:\r\n %d\r\n\r\n" % len(BODY) + BODY,
    "a folded first line": b"POST /v1/completions HTTP/1.1\r\n host: p\r\n" + LENGTH + b"\r\n" + BODY,
    "bare line feeds": (START + LENGTH + b"\r\n").replace(b"\r\n", b"\n") + BODY,
    "one bare line feed": START + b"x: a\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY,
    "a bare carriage return": START + b"x: a\rtransfer-encoding: chunked\r\n" + LENGTH + b"\r\n" + BODY,
    "NUL in a value": START + b"x: a\0b\r\n" + LENGTH + b"\r\n" + BODY,
    "NUL in a name": START + b"x\0: a\r\n" + LENGTH + b"\r\n" + BODY,
    "a line without a colon": START + b"xyz\r\n" + LENGTH + b"\r\n" + BODY,
    "a line feed in a chunk's extension": START + CHUNKED + SIZE + b";a=\nb\r\n" + BODY + b"\r\n0\r\n\r\n",
    "chunks that end in line feeds": START + CHUNKED + SIZE + b"\n" + BODY + b"\n0\n\n",
    "a chunk's size with 0x": START + CHUNKED + b"0x" + SIZE + b"\r\n" + BODY + b"\r\n0\r\n\r\n",
    "a chunk's size beyond 64 bits": START + CHUNKED + b"10000000000000000" + SIZE + b"\r\n" + BODY + b"\r\n0\r\n\r\n",
    "a chunk of negative size": START + CHUNKED + b"-1\r\n" + BODY + b"\r\n0\r\n\r\n",
    "a space behind a chunk's size": START + CHUNKED + SIZE + b" \r\n" + BODY + b"\r\n0\r\n\r\n",
    "more in a chunk than its size": START + CHUNKED + SIZE + b"\r\n" + BODY + b"XX0\r\n\r\n",
    "a length behind the chunks": START + CHUNKED + SIZE + b"\r\n" + BODY + b"\r\n0\r\ncontent-length: 5\r\n\r\n",
    "an upgrade to HTTP/2": START + b"connection: upgrade\r\nupgrade: h2c\r\n" + LENGTH + b"\r\n" + BODY + INSIDE,
    "an upgrade to WebSocket": START + b"connection: upgrade\r\nupgrade: websocket\r\n\r\n" + INSIDE,
    "a tunnel": b"CONNECT p:80 HTTP/1.1\r\nhost: p\r\n\r\n" + INSIDE,
    "HTTP/2 without asking": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a version that is none": START.replace(b"1.1", b"1.2") + LENGTH + b"\r\n" + BODY,
    "a method in lower case": START.replace(b"POST", b"post") + LENGTH + b"\r\n" + BODY,
}

TAKEN = {
    "a plain one": START + LENGTH + b"\r\n" + BODY,
    "chunks": START + CHUNKED + CHUNKS,
    "chunks, spelt in another way": START + b"Transfer-Encoding:\tCHUNKED\r\n\r\n" + CHUNKS,
    "chunks behind another coding": START + b"transfer-encoding: gzip, chunked\r\n\r\n" + CHUNKS,
    "chunks with extensions": START + CHUNKED + SIZE + b';a=b;c="d"\r\n' + BODY + b"\r\n0;e\r\n\r\n",
    "chunks with trailers": START + CHUNKED + SIZE + b"\r\n" + BODY + b"\r\n0\r\nauthorization: x\r\nx-y: z\r\n\r\n",
    "two hosts": START + b"host: q\r\n" + LENGTH + b"\r\n" + BODY,
    "headers that only concern this connection": START
    + b"connection: x-only-here, keep-alive\r\nx-only-here: 1\r\nte: trailers\r\nproxy-authorization: a\r\n"
    + LENGTH + b"\r\n" + BODY,
    "asking before sending": START + b"expect: 100-continue\r\n" + LENGTH + b"\r\n" + BODY,
    "line breaks around it": b"\r\n" + START + LENGTH + b"\r\n" + BODY + b"\r\n",
}  # fmt: skip


@pytest.fixture(scope="module")
def proxy(wire: Wire) -> Iterator[RunningProxy]:
    with RunningProxy(wire.url) as proxy:
        yield proxy


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("in_bytes", [False, True], ids=["whole", "byte by byte"])
def test_what_is_ambiguous_is_refused_and_ends_the_connection(
    proxy: RunningProxy, wire: Wire, kind: str, in_bytes: bool
) -> None:
    wire.forget()
    raw = REFUSED[kind]
    said = say(proxy.port, *(raw[at : at + 1] for at in range(len(raw)))) if in_bytes else say(proxy.port, raw)
    assert statuses(said) == [400]
    assert b"connection: close" in said and b'"error":' in said, "in vLLM's shape"
    assert wire.requests() == []


@pytest.mark.parametrize("kind", TAKEN)
def test_what_is_not_reaches_a_replica_as_one_plain_request(proxy: RunningProxy, wire: Wire, kind: str) -> None:
    wire.forget()
    said = say(proxy.port, TAKEN[kind])
    assert statuses(said) == ([100] if b"100-continue" in TAKEN[kind] else []) + [200, 200], said
    (sent,) = wire.requests()
    assert (sent.method, sent.target, sent.body) == ("POST", "/v1/completions", BODY)
    names = [name for name, _ in sent.headers]
    unwanted = {"transfer-encoding", "x-only-here", "connection", "te", "proxy-authorization", "authorization", "x-y"}
    assert not unwanted & set(names) and names.count("content-length") == 1
    assert dict(sent.headers)["host"] == wire.url.removeprefix("http://")


def test_a_request_in_the_body_of_another_stays_there(proxy: RunningProxy, wire: Wire) -> None:
    wire.forget()
    raw = b"GET /health HTTP/1.1\r\nhost: p\r\ncontent-length: %d\r\n\r\n" % len(INSIDE) + INSIDE
    assert statuses(say(proxy.port, raw)) == [200, 200]
    assert wire.requests() == []


def test_garbage_behind_a_rollout_takes_nothing_from_its_answer(proxy: RunningProxy) -> None:
    said = say(proxy.port, TAKEN["a plain one"] + b"\0\0\0\r\n\r\n")
    assert statuses(said) == [200] and said.endswith(b"}")
    wait_until(lambda: proxy.inflight() == 0, what="no lease is held")


def test_after_all_of_that_rollouts_are_served(proxy: RunningProxy) -> None:
    assert proxy.complete("sim") == right_tokens("base:sim")
    assert "Traceback" not in proxy.log()
