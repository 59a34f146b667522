"""How fast each replica works, as its answers tell: one that is much slower than the fastest weighs more for its load.

A pace is seconds per token of load, beside no more rollouts than are decoded as fast as one. Answers differ in what
they show of it (queues, cache hits, lengths), so that small differences mean nothing; they even out by themselves,
since a replica that is a little slower is a little fuller.
"""

from __future__ import annotations

from dataclasses import dataclass

from proxy.routing.load import DECODE_WEIGHT, FREE_BATCH

SLOW = 4.0
"""Times the pace of the fastest from which on a replica is slow. Alike ones were up to 1.5 apart; and where
they share processors with each other and a trainer up to 5.3 for a while, since their answers come from other moments:
then a look mends it. What is a little slower gets less by itself, as it is fuller."""

KNOWN_AFTER = 8
"""Answers after which a pace means something."""

_REMEMBERED = 32
"""Answers that a pace goes back to."""

FIRST_LOOK = 256
"""Answers of the fleet after which a slow replica without work gets one rollout, to see whether it still is slow. Twice
as many before each further look, since that rollout and its group pay for it."""

_LAST_LOOK = 4096


@dataclass
class _Pace:
    value: float = 0.0
    answers: int = 0
    look_at: int = 0
    """How many answers the fleet has given when it is tried again."""
    pause: int = FIRST_LOOK

    def add(self, value: float) -> None:
        self.answers = min(self.answers + 1, _REMEMBERED)
        self.value += (value - self.value) / self.answers


class Paces:
    """What is known of each replica's pace, by index."""

    def __init__(self) -> None:
        self.slow: dict[int, float] = {}
        """The slow ones -> how many times slower than the fastest."""
        self.known: frozenset[int] = frozenset()
        """Those whose pace means something, from when on alike ones would all be known."""
        self._paces: dict[int, _Pace] = {}
        self._answers = 0

    def __repr__(self) -> str:
        return f"<Paces slow={ ({index: round(times, 1) for index, times in self.slow.items()}) }>"

    def learn(self, replica: int, *, prefill: int, tokens: float, seconds: float, beside: int) -> None:
        """Take in one answer: prompt tokens computed, tokens generated, and the rollouts there at its end."""
        self._answers += 1
        pace = self._paces.setdefault(replica, _Pace())
        value = seconds / ((prefill + tokens * DECODE_WEIGHT) * max(1.0, beside / FREE_BATCH))
        if replica in self.slow and self._answers >= pace.look_at:
            pace.pause = min(2 * pace.pause, _LAST_LOOK)
            pace.value, pace.answers = value, KNOWN_AFTER  # what was is long ago: this is what the look was for
        else:
            pace.add(value)
        pace.look_at = self._answers + pace.pause
        if self._answers % len(self._paces) == 0:  # not every time, so that large fleets pay no more for an answer
            self._compare()

    def slowness(self, replica: int, *, inflight: int) -> float:
        """Return how many times slower than the fastest a replica is; 1 for all that are about as fast, or unknown.

        One that is slow and has had nothing to do for long counts as fast for one rollout.
        """
        times = self.slow.get(replica, 1.0)
        return times if inflight or times == 1 or self._answers < self._paces[replica].look_at else 1.0

    def forget(self, replica: int) -> None:
        """Forget the pace of a replica that has restarted."""
        self._paces.pop(replica, None)
        self.slow.pop(replica, None)
        self.known -= {replica}

    def _compare(self) -> None:
        known = {index: pace for index, pace in self._paces.items() if pace.answers >= KNOWN_AFTER}
        if any(pace.answers >= 2 * KNOWN_AFTER for pace in known.values()):
            self.known = frozenset(known)
        fastest = min((pace.value for pace in known.values()), default=0.0)
        self.slow = {index: pace.value / fastest for index, pace in known.items() if pace.value >= SLOW * fastest > 0}
        for index, pace in known.items():
            if index not in self.slow:
                pace.pause = FIRST_LOOK
