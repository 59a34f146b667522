"""Prometheus metrics. The registry is passed in; label values are few and known beforehand."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram


class Metrics:
    """Everything that is counted while it happens. What the fleet knows anyway is read when Prometheus asks."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._bound: dict[tuple[int, str, str], Counter] = {}
        self._rollouts = Counter(
            "lora_sync_rollouts",
            "Tries of rollouts on a replica, by what became of them (answered, failed, cancelled)",
            ["replica", "route", "outcome"],
            registry=registry,
        )
        self._load_seconds = Histogram(
            "lora_sync_load_seconds",
            "Seconds from an announcement to its commit or rollback",
            ["outcome"],
            buckets=(0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300),
            registry=registry,
        )

    def rollout(self, replica: int, route: str, outcome: str) -> None:
        """Count one try of a rollout."""
        key = (replica, route, outcome)
        bound = self._bound.get(key)
        if bound is None:  # looking labels up costs more than counting
            bound = self._bound[key] = self._rollouts.labels(str(replica), route, outcome)
        bound.inc()

    def load(self, seconds: float, outcome: str) -> None:
        """Count one load of a policy over the fleet."""
        self._load_seconds.labels(outcome).observe(seconds)
