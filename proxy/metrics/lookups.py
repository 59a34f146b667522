"""Counts of discovery: how often the source of replicas was asked, and how often it could not tell."""

from __future__ import annotations

from typing import Literal

from prometheus_client import CollectorRegistry, Counter


class LookupMetrics:
    """What is counted for a lookup."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._lookups = Counter(
            "lora_sync_lookups", "Lookups of PROXY_DISCOVER by how they ended", ["outcome"], registry=registry
        )
        for outcome in ("listed", "failed"):
            self._lookups.labels(outcome)

    def looked(self, outcome: Literal["listed", "failed"]) -> None:
        """Count one lookup."""
        self._lookups.labels(outcome).inc()
