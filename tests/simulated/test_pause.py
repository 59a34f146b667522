"""Real pauses, resumes and resets go to every replica, with the caller's parameters, and count only if all agree."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.simulated.checks import right_tokens, wait_quiet
from tests.simulated.conftest import Adapters
from tests.support.proxies import RunningProxy
from tests.support.replicas import SimulatedReplica, simulators, wait_until


@pytest.fixture(scope="module")
def proxy(pair: list[SimulatedReplica], adapter: Adapters) -> Iterator[RunningProxy]:
    with RunningProxy(*(replica.url for replica in pair), PROXY_PAUSE="real") as proxy:
        assert proxy.load("policy-v1", adapter(1)).status_code == 200
        yield proxy


@pytest.fixture(autouse=True)
def resumed(proxy: RunningProxy) -> Iterator[None]:
    yield
    proxy.client.post("/resume").raise_for_status()


def _last_control(replica: SimulatedReplica) -> str:
    return str(replica.state()["control"][-1]["path"])


def _paused(pair: list[SimulatedReplica]) -> list[str | None]:
    return [replica.state()["paused"] for replica in pair]


def test_keep_freezes_rollouts_and_resume_lets_them_finish(
    pair: list[SimulatedReplica], proxy: RunningProxy, adapter: Adapters
) -> None:
    with ThreadPoolExecutor(8) as pool:
        pending = [pool.submit(proxy.complete, "policy-v1", seed=seed, max_tokens=60) for seed in range(4)]
        wait_until(lambda: proxy.inflight() == 4, what="they are in flight")
        answer = proxy.client.post("/pause?mode=keep&clear_cache=false")
        assert (answer.status_code, answer.json()) == (200, {"status": "paused"})
        assert _paused(pair) == ["keep", "keep"]
        assert [_last_control(replica) for replica in pair] == ["/pause?mode=keep&clear_cache=false"] * 2
        pending += [pool.submit(proxy.complete, "policy-v1", seed=seed, max_tokens=60) for seed in range(4, 8)]
        # A policy may travel while everything stands still.
        assert proxy.load("during-pause", adapter(2)).status_code == 200
        assert not any(one.done() for one in pending)
        answer = proxy.client.post("/resume")
        assert (answer.status_code, answer.json()) == (200, {"status": "resumed"})
        for seed, one in enumerate(pending):
            assert one.result() == right_tokens(adapter(1), seed=seed, count=60)
    assert _paused(pair) == [None, None]
    assert proxy.complete("during-pause") == right_tokens(adapter(2))
    wait_quiet(proxy, *pair)


def test_wait_returns_when_the_rollouts_are_done(
    pair: list[SimulatedReplica], proxy: RunningProxy, adapter: Adapters
) -> None:
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(proxy.complete, "policy-v1", max_tokens=60)
        wait_until(lambda: proxy.inflight() == 1, what="it is in flight")
        assert proxy.client.post("/pause?mode=wait").status_code == 200
        assert pending.result() == right_tokens(adapter(1), count=60)
    assert _paused(pair) == ["wait", "wait"]


def test_a_bad_mode_is_the_replicas_own_refusal(pair: list[SimulatedReplica], proxy: RunningProxy) -> None:
    answer = proxy.client.post("/pause?mode=never")
    assert answer.status_code == 400
    assert "query.mode" in answer.json()["error"]["message"]
    assert _paused(pair) == [None, None]


def test_a_pause_that_fails_on_one_is_undone_on_the_others() -> None:
    with (
        simulators(2) as pair,
        SimulatedReplica(dev_mode=False) as closed,
        RunningProxy(pair[0].url, closed.url, pair[1].url, PROXY_PAUSE="real") as proxy,
    ):
        answer = proxy.client.post("/pause?mode=keep")
        assert answer.status_code == 404
        assert answer.headers["X-Proxy-Error"] == "broadcast_failed"
        assert closed.url in answer.json()["error"]["message"]
        assert pair[0].url not in answer.json()["error"]["message"]
        assert _paused(pair) == [None, None]
        assert proxy.complete("sim") == right_tokens("base:sim")


def test_reset_is_true_only_if_every_replica_says_so(
    pair: list[SimulatedReplica], proxy: RunningProxy, adapter: Adapters
) -> None:
    answer = proxy.client.post("/reset_prefix_cache")
    assert (answer.status_code, answer.json()) == (200, {"success": True})
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(proxy.complete, "policy-v1", max_tokens=60)
        wait_until(lambda: sum(r.state()["running"] for r in pair) == 1, what="one replica runs it")
        # vLLM says {"success": false} with status 200 while something runs.
        answer = proxy.client.post("/reset_prefix_cache")
        assert answer.status_code == 502, answer.text
        assert answer.headers["X-Proxy-Error"] == "broadcast_failed"
        assert pending.result() == right_tokens(adapter(1), count=60)
    wait_quiet(proxy, *pair)
