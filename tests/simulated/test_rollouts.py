"""Rollouts on a healthy fleet: each gets its own policy's tokens, groups stay together, odd HTTP does no harm."""

from __future__ import annotations

import json
import socket
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.simulated.checks import BASE, PROMPT, Traffic, right_tokens, together, upstream_of, wait_quiet
from tests.simulated.conftest import Adapters
from tests.support.proxies import RunningProxy
from tests.support.replicas import SimulatedReplica


@pytest.fixture(scope="module")
def proxy(pair: list[SimulatedReplica], adapter: Adapters) -> Iterator[RunningProxy]:
    with RunningProxy(*(replica.url for replica in pair)) as proxy:
        for seed in (1, 2):
            assert proxy.load(f"policy-v{seed}", adapter(seed)).status_code == 200
        yield proxy


def test_many_rollouts_of_two_policies_and_the_base_model(
    pair: list[SimulatedReplica], proxy: RunningProxy, adapter: Adapters
) -> None:
    with Traffic(proxy, {"policy-v1": adapter(1), "policy-v2": adapter(2)}, threads=8) as traffic:
        traffic.wait_more(100)
        assert proxy.complete("sim") == right_tokens(BASE)
    assert set(traffic.by_replica) == {"0", "1"}
    wait_quiet(proxy, *pair)


def test_a_group_goes_to_one_replica_and_groups_are_spread(proxy: RunningProxy) -> None:
    replicas_of_groups = []
    for group in range(6):
        prompt = [group * 1000 + token for token in range(200)]
        answers = together(
            *[lambda p=prompt, s=seed: proxy.completion("policy-v1", prompt=p, seed=s) for seed in range(8)]
        )
        replicas = {answer.headers["X-Proxy-Upstream"] for answer in answers}
        assert len(replicas) == 1
        routes = Counter(answer.headers["X-Proxy-Route"] for answer in answers)
        assert routes == {"unmatched": 1, "affinity": 7}
        replicas_of_groups.append(replicas.pop())
    assert set(replicas_of_groups) == {"0", "1"}


def test_seeds_choices_and_batches_arrive_whole(proxy: RunningProxy, adapter: Adapters) -> None:
    seed = (1 << 63) - 9
    response = proxy.completion("policy-v2", seed=seed, n=3, logprobs=0, temperature=1)
    assert response.status_code == 200, response.text
    answer = response.json()
    for index, choice in enumerate(answer["choices"]):
        assert choice["token_ids"] == right_tokens(adapter(2), seed=seed + index)
        assert len(choice["logprobs"]["token_logprobs"]) == 8
    batched = proxy.completion("policy-v2", prompt=[[1, 2, 3], [4, 5, 6]]).json()
    assert [choice["token_ids"] for choice in batched["choices"]] == [
        right_tokens(adapter(2), prompt=[1, 2, 3]),
        right_tokens(adapter(2), prompt=[4, 5, 6]),
    ]


def test_chat_and_text_prompts(proxy: RunningProxy) -> None:
    chat = {"model": "policy-v1", "messages": [{"role": "user", "content": "héllo ☃"}], "max_tokens": 4}
    first, second = (proxy.client.post("/v1/chat/completions", json=chat) for _ in range(2))
    assert first.json()["choices"] == second.json()["choices"]
    assert first.headers["X-Proxy-Upstream"] == second.headers["X-Proxy-Upstream"]
    assert proxy.completion("policy-v1", prompt="héllo ☃").status_code == 200


def test_an_unknown_model_is_a_404_that_no_replica_hears_of(pair: list[SimulatedReplica], proxy: RunningProxy) -> None:
    before = [replica.state()["calls"].get("POST /v1/completions", 0) for replica in pair]
    answer = proxy.completion("policy-v99")
    assert answer.status_code == 404
    assert answer.json()["error"]["type"] == "NotFoundError"
    assert answer.headers["X-Proxy-Error"] == "unknown_policy"
    assert [replica.state()["calls"].get("POST /v1/completions", 0) for replica in pair] == before


def test_a_refusal_of_the_replica_comes_back_as_it_is(pair: list[SimulatedReplica], proxy: RunningProxy) -> None:
    asked = {"model": "policy-v1", "prompt": [1] * 5000, "max_tokens": 1}
    direct = pair[0].client.post("/v1/completions", json={**asked, "model": upstream_of(pair[0], "policy-v1")})
    through = proxy.client.post("/v1/completions", json=asked)
    assert through.status_code == direct.status_code == 400
    assert through.json() == direct.json()
    assert "X-Proxy-Upstream" in through.headers
    assert proxy.states() == ["ready", "ready"]
    wait_quiet(proxy, *pair)


@pytest.mark.parametrize("status", [400, 500, 503])
def test_what_one_replica_cannot_answer_the_other_does(
    pair: list[SimulatedReplica], proxy: RunningProxy, adapter: Adapters, status: int
) -> None:
    pair[0].set_faults(generations_status=status)
    try:
        with Traffic(proxy, {"policy-v1": adapter(1)}) as traffic:
            traffic.wait_more(20)
        assert set(traffic.by_replica) == {"1"}
        pair[1].set_faults(generations_status=status)
        answer = proxy.completion("policy-v1")
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, status)
        assert "X-Proxy-Upstream" in answer.headers
    finally:
        for replica in pair:
            replica.clear_faults()
    assert proxy.complete("policy-v1") == right_tokens(adapter(1))
    assert proxy.states() == ["ready", "ready"]
    wait_quiet(proxy, *pair)


