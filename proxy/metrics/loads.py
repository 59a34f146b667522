"""Counts of the control plane: announcements, and how long each phase of a load took, over all and on each replica."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram

from proxy.contract import LoadReport

LOAD_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
"""From a load out of the page cache to PROXY_LORA_LOAD_TIMEOUT_S."""

OUTCOMES = (
    *("live", "known"),
    *("load_failed", "no_slot", "name_in_use", "unservable", "unfinished", "manifest", "replica_lacks", "not_ready"),
)
"""Told as 0 from the start: Prometheus sees no increase in a series that begins with its first failure."""


class LoadMetrics:
    """What is counted for an announcement."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._announced = Counter(
            "lora_sync_announcements",
            "Announcements by how they ended: live, known (it was live already), or why they failed",
            ["outcome"],
            registry=registry,
        )
        self._seconds = Histogram(
            "lora_sync_load_seconds",
            "Seconds from an announcement to its commit or rollback",
            ["outcome"],
            buckets=LOAD_S,
            registry=registry,
        )
        self._phases = Histogram(
            "lora_sync_load_phase_seconds",
            "Seconds that one phase of a load took over all replicas",
            ["phase"],
            buckets=LOAD_S,
            registry=registry,
        )
        self._replicas = Histogram(
            "lora_sync_replica_load_seconds",
            "Seconds that one phase of a load took on one replica, pauses between its tries included",
            ["replica", "phase"],
            buckets=LOAD_S,
            registry=registry,
        )
        self._tries = Counter(
            "lora_sync_load_tries", "Calls that a replica needed for a load", ["replica"], registry=registry
        )

        for outcome in OUTCOMES:
            self._announced.labels(outcome)

    def announced(self, outcome: str) -> None:
        """Count one announcement that has been answered: `live`, `known`, or the reason of its error."""
        self._announced.labels(outcome).inc()

    def loaded(self, report: LoadReport, replicas: Sequence[int]) -> None:
        """Take in one load that has ended. `replicas` are the indices of those that the report lists, in its order."""
        self._seconds.labels(report.status).observe(report.seconds)
        for phase, seconds in report.phases.items():
            self._phases.labels(phase).observe(seconds)
        for index, told in zip(replicas, report.replicas, strict=True):
            self._tries.labels(str(index)).inc(told.attempts)
            for phase, seconds in told.phases.items():
                self._replicas.labels(str(index), phase).observe(seconds)
