"""Streams are passed on piece by piece, end as vLLM ends them, and never look whole when they are not."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from tests.simulated.checks import PROMPT, right_tokens, upstream_of, wait_quiet
from tests.simulated.conftest import Adapters
from tests.support.proxies import RunningProxy
from tests.support.replicas import SimulatedReplica, simulators, wait_until


@pytest.fixture(scope="module")
def proxy(pair: list[SimulatedReplica], adapter: Adapters) -> Iterator[RunningProxy]:
    with RunningProxy(*(replica.url for replica in pair)) as proxy:
        assert proxy.load("policy-v1", adapter(1)).status_code == 200
        yield proxy


def _asked(**fields: Any) -> dict[str, Any]:
    return {
        "model": "policy-v1",
        "prompt": PROMPT,
        "max_tokens": 40,
        "stream": True,
        "return_token_ids": True,
        **fields,
    }


def _events(text: str) -> list[str]:
    return [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]


def _tokens(events: list[str]) -> list[int]:
    tokens: list[int] = []
    for event in events:
        if event != "[DONE]":
            tokens += [token for choice in json.loads(event)["choices"] for token in choice["token_ids"] or []]
    return tokens


def test_a_stream_arrives_while_it_is_made(
    pair: list[SimulatedReplica], proxy: RunningProxy, adapter: Adapters
) -> None:
    arrived: list[float] = []
    text = ""
    with proxy.client.stream("POST", "/v1/completions", json=_asked()) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["X-Proxy-Upstream"] in "01"
        assert proxy.inflight() == 1
        for piece in answer.iter_text():
            arrived.append(time.monotonic())
            text += piece
    assert len(arrived) > 5
    assert arrived[-1] - arrived[0] > 0.1
    assert _events(text)[-1] == "[DONE]"
    assert _tokens(_events(text)) == right_tokens(adapter(1), count=40)
    wait_quiet(proxy, *pair)


def test_a_chat_stream_is_the_replicas_own(pair: list[SimulatedReplica], proxy: RunningProxy) -> None:
    asked = {
        "model": "policy-v1",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 6,
        "stream": True,
        "stream_options": {"include_usage": True},
    }

    def said(client: httpx2.Client, model: str) -> list[Any]:
        events = _events(client.post("/v1/chat/completions", json={**asked, "model": model}).text)
        return [json.loads(event).get("choices") for event in events[:-1]] + events[-1:]

    through = said(proxy.client, "policy-v1")
    assert through[-1] == "[DONE]"
    text = "".join(c["delta"].get("content") or "" for event in through[:-1] for c in event)
    own = said(pair[0].client, upstream_of(pair[0], "policy-v1"))
    direct = "".join(c["delta"].get("content") or "" for event in own[:-1] for c in event)
    assert text == direct != ""


def test_an_error_before_the_stream_is_a_plain_answer(proxy: RunningProxy) -> None:
    answer = proxy.client.post("/v1/completions", json=_asked(prompt=[1] * 5000))
    assert answer.status_code == 400
    assert answer.headers["content-type"] == "application/json"


def test_a_client_that_leaves_a_stream_frees_the_replica(pair: list[SimulatedReplica], proxy: RunningProxy) -> None:
    before = sum(replica.state()["aborted"] for replica in pair)
    with proxy.client.stream("POST", "/v1/completions", json=_asked(max_tokens=3000)) as answer:
        pieces = answer.iter_text()
        next(pieces)
        assert sum(replica.state()["in_flight"] for replica in pair) == 1
    wait_quiet(proxy, *pair)
    assert sum(replica.state()["aborted"] for replica in pair) == before + 1


def test_a_client_that_does_not_read_holds_nobody_up(
    pair: list[SimulatedReplica], proxy: RunningProxy, adapter: Adapters
) -> None:
    body = json.dumps(_asked(max_tokens=4000, n=16, logprobs=20)).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: p\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    with socket.socket() as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.connect(("127.0.0.1", proxy.port))
        lazy.sendall(head % len(body) + body)
        wait_until(lambda: proxy.inflight() == 1, what="the stream is in flight")
        for seed in range(10):
            assert proxy.complete("policy-v1", seed=seed) == right_tokens(adapter(1), seed=seed)
    wait_quiet(proxy, *pair)


@pytest.mark.parametrize("how", ["process", "engine"])
def test_a_stream_whose_replica_dies_ends_with_an_error(adapter: Adapters, how: str) -> None:
    with simulators(2) as replicas, RunningProxy(*(replica.url for replica in replicas)) as proxy:
        assert proxy.load("policy-v1", adapter(1)).status_code == 200
        text = ""
        with proxy.client.stream("POST", "/v1/completions", json=_asked(max_tokens=3000)) as answer:
            victim = replicas[int(answer.headers["X-Proxy-Upstream"])]
            for piece in answer.iter_text():
                if not text:
                    victim.kill() if how == "process" else victim.kill_engine()
                text += piece
        events = _events(text)
        assert events[-1] == "[DONE]"
        assert "error" in json.loads(events[-2])
        tokens = _tokens(events[:-2])
        assert 0 < len(tokens) < 3000
        assert tokens == right_tokens(adapter(1), count=len(tokens))
        assert proxy.complete("policy-v1") == right_tokens(adapter(1))
        wait_quiet(proxy, replicas[1 - replicas.index(victim)])
