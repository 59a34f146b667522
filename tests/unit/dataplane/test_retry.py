"""How often a rollout is tried again, and how many replicas it can keep out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.dataplane.retry import Step, may_go_on, next_step


@pytest.mark.parametrize(
    ("tries_left", "failed_inside", "step"),
    [
        (2, False, Step.TRY),
        (0, False, Step.TRY),
        (0, True, Step.TRY),
        (-1, False, Step.HOLD),
        (-9, False, Step.HOLD),
        (-1, True, Step.GIVE_UP),
    ],
)
def test_what_follows(tries_left: int, failed_inside: bool, step: Step) -> None:
    assert next_step(tries_left=tries_left, failed_inside=failed_inside) is step


@given(st.integers(0, 5), st.lists(st.tuples(st.integers(0, 7), st.sets(st.integers(0, 7)), st.booleans())))
def test_no_rollout_keeps_more_replicas_out_than_it_may(retries: int, story: list[tuple[int, set[int], bool]]) -> None:
    """Each part of the story: which replica fails it, which have come back by then, and whether it failed inside."""
    out: set[int] = set()
    failures, inside = 0, False
    for replica, back, failed_inside in story:
        step = next_step(tries_left=retries - failures, failed_inside=inside) if failures else Step.TRY
        if step is Step.GIVE_UP:
            assert inside and failures > retries
            break
        out -= back
        if step is Step.HOLD and not may_go_on(still_out=len(out), retries=retries):
            continue
        out.add(replica)
        failures, inside = failures + 1, inside or failed_inside
        assert len(out) <= retries + 1


@given(st.integers(0, 5), st.integers(0, 5))
def test_a_held_rollout_goes_on_in_the_end(retries: int, still_out: int) -> None:
    while not may_go_on(still_out=still_out, retries=retries):
        still_out -= 1
    assert still_out >= 0
