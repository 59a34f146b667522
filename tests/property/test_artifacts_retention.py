"""For any history of versions: the window holds what a rollout may still use, and nothing leaves it early."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trainer_client.policies import fallen_out, next_version
from trainer_client.slots import max_loras

versions = st.sets(st.integers(min_value=1, max_value=200))
staleness = st.integers(min_value=0, max_value=20)


@given(versions=versions, max_staleness=staleness)
def test_exactly_the_policies_within_the_window_stay(versions: set[int], max_staleness: int) -> None:
    out = fallen_out(versions, max_staleness=max_staleness)
    stay = versions.difference(out)
    newest = max(versions, default=0)
    assert all(newest - version <= max_staleness for version in stay)
    assert all(newest - version > max_staleness for version in out)
    assert out == sorted(out)


@given(count=st.integers(min_value=1, max_value=40), max_staleness=staleness)
def test_live_policies_never_need_more_slots_than_vllm_was_given(count: int, max_staleness: int) -> None:
    live: set[int] = set()
    for _ in range(count):
        live.add(next_version(live))
        assert len(live) <= max_loras(max_staleness)
        live.difference_update(fallen_out(live, max_staleness=max_staleness))
        assert len(live) <= max_staleness + 1


@given(versions=versions)
def test_a_new_version_is_above_all_others(versions: set[int]) -> None:
    assert all(next_version(versions) > version for version in versions)
