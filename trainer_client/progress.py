"""How far a publication is, for who wants to see it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """Where a publication is."""

    doing: str
    """What goes on now, for people."""
    done: int = 0
    """Bytes that the store has taken."""
    total: int | None = None
    """Bytes in all; None while there is nothing to count."""
    waits_for: str = ""
    """What it has been waiting for, once that takes long: a sentence, also for who sees no bar."""


Tell = Callable[[Progress], None]
"""Is told of each step. May be called in any thread; it must return soon, and raise nothing."""


def tell_nobody(_: Progress) -> None:
    """Keep it to oneself."""


class Sending:
    """Counts the bytes that a store has taken."""

    def __init__(self, tell: Tell, *, doing: str, total: int) -> None:
        self._tell, self._doing, self._done, self._total = tell, doing, 0, total
        tell(Progress(doing, 0, total))

    def __call__(self, count: int) -> None:
        """Take note that so many more have been taken."""
        self._done += count
        self._tell(Progress(self._doing, self._done, self._total))
