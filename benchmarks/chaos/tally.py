"""What became of every rollout, in all and by the kinds of faults that it met."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from enum import StrEnum

from benchmarks.chaos.judge import Asked

ALL = "all"

KEPT_STORIES = 100
"""Rollouts that went badly and are told in the JSON."""


class Ending(StrEnum):
    """How one rollout ended."""

    FIRST = "first try"
    """Answered at the first try."""
    RETRIED = "retried"
    """Answered after tries that failed."""
    RETIRED = "retired"
    """404, its trainer had unloaded the policy: such a trainer would drop it as too stale."""
    ERROR = "error"
    """Given up at last, each try with a clear error and no ready replica that held its policy."""
    LOST = "lost"
    """Never answered, or refused while a ready replica held its policy."""
    WRONG = "wrong"
    """Answered by other weights, or cut short."""
    STUCK = "stuck"
    """One try got no answer for very long."""
    LEFT = "left"
    """Its training run ended and took it along."""


BAD = (Ending.LOST, Ending.WRONG, Ending.STUCK)


@dataclass(eq=False)
class Rollout:
    """One rollout on its way."""

    asked: Asked
    kinds: set[str] = field(default_factory=set)
    """Faults in force while it was in flight."""
    tries: list[str] = field(default_factory=list)
    """What went wrong with each try so far."""
    lost: str = ""
    """Why it counts as lost even if it is answered in the end."""


class Tally:
    """Counts rollouts. A rollout counts for each kind of fault that was in force while it was in flight."""

    def __init__(self) -> None:
        self.in_flight: set[Rollout] = set()
        self.in_force: Counter[str] = Counter()
        """Faults of each kind that have begun and not ended."""
        self.endings: defaultdict[str, Counter[Ending]] = defaultdict(Counter)
        self.tries: Counter[str] = Counter()
        """Why tries failed."""
        self.moves: Counter[str] = Counter()
        """Rollouts answered by another replica than the first, by kind of fault: clients saw nothing of it."""
        self.stories: list[str] = []
        self._over: list[tuple[Rollout, Ending]] = []

    @property
    def answered(self) -> int:
        """Rollouts that got their answer."""
        return self.endings[ALL][Ending.FIRST] + self.endings[ALL][Ending.RETRIED]

    @property
    def bad(self) -> int:
        """Rollouts that were lost, answered wrongly, or got stuck."""
        return sum(self.endings[ALL][ending] for ending in BAD)

    def sent(self, asked: Asked) -> Rollout:
        """Note that a rollout begins."""
        rollout = Rollout(asked, kinds={kind for kind, count in self.in_force.items() if count})
        self.in_flight.add(rollout)
        return rollout

    def failed(self, rollout: Rollout, why: str, *, group: str) -> None:
        """Note a try that came to nothing; `group` is what such tries are counted under."""
        rollout.tries.append(why)
        self.tries[group] += 1

    def moved(self, rollout: Rollout, was_moved: bool) -> None:
        """Note whether the proxy had to ask a second replica for an answer."""
        if was_moved:
            self.moves.update((ALL, *rollout.kinds))

    def ended(self, rollout: Rollout, ending: Ending, why: str = "") -> None:
        """Note the end of a rollout; it ends once."""
        self.in_flight.discard(rollout)
        if rollout.lost and ending is not Ending.WRONG:
            ending, why = Ending.LOST, rollout.lost
        self._over.append((rollout, ending))
        for kind in (ALL, *rollout.kinds):
            self.endings[kind][ending] += 1
        if ending in (*BAD, Ending.ERROR):
            self.tell(f"{ending}: {rollout.asked.model}: {why}; tries: {' | '.join(rollout.tries)}; {rollout.kinds}")

    def found_wrong(self, asked: Asked, story: str) -> None:
        """Count an answer as wrong that had been counted as right."""
        rollout, before = next((rollout, ending) for rollout, ending in self._over if rollout.asked is asked)
        for kind in (ALL, *rollout.kinds):
            self.endings[kind][before] -= 1
        self.ended(rollout, Ending.WRONG, story)

    def tell(self, story: str) -> None:
        """Keep a story of something that went badly."""
        if len(self.stories) < KEPT_STORIES:
            self.stories.append(story)

    def begins(self, kind: str) -> None:
        """Note that a fault begins: what is in flight meets it."""
        self.in_force[kind] += 1
        for rollout in self.in_flight:
            rollout.kinds.add(kind)

    def ends(self, kind: str) -> None:
        """Note that a fault is over."""
        self.in_force[kind] -= 1
