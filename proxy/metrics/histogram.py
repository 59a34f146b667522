"""Buckets without a lock, for what is observed with every rollout on the one event loop.

prometheus_client's own take a lock for each bucket and each sum, several microseconds for what a rollout observes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from prometheus_client.utils import floatToGoString


class Histogram:
    """Counts values by upper bounds, which must rise. Not safe across threads."""

    __slots__ = ("_bounds", "_counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """Return each bound, as Prometheus writes it, and how many values were at most that; `+Inf` comes last."""
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        return list(zip(names, accumulate(self._counts), strict=True))

    def __repr__(self) -> str:
        return f"<Histogram count={sum(self._counts)} total={self.total:g}>"
