"""Whatever is asked in whatever order: the index stays bounded, and a choice is always one of those offered."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from proxy.fleet.pool import Candidate
from proxy.routing.choose import SPILL_AHEAD, Route, choose
from proxy.routing.prefix_index import PrefixIndex

POLICIES = st.sampled_from(["p-v1", "p-v2", "base"])
CHAINS = st.lists(st.integers(1, 40), min_size=1, max_size=8, unique=True)
RECORDS = st.lists(st.tuples(POLICIES, CHAINS, st.integers(0, 3)), max_size=60)


def filled(records: list[tuple[str, list[int], int]], *, limit: int = 1_000_000) -> PrefixIndex:
    index = PrefixIndex(limit)
    for policy, chain, replica in records:
        index.record(policy, chain, replica)
    return index


@given(RECORDS, POLICIES, CHAINS)
def test_a_match_is_never_longer_than_the_prompt(
    records: list[tuple[str, list[int], int]], policy: str, chain: list[int]
) -> None:
    matched = filled(records).matched(policy, chain, range(4))
    assert set(matched) == set(range(4))
    assert all(0 <= length <= len(chain) for length in matched.values())


@given(RECORDS)
def test_the_size_is_counted_exactly_and_returns_to_zero(records: list[tuple[str, list[int], int]]) -> None:
    index = filled(records)
    assert len(index) == len({(policy, piece) for policy, chain, _ in records for piece in chain})
    index.keep_policies({"base"})
    assert len(index) == len({piece for policy, chain, _ in records if policy == "base" for piece in chain})
    index.keep_policies(set())
    assert len(index) == 0


@given(RECORDS, st.integers(8, 30))
def test_the_index_never_outgrows_its_limit(records: list[tuple[str, list[int], int]], limit: int) -> None:
    assert len(filled(records, limit=limit)) <= limit


@given(RECORDS, POLICIES, CHAINS)
def test_a_forgotten_replica_attracts_nothing(
    records: list[tuple[str, list[int], int]], policy: str, chain: list[int]
) -> None:
    index = filled(records)
    index.forget_replica(2)
    assert index.matched(policy, chain, range(4))[2] == 0
    assert len(index) <= len(filled(records))


@given(CHAINS, st.integers(0, 3))
def test_a_prompt_comes_back_to_where_it_was(chain: list[int], replica: int) -> None:
    matched = filled([("p-v1", chain, replica)]).matched("p-v1", chain, range(4))
    assert matched == {r: len(chain) if r == replica else 0 for r in range(4)}


@given(st.lists(CHAINS, min_size=2, max_size=6))
def test_a_template_that_all_prompts_share_attracts_nobody(tails: list[list[int]]) -> None:
    template = [101, 102, 103]
    heads = {tail[0] for tail in tails}
    index = filled([("p-v1", template + tail, 0) for tail in tails])
    fresh = index.matched("p-v1", [*template, 999], range(2))
    assert fresh == ({0: 0, 1: 0} if len(heads) > 1 else {0: 3, 1: 0})


LOADS = st.lists(st.integers(0, 40), min_size=1, max_size=8)


@given(LOADS, st.dictionaries(st.integers(0, 7), st.integers(0, 9)), st.integers(0, 1000))
def test_a_choice_is_one_of_the_candidates_and_never_far_ahead(
    loads: list[int], matched: dict[int, int], turn: int
) -> None:
    candidates = [Candidate(index, load) for index, load in enumerate(loads)]
    choice = choose(candidates, matched, turn=turn)
    assert choice.replica in range(len(loads))
    ahead = loads[choice.replica] - min(loads)
    assert ahead <= (SPILL_AHEAD if choice.route is Route.AFFINITY else 0)
    assert (choice.route is Route.UNMATCHED) == (not any(matched.get(c.index) for c in candidates))
