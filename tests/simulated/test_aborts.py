"""P5: an answer that was cut short is never delivered, unless a client asked for that; a dying replica keeps none."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

from tests.simulated.checks import right_tokens, wait_quiet
from tests.simulated.conftest import Adapters, Serving
from tests.support.proxies import RunningProxy
from tests.support.replicas import SimulatedReplica, simulators, wait_until


def test_an_abort_that_nobody_asked_for_is_answered_by_another_replica(
    serving: Serving, pair: list[SimulatedReplica], adapter: Adapters
) -> None:
    with serving("aborts-v1", 1) as proxy:
        pair[0].set_faults(abort_answers=True)
        for seed in range(8):
            assert proxy.complete("aborts-v1", prompt=[seed, 1], seed=seed) == right_tokens(
                adapter(1), prompt=[seed, 1], seed=seed
            )
        assert pair[0].state()["aborted"] > 0 and proxy.stats()["router"]["retried"] > 0


def test_when_everyone_aborts_the_client_learns_why(
    serving: Serving, pair: list[SimulatedReplica], adapter: Adapters
) -> None:
    with serving("aborts-v2", 2, PROXY_RETRIES="2", PROXY_WAIT_READY_S="0.5") as proxy:
        for replica in pair:
            replica.set_faults(abort_answers=True)
        answer = proxy.completion("aborts-v2")
        assert (answer.status_code, answer.headers["X-Proxy-Error"]) == (503, "aborted")
        assert answer.headers["Retry-After"] == "1"
        assert answer.json()["error"]["message"].count("it aborted the rollout") == 3
        for replica in pair:
            replica.clear_faults()
        proxy.wait_states("ready", "ready")
        assert proxy.complete("aborts-v2") == right_tokens(adapter(2))


def test_a_stream_that_is_aborted_before_its_first_token_is_served_by_another_replica(
    serving: Serving, pair: list[SimulatedReplica]
) -> None:
    with serving("aborts-v4", 4) as proxy:
        pair[0].set_faults(abort_answers=True)
        for seed in range(8):
            asked = {"model": "aborts-v4", "prompt": [seed, 9], "max_tokens": 4, "stream": True}
            text = proxy.client.post("/v1/completions", json=asked).text
            assert text.count('"text"') == 4, text
        assert pair[0].state()["aborted"] > 0


def test_a_stream_that_is_aborted_later_says_that_it_broke_off(adapter: Adapters) -> None:
    with SimulatedReplica() as replica, RunningProxy(replica.url) as proxy:
        assert proxy.load("aborts-v5", adapter(5)).status_code == 200
        asked = {"model": "aborts-v5", "prompt": [1, 2], "max_tokens": 1000, "stream": True}
        for aborts in (replica.client, proxy.client):
            with proxy.client.stream("POST", "/v1/completions", json=asked) as stream:
                lines = stream.iter_lines()
                next(lines)
                assert aborts.post("/abort_requests", json={}).status_code == 200
                text = "\n".join(lines)
            by_a_client = aborts is proxy.client
            assert ('"finish_reason":"abort"' in text) is by_a_client
            assert ("stream: it aborted the rollout" in text) is not by_a_client
            proxy.wait_states("ready")
        wait_quiet(proxy, replica)


def test_an_abort_that_a_client_asked_for_is_delivered(serving: Serving, pair: list[SimulatedReplica]) -> None:
    with serving("aborts-v3", 3) as proxy:
        for ask in ("/abort_requests", "/pause?mode=abort"):
            with ThreadPoolExecutor(4) as pool:
                pending = [pool.submit(proxy.completion, "aborts-v3", max_tokens=2000, seed=n) for n in range(4)]
                wait_until(lambda: sum(r.state()["in_flight"] for r in pair) == 4, what="all run")
                assert proxy.client.post(ask, json={}).status_code == 200
                answers = [one.result() for one in pending]
            reasons = [answer.json()["choices"][0]["finish_reason"] for answer in answers]
            assert reasons == ["abort"] * 4
            assert proxy.client.post("/resume").status_code == 200
        assert proxy.stats()["router"]["retried"] == 0


def test_a_replica_that_stops_without_answering_keeps_no_rollout(adapter: Adapters) -> None:
    """vLLM at SIGTERM closes its port at once and sometimes never answers what it had taken."""
    with simulators(2) as replicas, RunningProxy(*(replica.url for replica in replicas)) as proxy:
        assert proxy.load("policy-v1", adapter(1)).status_code == 200
        replicas[0].set_faults(stuck_at_sigterm=True)
        with ThreadPoolExecutor(8) as pool:
            pending = [pool.submit(proxy.completion, "policy-v1", max_tokens=60, seed=seed) for seed in range(8)]
            wait_until(lambda: int(replicas[0].state()["in_flight"]) > 0, what="the replica has rollouts")
            replicas[0].terminate()
            started = time.monotonic()
            answers = [one.result() for one in pending]
        assert time.monotonic() - started < 10
        for seed, answer in enumerate(answers):
            assert answer.status_code == 200, answer.text
            tokens = answer.json()["choices"][0]["token_ids"]
            assert tokens == right_tokens(adapter(1), seed=seed, count=60)
        assert proxy.inflight() == 0
