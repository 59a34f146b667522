"""Learning is the same: TRL through the proxy over two replicas, against TRL on one replica without a proxy."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest

from tests.support.proxies import RunningProxy
from tests.support.replicas import VllmReplica
from tests.support.training import train, trl_replica

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(3600)]

STEPS = 40
WINDOW = 10
"""Steps over which rewards are averaged: single steps are noise."""

SEEDS = (1, 2, 3)
SETTINGS = ("--learning-rate", "1e-2", "--token-budget", "512")

BOUND = 4.0
"""Deviations that a fourth run may be off the mean of three at any window, the deviation being estimated from these
three: an equal run is beyond it about once in forty trials, where three would be once in seven."""


def windows(history: list[dict[str, Any]]) -> list[float]:
    """Return the mean reward of each WINDOW of steps."""
    rewards = [float(entry["reward"]) for entry in history]
    return [statistics.mean(rewards[start : start + WINDOW]) for start in range(0, len(rewards), WINDOW)]


def forget(replica: VllmReplica) -> None:
    """Take every adapter and every cached prefix away, as if the replica were new."""
    for name in list(replica.models())[1:]:
        assert replica.unload(name).status_code == 200
    assert replica.client.post("/reset_prefix_cache").json() == {"success": True}


def test_the_reward_curve_lies_within_the_spread_of_trl_alone(tmp_path: Path) -> None:
    """The deviation is pooled over the windows: three runs alone would give each window a bound of its own luck."""
    direct = []
    with trl_replica() as first:
        for seed in SEEDS:
            forget(first)
            history = train(first.url, tmp_path / f"direct-{seed}", steps=STEPS, seed=seed, arguments=SETTINGS)
            direct.append(windows(history))
        forget(first)
        with trl_replica() as second, RunningProxy(first.url, second.url) as proxy:
            history = train(proxy.url, tmp_path / "proxied", steps=STEPS, seed=SEEDS[0], arguments=SETTINGS)
            routed = [upstream["routed"] for upstream in proxy.stats()["upstreams"]]
    proxied = windows(history)
    by_window = list(zip(*direct, strict=True))
    deviation = statistics.mean(statistics.variance(rewards) for rewards in by_window) ** 0.5
    off = [(reward - statistics.mean(rewards)) / deviation for reward, rewards in zip(proxied, by_window, strict=True)]
    print(f"direct {direct}\nproxied {proxied}, rollouts by replica {routed}")
    print(f"deviation {deviation:.4f}, off by {[round(x, 2) for x in off]} deviations")
    assert min(routed) > 0
    assert max(map(abs, off)) < BOUND
    for curve in [*direct, proxied]:
        assert curve[-1] - curve[0] > 0.03, "nothing was learned, so the curves compare nothing"
