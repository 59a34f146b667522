"""Bodies that are made to cost: deep, wide, long, twice. Each is answered soon, and the proxy does not grow with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.simulated.checks import right_tokens
from tests.support.proxies import RunningProxy
from tests.support.replicas import SimulatedReplica

MB = 1024 * 1024
GROWTH_MB = 400
"""The body as it comes, joined, and as it is sent on; what is read of it may not come to more than that."""

WIDE = b"[" + b"[]," * (16 * MB) + b"[]]"
DEEP = b"[" * 100_000 + b"]" * 100_000
BOMBS = {
    "many empty lists as prompt": b'{"model":"nobody","prompt":' + WIDE + b"}",
    "many empty texts as prompt": b'{"model":"nobody","prompt":[' + b'"",' * (16 * MB) + b'""]}',
    "many empty lists as sampling parameters": b'{"model":"nobody","prompt":"a","sampling_params":' + WIDE + b"}",
    "many empty lists as a number": b'{"model":"nobody","prompt":"a","n":' + WIDE + b"}",
    "many fields": b'{"model":"nobody","prompt":"a",' + b",".join(b'"%d":0' % n for n in range(4 * MB)) + b"}",
    "the same field again and again": b"{" + b'"model":"nobody",' * (3 * MB) + b'"prompt":"a"}',
    "a long text": b'{"model":"nobody","prompt":"' + b"a" * (60 * MB) + b'"}',
    "escapes": b'{"model":"nobody","prompt":"' + b"\\u0041" * (10 * MB) + b'"}',
    "a long name": b'{"model":"' + b"a" * (30 * MB) + b'","prompt":"a"}',
    "a long number": b'{"model":"nobody","prompt":"a","n":' + b"9" * (30 * MB) + b"}",
}
DEEP_BOMBS = {
    "a deep prompt": b'{"model":"nobody","prompt":' + DEEP + b"}",
    "a deep model": b'{"model":' + DEEP + b"}",
    "deep sampling parameters": b'{"model":"nobody","prompt":"a","sampling_params":' + DEEP + b"}",
    "brackets alone": b"[" * (8 * MB),
    "deep objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "a number beyond Python's": b'{"model":"nobody","prompt":"a","n":' + b"9" * 5000 + b"}",
    "an exponent beyond floats": b'{"model":"nobody","prompt":"a","max_tokens":1e999999999}',
    "half of a surrogate pair": b'{"model":"\\ud800","prompt":"\\ud800"}',
    "broken UTF-8": b'{"model":"nobody","prompt":"\xed\xa0\x80"}',
    "UTF-16": '{"model":"nobody","prompt":"a"}'.encode("utf-16"),
    "NUL": b'{"model":"no\\u0000body","prompt":"a","lora_name":"a\\u0000","lora_path":"/a\\u0000b","url":"http://\\u0000"}',
    "numbers for names": b'{"model":1e999,"lora_name":1e999,"lora_path":[],"url":1,"name":{},"path":NaN}',
    "nothing": b"",
}
TAKE_BODIES = [
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/inference/v1/generate"),
    ("POST", "/tokenize"),
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/unload_lora_adapter"),
    ("POST", "/init_weight_transfer_engine"),
    ("POST", "/update_weight_version"),
    ("POST", "/proxy/weights/reload"),
    ("POST", "/proxy/replicas"),
    ("DELETE", "/proxy/replicas"),
]


@pytest.fixture(scope="module")
def proxy(pair: list[SimulatedReplica]) -> Iterator[RunningProxy]:
    with RunningProxy(pair[0].url) as proxy:
        yield proxy


def peak_mb(proxy: RunningProxy) -> float:
    lines = Path(f"/proc/{proxy.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


@pytest.mark.parametrize("kind", BOMBS)
def test_a_large_body_costs_little_more_than_its_bytes(pair: list[SimulatedReplica], kind: str) -> None:
    with RunningProxy(pair[0].url) as proxy:
        before = peak_mb(proxy)
        answer = proxy.client.post("/v1/completions", content=BOMBS[kind])
        assert answer.status_code in (400, 404), answer.text[:300]
        assert peak_mb(proxy) - before < GROWTH_MB
        assert proxy.complete("sim") == right_tokens("base:sim")


@pytest.mark.parametrize("method_and_path", TAKE_BODIES, ids=[path for _, path in TAKE_BODIES])
@pytest.mark.parametrize("kind", DEEP_BOMBS)
def test_what_cannot_be_read_is_the_clients_error(
    proxy: RunningProxy, kind: str, method_and_path: tuple[str, str]
) -> None:
    answer = proxy.client.request(*method_and_path, content=DEEP_BOMBS[kind])
    assert 400 <= answer.status_code < 500, answer.text[:300]
    assert answer.json()["error"]["code"] == answer.status_code or "X-Proxy-Upstream" in answer.headers


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/load_lora_adapter", "/resume", "/nowhere"])
@pytest.mark.parametrize("chunked", [False, True], ids=["with its length", "chunked"])
def test_100_mb_are_refused(proxy: RunningProxy, path: str, chunked: bool) -> None:
    before = peak_mb(proxy)
    pieces = (b" " * MB for _ in range(100))
    content = pieces if chunked else b" " * (100 * MB)
    assert proxy.client.post(path, content=content).status_code == 413
    assert peak_mb(proxy) - before < 200
    assert proxy.complete("sim") == right_tokens("base:sim")


def test_after_all_of_that_nothing_is_held(proxy: RunningProxy) -> None:
    assert proxy.inflight() == 0 and "Traceback" not in proxy.log()
