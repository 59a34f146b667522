"""Counts of the rollout path: plain numbers, counted on the one event loop and written out when Prometheus asks.

A policy shows only as its staleness, so that a run of a thousand policies makes no more series than one of ten.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from proxy.metrics.families import by_replica
from proxy.metrics.histogram import Histogram

MOST_STALE = 8
"""Versions. Rollouts that are staler count together: TRL's default limit is 4, and no run is useful far above it."""

NO_VERSION = "none"
"""The staleness of a rollout of the base model, or of a policy whose version nobody knows."""

ROLLOUT_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600)
"""From a short answer of a small model to a long chain of thought on a full replica."""

OVERHEAD_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1)
"""A tenth of a millisecond is what the proxy takes when it is idle."""


def staleness_label(versions: int | None) -> str:
    """Return the value of the label `staleness`: one of MOST_STALE + 2."""
    if versions is None:
        return NO_VERSION
    return str(versions) if versions < MOST_STALE else f"{MOST_STALE}+"


class RolloutMetrics(Collector):
    """Everything that is counted for a rollout. Registers itself with `registry`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._tries: Counter[tuple[int, str, str, int | None]] = Counter()
        self._failed: Counter[tuple[int, str]] = Counter()
        self._ended: Counter[str] = Counter()
        self._rollout_s = Histogram(ROLLOUT_S)
        self._first_byte_s = Histogram(ROLLOUT_S)
        self._overhead_s = Histogram(OVERHEAD_S)
        self._stale_at_start = Histogram(range(MOST_STALE))
        self._stale_at_end = Histogram(range(MOST_STALE))
        self._request_bytes = self._answer_bytes = 0
        self.prompt_tokens: Counter[int] = Counter()
        """By replica, of the answers that told how many were cached."""
        self.cached_tokens: Counter[int] = Counter()
        """Those of them that were in the replica's prefix cache."""
        registry.register(self)

    def tried(self, replica: int, route: str, outcome: str, *, staleness: int | None) -> None:
        """Count one try on a replica that has ended. `staleness`: in versions, when it began."""
        if staleness is not None and staleness > MOST_STALE:
            staleness = MOST_STALE
        self._tries[replica, route, outcome, staleness] += 1

    def failed(self, replica: int, cause: str) -> None:
        """Count one try that came to nothing, so that another replica had to be tried."""
        self._failed[replica, cause] += 1

    def ended(self, outcome: str) -> None:
        """Count one rollout by how it ended for its client."""
        self._ended[outcome] += 1

    def answered(
        self, *, took_s: float, first_byte_s: float, overhead_s: float, request_bytes: int, answer_bytes: int
    ) -> None:
        """Take in how long one rollout took that got its answer, and how many bytes its bodies had."""
        self._rollout_s.observe(took_s)
        self._first_byte_s.observe(first_byte_s)
        self._overhead_s.observe(overhead_s)
        self._request_bytes += request_bytes
        self._answer_bytes += answer_bytes

    def stale(self, at_start: int, at_end: int) -> None:
        """Take in how many versions old the policy of an answer was."""
        self._stale_at_start.observe(at_start)
        self._stale_at_end.observe(at_end)

    def reported(self, replica: int, prompt_tokens: int | None, cached_tokens: int | None) -> None:
        """Take in what the `usage` of a replica's answer says; None where it does not."""
        if prompt_tokens is not None and cached_tokens is not None:
            self.prompt_tokens[replica] += prompt_tokens
            self.cached_tokens[replica] += cached_tokens

    def collect(self) -> Iterator[Metric]:
        """Yield every metric, those without a value too."""
        tries = CounterMetricFamily(
            "lora_sync_rollouts",
            "Tries of rollouts on a replica, by route, outcome, and staleness at their start",
            labels=["replica", "route", "outcome", "staleness"],
        )
        for (replica, route, outcome, versions), count in self._tries.items():
            tries.add_metric([str(replica), route, outcome, staleness_label(versions)], count)
        failed = CounterMetricFamily(
            "lora_sync_failed_tries", "Tries that failed before the client saw a byte", labels=["replica", "cause"]
        )
        for (replica, cause), count in self._failed.items():
            failed.add_metric([str(replica), cause], count)
        ended = CounterMetricFamily(
            "lora_sync_answers", "Rollouts by how they ended for their client", labels=["outcome"]
        )
        for outcome, count in self._ended.items():
            ended.add_metric([outcome], count)
        stale = HistogramMetricFamily(
            "lora_sync_staleness_versions",
            "Versions by which the newest policy was ahead of an answer's, when it started and when it ended",
            labels=["at"],
        )
        for moment, histogram in (("start", self._stale_at_start), ("end", self._stale_at_end)):
            stale.add_metric([moment], histogram.buckets(), histogram.total)
        yield from (tries, failed, ended, stale)
        yield from self._times()
        yield from self._amounts()

    def _times(self) -> Iterator[Metric]:
        for name, meaning, histogram in (
            ("rollout", "Seconds from a whole request to the end of its answer", self._rollout_s),
            ("first_byte", "Seconds from a whole request to the first byte of its answer", self._first_byte_s),
            ("overhead", "Seconds of these that neither a replica nor waiting for one took", self._overhead_s),
        ):
            yield HistogramMetricFamily(
                f"lora_sync_{name}_seconds", meaning, buckets=histogram.buckets(), sum_value=histogram.total
            )

    def _amounts(self) -> Iterator[Metric]:
        for name, meaning, amount in (
            ("request_bytes", "Bytes of the bodies of answered rollouts", self._request_bytes),
            ("answer_bytes", "Bytes of the bodies of their answers", self._answer_bytes),
        ):
            yield CounterMetricFamily(f"lora_sync_{name}", meaning, value=amount)
        for name, meaning, tokens in (
            ("prompt", "Prompt tokens of answers that tell how many were cached", self.prompt_tokens),
            ("cached", "Those that were in the replica's prefix cache", self.cached_tokens),
        ):
            yield by_replica(f"lora_sync_reported_{name}_tokens", meaning, tokens)
