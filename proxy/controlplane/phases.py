"""How long each part of an announcement took."""

from __future__ import annotations

from collections.abc import Callable


class Phases:
    """Seconds by phase, each from the end of the one before it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.seconds: dict[str, float] = {}
        self._clock = clock
        self._since = clock()

    def end(self, phase: str) -> None:
        """End a phase."""
        now = self._clock()
        self.seconds[phase], self._since = now - self._since, now
