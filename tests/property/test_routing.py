"""Whatever is asked in whatever order: the index stays bounded and exact, and choices are among those offered."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.fleet.pool import Candidate
from proxy.routing.choose import RULES, Demand, Route, by_cost, choose
from proxy.routing.load import FREE_BATCH, Groups
from proxy.routing.pace import KNOWN_AFTER, Paces
from proxy.routing.prefix_index import Match, PrefixIndex
from proxy.routing.request_key import PIECE_BYTES, pieces_of

relaxed = settings(deadline=None)
"""A busy machine is no failure; the time limit of every test holds."""

REPLICAS = range(4)
POLICIES = st.sampled_from(["p-v1", "p-v2", "base"])
PROMPTS = st.text("ab", max_size=8)
"""Each letter stands for one piece; few letters, so that prompts share beginnings."""
RECORDS = st.lists(st.tuples(POLICIES, PROMPTS, st.sampled_from(REPLICAS)), max_size=60)
Record = tuple[str, str, int]


def pieces(prompt: str) -> tuple[int, ...]:
    return pieces_of(b"".join(letter.encode() * PIECE_BYTES for letter in prompt) + b"]")


def filled(records: list[Record], *, limit: int = 1_000_000) -> PrefixIndex:
    index = PrefixIndex(limit)
    for policy, prompt, replica in records:
        index.record(policy, pieces(prompt), replica)
    return index


def longest_seen(records: list[Record], policy: str, prompt: str, replica: int) -> int:
    """Say the same as the index, the slow way."""
    asked, longest = pieces(prompt), 0
    for other_policy, other, other_replica in records:
        if (other_policy, other_replica) == (policy, replica):
            same = [a == b for a, b in zip(asked, pieces(other), strict=False)]
            longest = max(longest, [*same, False].index(False))
    return longest


@relaxed
@given(RECORDS, POLICIES, PROMPTS)
def test_a_match_is_the_longest_that_was_recorded(records: list[Record], policy: str, prompt: str) -> None:
    match = filled(records).match(policy, pieces(prompt), REPLICAS)
    assert match.seen == {replica: longest_seen(records, policy, prompt, replica) for replica in REPLICAS}


@relaxed
@given(RECORDS, POLICIES, PROMPTS, st.sampled_from(REPLICAS))
def test_a_recorded_prompt_attracts(records: list[Record], policy: str, prompt: str, replica: int) -> None:
    match = filled([*records, (policy, prompt, replica)]).match(policy, pieces(prompt), REPLICAS)
    assert match.attracts and match.seen[replica] == len(prompt) + 1


@relaxed
@given(st.text("ab", min_size=1, max_size=4), st.lists(st.text("cd", min_size=4, max_size=4), max_size=9))
def test_a_template_attracts_nobody(template: str, questions: list[str]) -> None:
    index = filled([("p", template + question, number % 2) for number, question in enumerate(questions)])
    assert not index.match("p", pieces(template + "eeee"), REPLICAS).attracts


@relaxed
@given(RECORDS)
def test_the_size_is_counted_exactly_and_returns_to_zero(records: list[Record]) -> None:
    index = filled(records)
    assert len(index) == len({(policy, piece) for policy, prompt, _ in records for piece in pieces(prompt)})
    index.keep_policies({"base"})
    assert len(index) == len({piece for policy, prompt, _ in records if policy == "base" for piece in pieces(prompt)})
    index.keep_policies(set())
    assert len(index) == 0


@relaxed
@given(RECORDS, st.integers(2, 30), st.sets(st.integers(0, 59)))
def test_the_index_never_outgrows_its_limit_and_never_claims_too_much(
    records: list[Record], limit: int, aged_at: set[int]
) -> None:
    index = PrefixIndex(limit)
    for number, (policy, prompt, replica) in enumerate(records):
        if number in aged_at:
            index.age()
        index.record(policy, pieces(prompt), replica)
        assert len(index) <= limit
        match = index.match(policy, pieces(prompt), REPLICAS)
        assert match.seen[replica] == min(len(prompt) + 1, max(limit // 2, 1))
        for other in REPLICAS:
            assert match.seen[other] <= longest_seen(records, policy, prompt, other)


@relaxed
@given(RECORDS, POLICIES, PROMPTS)
def test_a_forgotten_replica_attracts_nothing(records: list[Record], policy: str, prompt: str) -> None:
    index = filled(records)
    index.forget_replica(2)
    kept = [record for record in records if record[2] != 2]
    assert (
        index.match(policy, pieces(prompt), REPLICAS).seen == filled(kept).match(policy, pieces(prompt), REPLICAS).seen
    )
    assert len(index) == len(filled(kept))


LOADS = st.lists(st.tuples(st.integers(0, 400), st.integers(0, 500_000)), min_size=1, max_size=8)
SEEN = st.lists(st.integers(0, 9), min_size=8, max_size=8)


@relaxed
@given(LOADS, SEEN, st.booleans(), st.integers(0, 1000), st.integers(0, 255), st.sampled_from(sorted(RULES)))
def test_a_choice_is_one_of_the_candidates_and_its_reason_is_true(
    loads: list[tuple[int, int]], seen: list[int], attracts: bool, turn: int, session: int, rule: str
) -> None:
    candidates = [Candidate(index, *load) for index, load in enumerate(loads)]
    match = Match({candidate.index: seen[candidate.index] for candidate in candidates}, attracts)
    choice = choose(RULES[rule], candidates, Demand(1000, 100.0, 2000, 1, match, session=session), turn=turn)
    assert choice.replica in range(len(loads))
    assert choice.load == 1000 - 100 * seen[choice.replica] + 2000
    most = max(match.seen.values())
    assert (choice.route is Route.UNMATCHED) == (not most or not attracts)
    assert (choice.route is Route.AFFINITY) <= (match.seen[choice.replica] == most)


@relaxed
@given(LOADS, SEEN, st.integers(0, 1000))
def test_affinity_is_never_more_than_the_prompt_is_worth(
    loads: list[tuple[int, int]], seen: list[int], turn: int
) -> None:
    candidates = [Candidate(index, *load) for index, load in enumerate(loads)]
    match = Match({candidate.index: seen[candidate.index] for candidate in candidates}, True)
    choice = choose(by_cost, candidates, Demand(1000, 100.0, 2000, 1, match), turn=turn)
    picked = candidates[choice.replica]
    if choice.route is Route.AFFINITY:
        ahead = max(picked.load - max(min(c.load for c in candidates), FREE_BATCH * 2000), 0)
        held_up = 1 + min(c.inflight for c in candidates)
        assert ahead**2 / (2 * sum(c.load for c in candidates) or 1) <= 1000 * held_up
    if choice.route is Route.UNMATCHED:
        assert picked.load == min(candidate.load for candidate in candidates)


@relaxed
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2), st.integers(0, 900)), max_size=80))
def test_what_is_kept_free_is_what_open_groups_lack(sightings: list[tuple[int, int, int]]) -> None:
    groups = Groups()
    for group, replica, share in sightings:
        groups.saw(("p", group), replica, share=share)
        are_open = [known for other in range(6) if (known := groups.open(("p", other)))]
        for asked in range(3):
            assert groups.kept(asked) == sum(known.kept for known in are_open if known.replica == asked) >= 0


def learn(paces: Paces, replica: int, seconds: float) -> None:
    paces.learn(replica, prefill=0, tokens=100, seconds=seconds, beside=1)


@relaxed
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 1000), st.integers(1, 64)), max_size=40))
def test_one_that_shows_now_and_then_what_it_can_is_never_slow(spells: list[tuple[int, int, int]]) -> None:
    paces, given_by = Paces(), Counter[int]()
    for replica, times_slower, answers in spells:
        for _ in range(answers):
            learn(paces, replica, times_slower if given_by[replica] % 32 else 1)
            given_by[replica] += 1
            assert not paces.slow


@relaxed
@given(st.lists(st.tuples(st.integers(0, 2), st.floats(0, 1)), max_size=99))
def test_one_ten_times_slower_than_the_rest_is_found_as_soon_as_paces_are_known(
    answers: list[tuple[int, float]],
) -> None:
    paces = Paces()
    for replica, share in [*answers, *[(number % 3, 0.0) for number in range(3 * KNOWN_AFTER + 3)]]:
        learn(paces, replica, (1 + share) * (10 if replica == 2 else 1))
        assert set(paces.slow) <= {2}
    assert set(paces.slow) == {2}


@pytest.mark.parametrize("rule", sorted(RULES))
def test_every_rule_is_fair_to_equal_replicas(rule: str) -> None:
    idle = [Candidate(index, 0, 0) for index in range(3)]
    nothing = Demand(100, 10.0, 10, 1, Match(dict.fromkeys(range(3), 0), False))
    assert [choose(RULES[rule], idle, nothing, turn=turn).replica for turn in range(3)] == [0, 1, 2]
