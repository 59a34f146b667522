"""What is made of what the proxy says: rates, shares, and the line of bars."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from proxy.contract import PolicyStatus, Router, Stats
from trainer_client.status.reading import WINDOW_S, Rates, Reading
from trainer_client.status.view import age, bars, routes, share, version_label


def reading(at: float, *, routed: int = 0, tokens: int = 0, policies: tuple[PolicyStatus, ...] = ()) -> Reading:
    router = Router(routed=routed, affinity=0, spilled=0, unmatched=routed)
    return Reading(at, (), policies, None, Stats(router=router, generated_tokens=tokens))


def live(name: str, *, since: float, state: str = "live") -> PolicyStatus:
    return PolicyStatus(
        name=name, path="/p", state=state, since=since, version=1, leases=0, held_by=(), files_deletable=False
    )


def test_a_rate_is_that_of_the_last_seconds() -> None:
    rates = Rates()
    for second in range(31):
        rates.add(reading(second, routed=max(0, second - 15) * 10, tokens=second * 100))
    assert rates.rollouts[0] == 0
    assert rates.rollouts[-1] == 10
    assert rates.tokens == 100
    assert len(rates.rollouts) == 30


def test_a_proxy_that_started_anew_is_not_slower_than_standing_still() -> None:
    rates = Rates()
    for at, routed in ((0, 1000), (1, 1100), (2, 5), (3, 15)):
        rates.add(reading(at, routed=routed))
    assert list(rates.rollouts) == [100, 10]


@given(st.lists(st.tuples(st.floats(0.01, 60), st.integers(0, 1000)), min_size=1))
def test_rates_are_never_negative_and_look_back_no_further_than_needed(steps: list[tuple[float, int]]) -> None:
    rates, at, routed = Rates(), 0.0, 0
    for pause, count in steps:
        at, routed = at + pause, routed + count
        rates.add(reading(at, routed=routed))
    assert all(rate >= 0 for rate in rates.rollouts)
    if rates.rollouts and steps[-1][0] > WINDOW_S + 1:
        assert abs(rates.rollouts[-1] - steps[-1][1] / steps[-1][0]) < 1e-6 * (1 + rates.rollouts[-1])


def test_the_current_policy_is_the_last_that_became_live() -> None:
    known = (live("old", since=1), live("new", since=3), live("next", since=5, state="loading"))
    assert (current := reading(0, policies=known).current) is not None and current.name == "new"
    assert reading(0).current is None


@given(st.lists(st.floats(0, 1e9)))
def test_bars_fit_and_the_highest_is_full(values: list[float]) -> None:
    line = bars(values)
    assert len(line) <= 30
    assert not values or max(values) == 0 or max(values) not in values[-30:] or "█" in line


def test_words_for_numbers() -> None:
    assert [age(s) for s in (-1, 59.9, 60, 3599, 3600, 86400 * 2)] == ["0 s", "59 s", "1 min", "59 min", "1 h", "2 d"]
    assert (share(1, 8), share(0, 0)) == ("12.5%", "-")
    labels = [
        version_label("trl-policy-v7~0a1b2c3d", None),
        version_label("math", None),
        version_label("math~00000001", 4),
    ]
    assert labels == ["v7", "math", "v4"]
    told = routes(Router(routed=4, affinity=2, spilled=1, unmatched=1))
    assert told == [("affinity", "50.0%"), ("spilled", "25.0%"), ("unmatched", "25.0%"), ("retried", "0.0%")]
