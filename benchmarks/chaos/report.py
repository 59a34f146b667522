"""What a run has shown: a table for people, the same as JSON, and whether every promise was kept."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.chaos.monkey import Struck
from benchmarks.chaos.scale import Scale
from benchmarks.chaos.tally import ALL, BAD, Ending, Tally
from benchmarks.chaos.trainers import Syncs


@dataclass(frozen=True)
class Report:
    """Everything that was counted."""

    scale: Scale
    settings: dict[str, str]
    """Of the proxy."""
    seconds: float
    whole: bool
    """Whether it lasted as long as it should have; False after Ctrl-C."""
    tally: Tally
    by_kind: dict[str, Struck]
    left_out: list[str]
    """Kinds of faults that did not belong to it."""
    withheld: int
    """Policies that replicas saw late or torn, counted once for each replica."""
    syncs: Syncs
    seed: int
    left: dict[str, int]
    """In flight at the end: by the proxy's count, and in every engine."""
    log: Path
    """The proxy's."""
    tracebacks: int
    """In that log."""

    def table(self) -> str:
        """Return one line for each kind of fault and one for all."""
        rows = self._rows()
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        return "\n".join(_line(row, widths) for row in rows)

    def markdown(self) -> str:
        """Return the same for a page."""
        head, *rows = self._rows()
        ruler = ["---", *["---:"] * (len(head) - 1)]
        return "\n".join(f"| {' | '.join(row)} |" for row in (head, ruler, *rows))

    def _rows(self) -> list[list[str]]:
        rows = [self._row(kind, struck) for kind, struck in sorted(self.by_kind.items())]
        total = Struck(
            faults=sum(struck.faults for struck in self.by_kind.values()),
            hit=sum(struck.hit for struck in self.by_kind.values()),
            recovered_s=[seconds for struck in self.by_kind.values() for seconds in struck.recovered_s],
        )
        return [[*_HEADS], *rows, self._row(ALL, total)]

    def sentences(self) -> list[str]:
        """Return what the table does not say."""
        syncs = self.syncs.seconds
        sync = f"p50 {statistics.median(syncs):.2f} s, max {max(syncs):.2f} s" if syncs else "none"
        return [
            f"{self.seconds:.0f} s, seed {self.seed}, {self.scale.replicas} replicas",
            f"{len(syncs)} policies went live ({sync}); seen late or torn, by one replica each: {self.withheld}",
            f"runs ended, announcements failed: {dict(self.syncs.ends) or 'none'}",
            f"tries that failed: {dict(self.tally.tries.most_common()) or 'none'}",
            f"in flight at the end: {self.left}; tracebacks in the proxy's log: {self.tracebacks}",
            f"kinds of faults left out: {', '.join(self.left_out) or 'none'}",
        ]

    def failures(self) -> list[str]:
        """Return every promise that was not kept."""
        counts = self.tally.endings[ALL]
        failures = [f"{counts[ending]} rollouts were {ending}" for ending in BAD if counts[ending]]
        failures += [f"{self.syncs.stuck} control calls got no answer"] if self.syncs.stuck else []
        failures += [f"{count} in flight at the end: {where}" for where, count in self.left.items() if count]
        failures += [f"{self.tracebacks} tracebacks in the proxy's log"] if self.tracebacks else []
        for kind, struck in self.by_kind.items():
            if struck.never:
                failures.append(f"{kind}: something did not recover within {self.scale.recover_s:.0f} s")
            if self.whole and struck.hit < self.scale.least_hits:
                failures.append(f"{kind}: it hit {struck.hit} rollouts, which proves nothing")
        return failures

    def as_json(self) -> dict[str, Any]:
        """Return everything."""
        return {
            "scale": asdict(self.scale),
            "settings": self.settings,
            "seed": self.seed,
            "seconds": round(self.seconds, 1),
            "whole": self.whole,
            "rollouts": {kind: dict(counts) for kind, counts in self.tally.endings.items()},
            "moved": dict(self.tally.moves),
            "withheld": self.withheld,
            "left_out": self.left_out,
            "faults": {kind: asdict(struck) for kind, struck in self.by_kind.items()},
            "tries": dict(self.tally.tries),
            "sync_s": [round(seconds, 3) for seconds in self.syncs.seconds],
            "ends": dict(self.syncs.ends),
            "in_flight_at_the_end": self.left,
            "tracebacks": self.tracebacks,
            "failures": self.failures(),
            "stories": self.tally.stories,
        }

    def _row(self, kind: str, struck: Struck) -> list[str]:
        counts, recovered = self.tally.endings[kind], struck.recovered_s
        times = [f"{statistics.median(recovered):.1f}", f"{max(recovered):.1f}"] if recovered else ["", ""]
        answered = counts[Ending.FIRST] + counts[Ending.RETRIED]
        numbers = [struck.faults, struck.hit, counts.total(), answered, self.tally.moves[kind]]
        numbers += [counts[ending] for ending in _ENDINGS]
        return [kind, *map(str, numbers), *(["never"] * 2 if struck.never else times)]


_ENDINGS = tuple(ending for ending in Ending if ending is not Ending.FIRST)
_HEADS = ("fault", "faults", "hit", "sent", "answered", "moved", *_ENDINGS, "recovery p50", "max s")


def _line(row: list[str], widths: list[int]) -> str:
    first, *others = (
        cell.ljust(width) if not n else cell.rjust(width)
        for n, (cell, width) in enumerate(zip(row, widths, strict=True))
    )
    return "  ".join([first, *others]).rstrip()
