"""However a path is written, nothing reaches a replica but the paths that are open, each in its one form."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.proxies import RunningProxy
from tests.support.raw_http import say, statuses
from tests.support.wire import Wire

BODY = b'{"model":"sim","prompt":"a","max_tokens":1}'

CLOSED = [
    "/collective_rpc",
    "/%63ollective_rpc",
    "//collective_rpc",
    "/v1/../collective_rpc",
    "/v1/%2e%2e/collective_rpc",
    "/v1/completions/../../collective_rpc",
    "/v1/completions%2f..%2f..%2fcollective_rpc",
    "/v1/completions/..%5c..%5ccollective_rpc",
    "/v1/completions\\..\\..\\collective_rpc",
    "/proxy/../collective_rpc",
    "/proxy/policies/../../collective_rpc",
    "http://elsewhere/collective_rpc",
    "https://elsewhere:1/sleep",
    "//v1/completions",
    "/v1//completions",
    "/v1/completions/",
    "/v1/completions%00",
    "/v1/completions%20",
    "/v1/completions%0d%0a",
    "/v1/completions%3f",
    "/v1/completions;x",
    "/V1/COMPLETIONS",
    "/v1/load_lora_adapter/",
    "/v1/load_lora_adapter%00",
    "*",
]

OPEN = {
    "/v1/completions": "/v1/completions",
    "/v1/%63ompletions": "/v1/completions",
    "/%76%31%2f%63ompletions": "/v1/completions",
    "http://elsewhere:1/v1/completions": "/v1/completions",
    "/v1/completions#/collective_rpc": "/v1/completions",
    "/v1/completions?/../collective_rpc": "/v1/completions?/../collective_rpc",
    "/v1/completions?a=%0d%0ax:%20y&b=%00": "/v1/completions?a=%0d%0ax:%20y&b=%00",
    "/%74okenize": "/tokenize",
    "/reset_prefix_cache?a=b": "/reset_prefix_cache?a=b",
    "/%72eset_prefix_cache?/collective_rpc": "/reset_prefix_cache?/collective_rpc",
    "/reset_prefix_cache?%ff": "/reset_prefix_cache?%ff",
}

REFUSED = [
    "v1/completions",
    "/v1/completions?a b",
    "/v1/\x01",
    "/v1/completions?\x7f",
    "/\xff",
    "/v1/completions?\xff",
    "",
]


@pytest.fixture(scope="module")
def proxy(wire: Wire) -> Iterator[RunningProxy]:
    with RunningProxy(wire.url) as proxy:
        yield proxy


def post(target: str, host: bytes = b"p") -> bytes:
    start = b"POST %b HTTP/1.1\r\nhost: %b\r\n" % (target.encode("latin-1"), host)
    return start + b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY


@pytest.mark.parametrize("target", CLOSED)
def test_what_is_not_open_is_refused(proxy: RunningProxy, wire: Wire, target: str) -> None:
    wire.forget()
    said = say(proxy.port, post(target))
    assert statuses(said) in ([404, 200], [405, 200]) and b"x-proxy-error: " in said.lower()
    assert wire.requests() == []


@pytest.mark.parametrize("target", OPEN)
def test_what_is_open_reaches_a_replica_in_its_one_form(proxy: RunningProxy, wire: Wire, target: str) -> None:
    wire.forget()
    assert statuses(say(proxy.port, post(target))) == [200, 200]
    assert [sent.target for sent in wire.requests()] == [OPEN[target]]


@pytest.mark.parametrize("target", REFUSED)
def test_what_is_no_target_is_a_400(proxy: RunningProxy, wire: Wire, target: str) -> None:
    wire.forget()
    assert statuses(say(proxy.port, post(target))) == [400]
    assert wire.requests() == []


@pytest.mark.parametrize("host", [b"x/collective_rpc?a=", b"x@y", b"", b"[::1", b"a /sleep", b"\xff"])
def test_what_a_client_calls_host_is_no_path(proxy: RunningProxy, wire: Wire, host: bytes) -> None:
    wire.forget()
    say(proxy.port, post("/reset_prefix_cache", host))
    assert [sent.target for sent in wire.requests()] == ["/reset_prefix_cache"]
    assert {dict(sent.headers)["host"] for sent in wire.requests()} == {wire.url.removeprefix("http://")}
