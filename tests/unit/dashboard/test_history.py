"""What the charts are drawn from."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from proxy.dashboard.history import lags, sample
from proxy.fleet.policies import Policy, PolicyState
from proxy.fleet.pool import Fleet
from proxy.metrics.rollouts import RolloutMetrics
from proxy.routing.router import Router

LIVE, RETIRING, LOADING = PolicyState.LIVE, PolicyState.RETIRING, PolicyState.LOADING


def fleet_with(*policies: tuple[str | None, int | None, PolicyState, int]) -> Fleet:
    """Return a fleet with policies of (run, version, state, rollouts in flight)."""
    fleet = Fleet(("http://a", "http://b"), clock=lambda: 0.0, wall_clock=lambda: 1000.0)
    for run, version, state, leases in policies:
        name = f"{run}-v{version}"
        policy = Policy(name, name, "/p", version, None, None, announced_at=0.0, run=run)
        fleet.add_policy(policy)
        if state is not LOADING:
            fleet.commit(policy)
            fleet.set_policy_state(policy, state)
        for _ in range(leases):
            fleet.lease(0, policy)
    return fleet


@pytest.mark.parametrize(
    ("policies", "expected"),
    [
        ([], {}),
        ([("r", 5, LIVE, 0)], {}),
        ([("r", 5, LIVE, 3)], {0: 3}),
        ([("r", 3, RETIRING, 2), ("r", 4, LIVE, 1), ("r", 5, LIVE, 4)], {2: 2, 1: 1, 0: 4}),
        ([("r", 4, LIVE, 1), ("r", 5, LOADING, 0)], {0: 1}),
        ([("r", 9, LIVE, 1), ("other", 1, LIVE, 1), ("other", 2, LIVE, 1)], {0: 2, 1: 1}),
        ([(None, None, LIVE, 3)], {}),
    ],
    ids=["none", "idle", "current", "behind", "not yet served", "runs apart", "without version"],
)
def test_lags(policies: list[tuple[str | None, int | None, PolicyState, int]], expected: dict[int, int]) -> None:
    assert lags(fleet_with(*policies)) == expected


def test_a_sample_tells_the_busiest_and_the_mean_lag() -> None:
    fleet = fleet_with(("r", 1, LIVE, 1), ("r", 3, LIVE, 3))
    rollouts = RolloutMetrics(CollectorRegistry())
    rollouts.reported(0, 100, 60)
    rollouts.reported(1, 100, 30)
    rollouts.reported(1, 100, None)
    seen = sample(fleet, Router(max_tracked_blocks=10), rollouts)
    assert (seen.at, seen.inflight, seen.busiest, seen.idlest) == (1000.0, 4, 4, 0)
    assert (seen.lag_mean, seen.lag_max) == (0.5, 2)
    assert (seen.reported_prompt_tokens, seen.reported_cached_tokens) == (200, 90)
    assert sample(fleet_with(), Router(max_tracked_blocks=10), rollouts).lag_mean is None
