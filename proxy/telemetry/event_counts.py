"""Count the fleet's events by kind: rollbacks, late and torn directories, quarantines, repairs, and all that will be.

Whoever notes an event has it counted; the kinds are words in the code, so there are few.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from proxy.fleet.pool import Fleet


class EventCounts:
    """Listens to the events of `fleet` from now on."""

    def __init__(self, fleet: Fleet, registry: CollectorRegistry) -> None:
        self._fleet = fleet
        self._seen = 0
        self._counts = Counter(
            "lora_sync_events",
            "Events by kind (see docs/metrics.md), and by replica where they are about one",
            ["kind", "level", "replica"],
            registry=registry,
        )
        fleet.events.on_event(self._count)

    def _count(self) -> None:
        for event in self._fleet.events.after(self._seen):
            self._seen = event.id
            index = next((replica.index for replica in self._fleet.replicas if replica.url == event.replica), "")
            self._counts.labels(event.kind, event.level, str(index)).inc()
