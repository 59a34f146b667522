"""Shapes that several metrics have."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client.core import CounterMetricFamily


def by_replica(name: str, meaning: str, counts: Mapping[int, int]) -> CounterMetricFamily:
    """Return a counter with the label `replica`, from counts by the index of a replica."""
    family = CounterMetricFamily(name, meaning, labels=["replica"])
    for replica, count in counts.items():
        family.add_metric([str(replica)], count)
    return family