def test_a_request_id_is_passed_on_or_made(pair: list[SimulatedReplica], proxy: RunningProxy) -> None:
    body = {"model": "policy-v1", "prompt": [1] * 1717, "max_tokens": 1}
    proxy.client.post("/v1/completions", json=body, headers={"X-Request-Id": "mine-1"})
    for _ in range(2):
        proxy.client.post("/v1/completions", json=body)
    rollouts = [rollout for replica in pair for rollout in replica.state()["rollouts"]]
    seen = [rollout["headers"]["x-request-id"] for rollout in rollouts if rollout["prompt_tokens"] == 1717]
    assert "mine-1" in seen
    assert all(seen)
    assert len(set(seen)) == 3


def test_any_ready_replica_answers_what_all_answer_alike(proxy: RunningProxy) -> None:
    tokens = proxy.client.post("/tokenize", json={"model": "policy-v1", "prompt": "abc"}).json()["tokens"]
    assert tokens == [97, 98, 99]
    assert proxy.client.post("/detokenize", json={"model": "policy-v1", "tokens": tokens}).json()["prompt"] == "abc"
    assert proxy.client.get("/version").json()["version"]


RAW_BODY = json.dumps({"model": "policy-v1", "prompt": PROMPT, "max_tokens": 8, "return_token_ids": True}).encode()


def _head(target: bytes, *headers: bytes) -> bytes:
    lines = [b"POST " + target + b" HTTP/1.1", b"Host: proxy", b"Content-Type: application/json", *headers]
    return b"\r\n".join([*lines, b"Content-Length: %d" % len(RAW_BODY), b"", b""])


def _raw(proxy: RunningProxy, sent: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=10) as connection:
        connection.sendall(sent)
        received = b""
        while piece := connection.recv(1 << 16):
            received += piece
    return received


@pytest.mark.parametrize(
    "target",
    [
        b"/v1/%63ompletions",
        b"http://proxy/v1/completions",
        b"/v1/completions?a=%ff&b=%2F",
        b'/v1/completions?a[]={}|\\^"<>',
        b"/v1/completions?#piece",
    ],
)
def test_odd_spellings_of_a_routed_path_are_routed(proxy: RunningProxy, target: bytes) -> None:
    assert _raw(proxy, _head(target, b"Connection: close") + RAW_BODY).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "target", [b"//v1/completions", b"/v1/completions/", b"/v1/completions%2f", b"/v1/x/../completions"]
)
def test_other_paths_are_not_forwarded(proxy: RunningProxy, target: bytes) -> None:
    answer = _raw(proxy, _head(target, b"Connection: close") + RAW_BODY)
    assert answer.startswith(b"HTTP/1.1 404")
    assert b"not_forwarded" in answer


@pytest.mark.parametrize(
    "header",
    [b"X-A: " + b"y" * 20_000, b"X-A: caf\xe9 \xff", b"X-A: a\r\nX-A: b", b"Connection: X-A, close\r\nX-A: a"],
)
def test_odd_headers_do_no_harm(proxy: RunningProxy, header: bytes) -> None:
    assert _raw(proxy, _head(b"/v1/completions", header, b"Connection: close") + RAW_BODY).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("header", [b"X-A: a\x00b", b"X-A: a\rb", b"Content-Length: 7", b"Content-Length: x"])
def test_malformed_requests_are_refused(proxy: RunningProxy, header: bytes) -> None:
    assert _raw(proxy, _head(b"/v1/completions", header, b"Connection: close") + RAW_BODY).startswith(b"HTTP/1.1 400")


def test_pipelined_requests_are_answered_in_order(
    pair: list[SimulatedReplica], proxy: RunningProxy, adapter: Adapters
) -> None:
    last = _head(b"/v1/completions", b"Connection: close") + RAW_BODY
    answers = _raw(proxy, (_head(b"/v1/completions") + RAW_BODY) * 4 + last)
    bodies: list[Any] = []
    for part in answers.split(b"HTTP/1.1 ")[1:]:
        assert part.startswith(b"200")
        bodies.append(json.loads(part.partition(b"\r\n\r\n")[2]))
    assert [body["choices"][0]["token_ids"] for body in bodies] == [right_tokens(adapter(1))] * 5
    wait_quiet(proxy, *pair)


def test_one_replica_alone_is_a_fleet_too(pair: list[SimulatedReplica], adapter: Adapters) -> None:
    with RunningProxy(pair[0].url) as proxy:
        assert proxy.load("single-v1", adapter(3)).status_code == 200
        with Traffic(proxy, {"single-v1": adapter(3)}) as traffic:
            traffic.wait_more(20)
        assert proxy.unload("single-v1").status_code == 200
        wait_quiet(proxy, pair[0])
