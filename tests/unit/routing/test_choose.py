"""The routing rules, case by case."""

from __future__ import annotations

import pytest
from msgspec import structs

from proxy.fleet.pool import Candidate
from proxy.routing.choose import RULES, Choice, Demand, Route, by_cost, choose, least_loaded, round_robin
from proxy.routing.load import FREE_BATCH
from proxy.routing.prefix_index import Match

ANSWER = 1000
PROMPT = 1600


def candidates(*inflight: int) -> list[Candidate]:
    return [Candidate(index, count, count * ANSWER) for index, count in enumerate(inflight)]


def demand(seen: dict[int, int] | None = None, *, of: int = 2, attracts: bool = True, session: int = 0) -> Demand:
    everyone = dict.fromkeys(range(of), 0) | (seen or {})
    return Demand(PROMPT, 16.0, ANSWER, 1, Match(everyone, attracts), session=session)


def picked(loads: list[Candidate], wanted: Demand, *, turn: int = 0) -> tuple[int, Route]:
    choice = choose(by_cost, loads, wanted, turn=turn)
    return choice.replica, choice.route


def test_without_a_match_the_one_with_the_least_to_do_gets_it() -> None:
    assert picked(candidates(5, 2, 9), demand(of=3)) == (1, Route.UNMATCHED)


def test_load_counts_in_tokens_before_rollouts() -> None:
    few_but_long = [Candidate(0, 2, 50_000), Candidate(1, 9, 9_000)]
    assert picked(few_but_long, demand()) == (1, Route.UNMATCHED)


def test_equally_loaded_replicas_take_turns() -> None:
    replicas = [picked(candidates(1, 1, 4), demand(of=3), turn=turn)[0] for turn in range(4)]
    assert replicas == [0, 1, 0, 1]


def test_the_longest_match_gets_it() -> None:
    assert picked(candidates(3, 3, 0), demand({0: 40, 1: 70}, of=3)) == (1, Route.AFFINITY)


def test_equal_matches_go_to_the_less_loaded() -> None:
    assert picked(candidates(3, 1, 0), demand({0: 40, 1: 40}, of=3)) == (1, Route.AFFINITY)


def test_a_template_attracts_nobody_but_is_not_computed_again() -> None:
    choice = choose(by_cost, candidates(3, 1), demand({0: 60, 1: 60}, attracts=False), turn=0)
    assert choice == Choice(1, Route.UNMATCHED, PROMPT - 60 * 16 + ANSWER, PROMPT - 60 * 16)


def test_a_small_batch_makes_nobody_wait() -> None:
    assert picked(candidates(FREE_BATCH, 0), demand({0: 99})) == (0, Route.AFFINITY)


def test_affinity_yields_when_the_wait_costs_more_than_the_prompt() -> None:
    assert picked(candidates(FREE_BATCH + 5, FREE_BATCH), demand({0: 100})) == (0, Route.AFFINITY)
    assert picked(candidates(FREE_BATCH + 400, FREE_BATCH), demand({0: 100})) == (1, Route.SPILLED)


def test_a_longer_prompt_is_worth_a_longer_wait() -> None:
    loads = candidates(FREE_BATCH + 70, 0)
    assert picked(loads, demand({0: 10})) == (1, Route.SPILLED)
    assert picked(loads, Demand(100_000, 1000.0, ANSWER, 1, Match({0: 100, 1: 0}, True))) == (0, Route.AFFINITY)


def test_a_group_that_has_outgrown_its_place_yields_sooner() -> None:
    loads = candidates(FREE_BATCH + 60, 20)
    wanted = demand({0: 100})
    assert picked(loads, wanted) == (0, Route.AFFINITY)
    assert picked(loads, structs.replace(wanted, outgrown=True)) == (1, Route.SPILLED)


def test_a_session_decides_between_nearly_equal_ones_only() -> None:
    assert picked(candidates(3, 3), demand(session=0b10)) == (1, Route.UNMATCHED)
    assert picked(candidates(3, 4), demand(session=0b10)) == (1, Route.UNMATCHED)
    assert picked(candidates(3, 6), demand(session=0b10)) == (0, Route.UNMATCHED)
    assert picked(candidates(3, 3), demand({0: 9, 1: 9}, session=0b10)) == (1, Route.AFFINITY)


def test_the_load_is_what_must_be_computed_and_all_answers() -> None:
    wanted = Demand(PROMPT, 16.0, ANSWER, 4, Match({0: 50}, True))
    assert choose(by_cost, candidates(0), wanted, turn=0).load == PROMPT - 800 + 4 * ANSWER


def test_the_rules_for_comparison_ignore_what_was_seen_but_tell() -> None:
    assert choose(round_robin, candidates(0, 9), demand({0: 9}), turn=1).replica == 1
    assert choose(least_loaded, candidates(4, 3), demand({0: 9}), turn=0).route is Route.SPILLED


@pytest.mark.parametrize("rule", RULES)
def test_one_candidate_is_always_picked(rule: str) -> None:
    assert choose(RULES[rule], candidates(7), demand(of=1), turn=5).replica == 0
