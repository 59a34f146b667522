"""A real TRL publishes through a TrainerClient over two vLLM replicas: no pause, no path of TRL's, every token right.

Two runs of five optimizer steps, with a sync at each: one waits for its publications, one makes them in the
background.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from proxy.contract import LOAD_PATH
from proxy.demo.processes import free_port
from proxy.fleet import names
from tests.support.proxies import RunningProxy
from tests.support.recorder import Exchange, Recorder, asked_as, recorder
from tests.support.replicas import VllmReplica, wait_until
from tests.support.training import MAX_STALENESS, train, trl_pair

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

STEPS = 5

GOING_ON = 5
"""Rollouts that are answered before the trainer hears of a load: as many as a real pause would have held."""

PATIENCE_S = 60
"""On few cores a rollout can take seconds."""


@dataclass(frozen=True)
class Run:
    """What one training left behind."""

    background: bool
    history: list[dict[str, Any]]
    record: Recorder
    output: Path
    """TRL's own directory."""
    store: Path
    held: dict[str, set[str]]
    """Replica -> every policy that it was seen to hold right after a load."""
    live: list[str]
    """What the proxy served after the end."""

    def rollouts(self) -> list[Exchange]:
        """Return every rollout."""
        return self.record.of("/v1/completions")

    def loads(self) -> list[Exchange]:
        """Return every announcement."""
        return self.record.of(LOAD_PATH)


@pytest.fixture(scope="module")
def replicas() -> Iterator[list[VllmReplica]]:
    with trl_pair() as pair:
        yield pair


@pytest.fixture(scope="module", params=["waits", "background"])
def run(request: pytest.FixtureRequest, replicas: list[VllmReplica], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Train once, through a recorder, the proxy and both replicas."""
    name: str = request.param
    folder = tmp_path_factory.mktemp(name)
    held: dict[str, set[str]] = {replica.url: set() for replica in replicas}

    def during_the_sync() -> None:
        """The policy is loaded, but the trainer has not been told."""
        for replica in replicas:
            held[replica.url] |= {names.decode(upstream)[0] for upstream in replica.models()}
        answered = len(record.of("/v1/completions"))
        if answered:  # the workers start after the first sync
            wait_until(
                lambda: len(record.of("/v1/completions")) >= answered + GOING_ON,
                limit_s=PATIENCE_S,
                what="generation goes on during a sync",
            )

    arguments = ["--token-budget", "512", "--store", str(folder / "store"), "--run", name]
    arguments += ["--queue", "0"]  # a full one would stop generation whatever a sync does
    if name == "background":
        arguments.append("--background")
    with (
        RunningProxy(*(replica.url for replica in replicas)) as proxy,
        recorder(proxy.url, free_port(), folder / "kept", during_the_sync) as record,
    ):
        history = train(record.url, folder / "run", steps=STEPS, seed=0, arguments=tuple(arguments))
        wait_until(lambda: proxy.inflight() == 0, what="no rollout in flight")
        print(proxy.log())
        policies = proxy.client.get("/proxy/policies").json()["policies"]
        live = [policy["name"] for policy in policies if policy["state"] == "live" and policy["run"] == name]
        return Run(name == "background", history, record, folder / "run", folder / "store" / name, held, live)


def test_it_trains_with_a_sync_at_each_step(run: Run) -> None:
    assert [entry["step"] for entry in run.history] == list(range(1, STEPS + 1))
    aliases = [asked_as(exchange.json()) for exchange in run.loads()]
    assert aliases == [f"trl-policy-v{version}" for version in range(1, STEPS + 2)]
    steps = [exchange.json()["policy"]["step"] for exchange in run.loads()]
    assert steps == list(range(STEPS + 1))
    assert run.history[0]["ratio"] == pytest.approx(1.0, abs=1e-2), "the first step trains on what was sampled"


def test_every_policy_was_held_by_both_replicas(run: Run) -> None:
    published = {exchange.json()["lora_name"] for exchange in run.loads()}
    for replica, held in run.held.items():
        assert published <= held, f"{replica} never held {published - held}"


def test_the_window_stays_live_and_nothing_else(run: Run) -> None:
    newest = [exchange.json()["lora_name"] for exchange in run.loads()][-MAX_STALENESS - 1 :]
    assert run.live == newest
    assert {path.name for path in run.store.iterdir() if path.is_dir()} >= set(newest)
    assert not (run.output / ".vllm_lora").exists(), "TRL has saved nothing for the replicas"


def test_no_replica_was_paused(run: Run, replicas: list[VllmReplica]) -> None:
    assert not [
        exchange.target for exchange in run.record.exchanges if exchange.target.startswith(("/pause", "/resume"))
    ]
    for replica in replicas:
        log = replica.log.read_text(errors="replace")
        assert f"POST {LOAD_PATH}" in log
        assert "POST /pause" not in log


def test_generation_goes_on_during_every_sync(run: Run) -> None:
    """Rollouts are answered between an announcement and its answer, of which the first has none before it."""
    answered = [rollout.until for rollout in run.rollouts()]
    during = [sum(load.at < moment < load.until for moment in answered) for load in run.loads()[1:]]
    assert min(during) >= GOING_ON, during


def test_the_training_goes_on_while_a_policy_travels(run: Run) -> None:
    staleness = [entry["lora_sync/staleness"] for entry in run.history]
    waited = [round(entry["perf/weight_sync_s"], 3) for entry in run.history]
    took = [round(entry["lora_sync/publish_s"], 3) for entry in run.history]
    print(f"seconds of each sync {waited}, of the newest publication {took}, staleness {staleness}")
    if run.background:
        assert max(staleness) == 1
    else:
        assert set(staleness) == {0}
    assert all(entry["perf/weight_sync_pause_s"] == 0 for entry in run.history)


def test_trls_logs_tell_of_the_publications(run: Run) -> None:
    last = run.history[-1]
    assert last["lora_sync/publications_total"] == STEPS + 1 - last["lora_sync/staleness"]
    assert last["lora_sync/failures_total"] == 0
    assert last["lora_sync/policies_live"] == MAX_STALENESS + 1
    dropped = sum(entry.get("sample/dropped_stale_total", 0) for entry in run.history)
    assert last["lora_sync/discarded_total"] == dropped
    trained = sum(entry["batch/samples_per_step"] for entry in run.history)
    assert last["lora_sync/rollouts_total"] - dropped >= trained > 0


def test_nothing_failed(run: Run) -> None:
    failed = [(e.method, e.target, e.status, e.answer[:500]) for e in run.record.exchanges if e.status != 200]
    assert not failed
    reasons = Counter(e.answered()["choices"][0]["finish_reason"] for e in run.rollouts())
    assert set(reasons) <= {"length", "stop"}, reasons


def test_every_token_came_from_the_policy_that_was_asked(run: Run) -> None:
    from tests.support.who_sampled import assert_own_weights

    assert_own_weights(run.record)
