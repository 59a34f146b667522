"""The main job, on the real thing: an unmodified TRL trains through the proxy over two vLLM replicas.

One run of eight optimizer steps, with a sync at each, is looked at from every side.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from proxy.contract import LOAD_PATH
from proxy.demo.processes import free_port
from proxy.fleet import names
from tests.support.proxies import RunningProxy
from tests.support.recorder import Exchange, Recorder, recorder
from tests.support.replicas import VllmReplica, wait_until
from tests.support.training import train, trl_pair

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

STEPS = 8


@dataclass(frozen=True)
class Run:
    """What one training left behind."""

    history: list[dict[str, Any]]
    record: Recorder
    stats: dict[str, Any]
    """/proxy/stats after its end."""
    held: dict[str, set[str]]
    """Replica -> every policy that it was seen to hold right after a load."""
    running: list[float]
    """Requests that each replica still ran after the end."""

    def rollouts(self) -> list[Exchange]:
        """Return every rollout."""
        return self.record.of("/v1/completions")

    def announced(self) -> list[str]:
        """Return the policies in the order in which they were announced."""
        return [exchange.json()["lora_name"] for exchange in self.record.of(LOAD_PATH)]


@pytest.fixture(scope="module")
def replicas() -> Iterator[list[VllmReplica]]:
    with trl_pair() as pair:
        yield pair


@pytest.fixture(scope="module")
def run(replicas: list[VllmReplica], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Train once, through a recorder, the proxy and both replicas."""
    folder = tmp_path_factory.mktemp("trl")
    held: dict[str, set[str]] = {replica.url: set() for replica in replicas}

    def look() -> None:
        for replica in replicas:
            held[replica.url] |= {names.decode(upstream)[0] for upstream in replica.models()}

    with (
        RunningProxy(*(replica.url for replica in replicas)) as proxy,
        recorder(proxy.url, free_port(), folder / "kept", look) as record,
    ):
        history = train(record.url, folder / "run", steps=STEPS, seed=0, arguments=("--token-budget", "512"))
        # TRL leaves with rollouts in flight; the proxy passes that on within moments.
        wait_until(lambda: proxy.inflight() == 0, what="no rollout in flight")
        print(proxy.log())
        running = [replica.metric("vllm:num_requests_running") for replica in replicas]
        return Run(history, record, proxy.stats(), held, running)


def test_it_trains_with_a_sync_at_each_step(run: Run) -> None:
    assert [entry["step"] for entry in run.history] == list(range(1, STEPS + 1))
    assert run.announced() == [f"trl-policy-v{version}" for version in range(1, len(run.announced()) + 1)]
    assert len(run.announced()) >= STEPS


def test_every_policy_was_held_by_both_replicas(run: Run) -> None:
    for replica, held in run.held.items():
        assert set(run.announced()) <= held, f"{replica} never held {set(run.announced()) - held}"


def test_rollouts_reached_both_replicas(run: Run) -> None:
    routed = [upstream["routed"] for upstream in run.stats["upstreams"]]
    assert sum(routed) == len(run.rollouts())
    assert min(routed) > 0.25 * sum(routed), routed
    by_replica = {
        upstream: {e.json()["model"] for e in run.rollouts() if e.headers["x-proxy-upstream"] == upstream}
        for upstream in "01"
    }
    assert all(len(policies) > STEPS // 4 for policies in by_replica.values()), by_replica


def test_the_first_step_trains_on_what_was_sampled(run: Run) -> None:
    assert run.history[0]["ratio"] == pytest.approx(1.0, abs=1e-2)


def test_nothing_failed(run: Run) -> None:
    failed = [(e.method, e.target, e.status, e.answer[:500]) for e in run.record.exchanges if e.status != 200]
    assert not failed
    reasons = Counter(e.answered()["choices"][0]["finish_reason"] for e in run.rollouts())
    assert set(reasons) <= {"length", "stop"}, reasons


def test_nothing_is_left_in_flight(run: Run) -> None:
    assert [upstream["inflight"] for upstream in run.stats["upstreams"]] == [0, 0]
    assert run.running == [0, 0]


def test_every_token_came_from_the_policy_that_was_asked(run: Run) -> None:
    from tests.support.who_sampled import assert_own_weights

    assert_own_weights(run.record)
