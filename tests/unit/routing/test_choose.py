"""The routing rule, case by case."""

from __future__ import annotations

from proxy.fleet.pool import Candidate
from proxy.routing.choose import SPILL_AHEAD, Choice, Route, choose


def candidates(*inflight: int) -> list[Candidate]:
    return [Candidate(index, load) for index, load in enumerate(inflight)]


def test_without_a_match_the_least_loaded_gets_it() -> None:
    assert choose(candidates(5, 2, 9), {}, turn=0) == Choice(1, Route.UNMATCHED)


def test_equally_loaded_replicas_take_turns() -> None:
    picked = [choose(candidates(1, 1, 4), {}, turn=turn).replica for turn in range(4)]
    assert picked == [0, 1, 0, 1]


def test_the_longest_match_gets_it() -> None:
    assert choose(candidates(3, 3, 0), {0: 4, 1: 7}, turn=0) == Choice(1, Route.AFFINITY)


def test_equal_matches_go_to_the_less_loaded() -> None:
    assert choose(candidates(3, 1, 0), {0: 4, 1: 4}, turn=0) == Choice(1, Route.AFFINITY)


def test_affinity_holds_up_to_the_limit_and_spills_beyond_it() -> None:
    assert choose(candidates(SPILL_AHEAD, 0), {0: 9}, turn=0) == Choice(0, Route.AFFINITY)
    assert choose(candidates(SPILL_AHEAD + 1, 0), {0: 9}, turn=0) == Choice(1, Route.SPILLED)
