"""The replay of `benchmarks.routing`: it must be right before its figures can be."""

from __future__ import annotations

import pytest

from benchmarks.routing import ROUTINGS, Replay
from benchmarks.traces import GROUP, Conversation, Trace, Turn, burst
from benchmarks.virtual_fleet import (
    PREFILL_TOKENS_PER_S,
    STEP_FLOOR_S,
    STEP_PER_SEQUENCE_S,
    Replica,
    Rollout,
    alone_s,
    work_s,
)
from proxy.routing.request_key import RequestKey


def finish(replica: Replica) -> float:
    while (following := replica.next_event()) != float("inf"):
        replica.step_to(following)
    return replica.now


def test_one_rollout_takes_its_prompt_and_its_tokens() -> None:
    replica, rollout = Replica(), Rollout(2000, (), 100)
    replica.add(rollout, 5.0)
    assert finish(replica) == pytest.approx(5.0 + 2000 / PREFILL_TOKENS_PER_S + 100 * STEP_FLOOR_S)
    assert alone_s(rollout) == pytest.approx(finish(replica) - 5.0)
    assert (replica.prefilled, replica.generated, replica.cached) == (2000, 100, 0)


def test_a_full_batch_works_without_pause() -> None:
    replica = Replica()
    for _ in range(200):
        replica.add(Rollout(16, (), 500), 0.0)
    assert finish(replica) == pytest.approx(work_s(prefilled=3200, generated=100_000), rel=0.02)
    assert finish(replica) >= 100_000 * STEP_PER_SEQUENCE_S


def test_a_prompt_that_was_there_costs_its_last_block() -> None:
    replica = Replica()
    for _ in range(2):
        replica.add(Rollout(160, tuple(range(10)), 10), replica.now)
        finish(replica)
    assert (replica.prefilled, replica.cached) == (160 + 16, 144)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_no_routing_beats_the_best_cache_or_the_bound(routing: str) -> None:
    row, seconds = Replay(burst(0.6, shuffled=True), replicas=3, chooser=ROUTINGS[routing]()).run(routing)
    assert 0 < row.hit_rate <= row.best_hit_rate < 1
    assert row.makespan_ratio >= 1 and seconds > 0
    assert row.unmatched + row.spilled < 1 and 1 <= row.replicas_per_group <= 3


def test_a_turn_waits_for_the_one_before_and_the_next_conversation_for_a_place() -> None:
    key = RequestKey("-", (1,), False, prompt_tokens=16)
    turns = [Turn(key, [7] * 16, 100), Turn(key, [7] * 32, 100)]
    trace = Trace("two", [Conversation(group, turns) for group in range(GROUP)], inflight=1)
    row, seconds = Replay(trace, replicas=1, chooser=ROUTINGS["cost"]()).run("cost")
    assert seconds == pytest.approx(2 * GROUP * 100 * STEP_FLOOR_S, rel=0.02)
    assert row.max_over_mean == 1
