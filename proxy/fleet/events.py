"""What has happened in the fleet, newest last: bounded, numbered, and told to whoever listens."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Literal

import msgspec

logger = logging.getLogger(__name__)

KEPT_EVENTS = 2000
"""Enough for an hour of syncs on eight replicas; about 1 MB."""

Level = Literal["info", "warning", "error"]


class Event(msgspec.Struct, frozen=True):
    """One thing that has happened."""

    id: int
    """Counts from 1 since the proxy's start."""
    at: float
    """Seconds since 1970."""
    level: Level
    kind: str
    """A short word that programs can compare: `replica.ready`, `policy.live`, `policy.vanished` ..."""
    message: str
    replica: str | None = None
    """URL."""
    policy: str | None = None
    """The client's name."""
    version: int | None = None
    """Of that policy."""
    seconds: float | None = None
    """How long what has ended with this took: a load, or the state before."""


class EventLog:
    """The last KEPT_EVENTS events. `wall_clock` gives seconds since 1970."""

    def __init__(self, wall_clock: Callable[[], float]) -> None:
        self._wall_clock = wall_clock
        self._kept: deque[Event] = deque(maxlen=KEPT_EVENTS)
        self._next = 1
        self._listeners: list[Callable[[], None]] = []
        self.closed = False
        """Nothing comes any more: who reads along should stop."""

    def __repr__(self) -> str:
        return f"<EventLog next={self._next} kept={len(self._kept)}>"

    def add(
        self,
        kind: str,
        message: str,
        *,
        level: Level = "info",
        replica: str | None = None,
        policy: str | None = None,
        version: int | None = None,
        seconds: float | None = None,
    ) -> None:
        """Note an event and log it as one line."""
        event = Event(self._next, self._wall_clock(), level, kind, message, replica, policy, version, seconds)
        self._next += 1
        self._kept.append(event)
        about = {"event": kind, "policy": policy, "version": version, "replica": replica, "seconds": seconds}
        logger.log(logging.getLevelNamesMapping()[level.upper()], "%s", message, extra={"about": about})
        self._tell()

    def close(self) -> None:
        """Say that the proxy stops."""
        self.closed = True
        self._tell()

    def _tell(self) -> None:
        for listener in tuple(self._listeners):
            listener()

    @property
    def newest(self) -> int:
        """The id of the last event, 0 before the first."""
        return self._next - 1

    def after(self, last_id: int) -> list[Event]:
        """Return the events with an id above `last_id` that are still kept."""
        newer = max(self._next - 1 - last_id, 0)
        return list(islice(reversed(self._kept), newer))[::-1]

    def on_event(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` after every event. Returns a function that ends that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)
