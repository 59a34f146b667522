"""What the charts of the status page show: one sample a second of the last quarter of an hour, kept while nobody looks.

Counts are kept as counts; the page makes rates of them.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque

import msgspec

from proxy.fleet.pool import Fleet
from proxy.metrics.rollouts import RolloutMetrics
from proxy.routing.choose import Route
from proxy.routing.router import Router

SAMPLE_S = 1.0
"""Seconds between two samples, and between two snapshots in the stream."""

KEPT_SAMPLES = 900
"""A quarter of an hour: a few syncs of a slow training, about 100 KB in the stream's first message."""


class Sample(msgspec.Struct, frozen=True):
    """The fleet at one moment. What counts rollouts or tokens counts since the proxy's start."""

    at: float
    """Seconds since 1970."""
    affinity: int
    spilled: int
    unmatched: int
    retried: int
    generated_tokens: int
    predicted_prompt_tokens: int
    """Of the caches that are there now: falls when a replica's cache is emptied."""
    predicted_cached_tokens: int
    """Those of them that routing expects their replica to have found in its cache."""
    reported_prompt_tokens: int
    """Of answers that tell how many were cached."""
    reported_cached_tokens: int
    """Those of them that were."""
    inflight: int
    busiest: int
    """Rollouts in flight on the replica that has most."""
    idlest: int
    """Rollouts in flight on the ready replica that has fewest."""
    lag_mean: float | None
    """How many versions behind the newest of their run the rollouts in flight are. None: there are none."""
    lag_max: int | None


class History:
    """Samples of the fleet, oldest first. `run` takes them."""

    def __init__(self, fleet: Fleet, router: Router, rollouts: RolloutMetrics) -> None:
        self._fleet = fleet
        self._router = router
        self._rollouts = rollouts
        self.began = int(fleet.wall_clock())
        """Seconds since 1970: tells this process from the one before it."""
        self._kept: deque[Sample] = deque(maxlen=KEPT_SAMPLES)

    async def run(self) -> None:
        """Take a sample every SAMPLE_S seconds, until cancelled."""
        while True:
            self._kept.append(sample(self._fleet, self._router, self._rollouts))
            await asyncio.sleep(SAMPLE_S)

    def columns(self) -> dict[str, list[float | None]]:
        """Return the samples as charts take them: field -> its values, oldest first."""
        return {field: [getattr(one, field) for one in self._kept] for field in Sample.__struct_fields__}


def sample(fleet: Fleet, router: Router, rollouts: RolloutMetrics) -> Sample:
    """Return what the fleet does now."""
    behind = lags(fleet)
    with_version = behind.total()
    return Sample(
        at=fleet.wall_clock(),
        affinity=router.counts[Route.AFFINITY],
        spilled=router.counts[Route.SPILLED],
        unmatched=router.counts[Route.UNMATCHED],
        retried=router.counts[Route.RETRIED],
        generated_tokens=router.generated_tokens,
        predicted_prompt_tokens=router.prompt_tokens.total(),
        predicted_cached_tokens=router.cached_tokens.total(),
        reported_prompt_tokens=rollouts.prompt_tokens.total(),
        reported_cached_tokens=rollouts.cached_tokens.total(),
        inflight=fleet.inflight,
        busiest=max((replica.inflight for replica in fleet.replicas), default=0),
        idlest=min((replica.inflight for replica in fleet.ready), default=0),
        lag_mean=sum(lag * count for lag, count in behind.items()) / with_version if with_version else None,
        lag_max=max(behind, default=None),
    )


def lags(fleet: Fleet) -> Counter[int]:
    """Return how many rollouts in flight are how many versions behind the newest policy that their run is served."""
    behind: Counter[int] = Counter()
    for policy in fleet.policies.values():
        if policy.leases and (stale := fleet.staleness(policy)) is not None:
            behind[stale] += policy.leases
    return behind
