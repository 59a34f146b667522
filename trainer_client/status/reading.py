"""What the proxy says of itself at one moment, and what it did between two of them."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from proxy.contract import PolicyStatus, ReplicaStatus, Stats
from trainer_client.proxy_api import ProxyApi

WINDOW_S = 10.0
"""A rate is that of so many seconds, so that one group of rollouts is not a spike."""

SHOWN = ("loading", "live", "retiring")
"""States of policies that take one of vLLM's slots."""


@dataclass(frozen=True)
class Reading:
    """The proxy at one moment."""

    at: float
    """Seconds on the monotonic clock."""
    replicas: tuple[ReplicaStatus, ...]
    policies: tuple[PolicyStatus, ...]
    """Those that take a slot, newest last."""
    slots: int | None
    stats: Stats

    @property
    def ready(self) -> int:
        """How many replicas get rollouts."""
        return sum(replica.state == "ready" for replica in self.replicas)

    @property
    def inflight(self) -> int:
        """Rollouts in flight."""
        return sum(replica.inflight for replica in self.replicas)

    @property
    def current(self) -> PolicyStatus | None:
        """The policy that was the last to become live, None while rollouts are served by the base model."""
        return max((p for p in self.policies if p.state == "live"), key=lambda p: p.since, default=None)


def read(api: ProxyApi) -> Reading:
    """Ask the proxy for all of it. Raises ProxyError."""
    listed = api.policies()
    shown = tuple(policy for policy in listed.policies if policy.state in SHOWN)
    return Reading(time.monotonic(), api.replicas(), shown, listed.slots, api.stats())


class Rates:
    """How fast things go, from readings of the last seconds. A proxy that has started anew begins anew."""

    def __init__(self) -> None:
        self._kept: deque[Reading] = deque()
        self.rollouts: deque[float] = deque(maxlen=60)
        """Rollouts a second, one value a reading, newest last."""
        self.tokens = 0.0
        """Generated tokens a second."""

    def add(self, reading: Reading) -> None:
        """Take in a reading."""
        if self._kept and reading.stats.router.routed < self._kept[-1].stats.router.routed:
            self._kept.clear()
        self._kept.append(reading)
        while len(self._kept) > 2 and self._kept[1].at <= reading.at - WINDOW_S:
            self._kept.popleft()
        first = self._kept[0]
        if (seconds := reading.at - first.at) > 0:
            self.rollouts.append((reading.stats.router.routed - first.stats.router.routed) / seconds)
            self.tokens = (reading.stats.generated_tokens - first.stats.generated_tokens) / seconds
