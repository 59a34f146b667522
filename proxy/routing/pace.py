"""How fast each replica works, as its answers tell: one that is much slower than the fastest weighs more for its load.

A replica is slow when even its best answer of late took much longer than those of the fastest usually do. Answers
differ by what goes on beside them (queues, cold caches, a trainer on the same processors): two real replicas on two
cores were up to five times apart for a while. But a healthy one shows now and then what it can; a slow one never does.

A pace is seconds per token of prompt that could have been computed meanwhile, had nobody to wait: a step of decoding
takes as long as some of them for each rollout in the batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from proxy.routing.load import DECODE_WEIGHT, FREE_BATCH

SLOW = 3.0
"""Times the usual pace of the fastest from which on the best of a replica is slow. Less would be within what a pace may
be wrong by, as a batch above FREE_BATCH is taken to be slower in proportion to its size. One that is not as slow gets
less by itself, since it is fuller."""

KNOWN_AFTER = 8
"""Answers after which a pace means something."""

_REMEMBERED = 32
"""Answers that a pace goes back to."""

FIRST_LOOK = 512
"""Answers of the fleet after which a slow replica without work gets one rollout, to see whether it still is slow. Twice
as many before each further look, since that rollout and its group pay for it: one that has recovered goes unused for
about as long as it was slow, and no longer."""


@dataclass
class _Pace:
    usual: float = 0.0
    best: float = math.inf
    """Of late: with each answer it is a little less good, until another is as good."""
    answers: int = 0
    look_at: int = 0
    """How many answers the fleet has given when it is tried again."""
    pause: int = FIRST_LOOK

    def add(self, value: float) -> None:
        self.answers = min(self.answers + 1, _REMEMBERED)
        self.usual += (value - self.usual) / self.answers
        self.best = min(value, self.best * (1 + 1 / _REMEMBERED))


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
        pace = self._paces.get(replica)
        if pace is None:
            pace = self._paces[replica] = _Pace()
        if replica in self.slow and self._answers >= pace.look_at:
            pace.pause *= 2
            pace.best = math.inf  # what was is long ago: this is what the look was for
        pace.add(seconds / (prefill + tokens * DECODE_WEIGHT * max(beside, FREE_BATCH)))
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
        fastest = min((pace.usual for pace in known.values()), default=0.0)
        self.slow = {index: pace.usual / fastest for index, pace in known.items() if pace.best >= SLOW * fastest > 0}
        for index, pace in known.items():
            if index not in self.slow:
                pace.pause = FIRST_LOOK
