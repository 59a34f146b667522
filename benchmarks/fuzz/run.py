"""Give inputs to a target, and hold each of them to a limit of time and the process to one of memory."""

from __future__ import annotations

import resource
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from random import Random
from types import FrameType
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from benchmarks.fuzz.inputs import vary
from benchmarks.fuzz.targets import Target

INPUT_LIMIT_S = 1.0
"""Of processor time, for one input of a few KB. The slowest of a million took a tenth of that."""

GROWTH_LIMIT_MB = 256
"""By how much the process may grow over all inputs of a target."""

VARIANTS = 9
"""Beside what Hypothesis makes, so many damaged forms of it: to make one takes a tenth of the time."""

_AT_A_TIME = 5_000
"""Hypothesis remembers what it made for one test so as not to repeat it: many tests keep that small."""


@dataclass
class Tally:
    """What became of the inputs of one target."""

    target: str
    inputs: int = 0
    seconds: float = 0.0
    crashes: int = 0
    slowest_s: float = 0.0
    peak_mb: float = 0.0
    """Of the whole process, Hypothesis and its memory among it."""
    first: str = ""
    """The smallest input found that crashed, and why."""

    def crash(self, error: Exception, given: Any) -> None:
        """Count a crash, and keep the first."""
        self.crashes += 1
        self.first = self.first or f"{type(error).__name__}: {error} <- {given!r}"[:2000]

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return asdict(self)


def fuzz(target: Target, inputs: int, *, start: int = 0, told: Callable[[Tally], None] = lambda _: None) -> Tally:
    """Give `inputs` inputs to `target`. A crash is kept in the tally, and ends its round of inputs.

    `start`: the seed of the first round, which makes the run repeatable. `told` hears of each round.
    """
    tally, began = Tally(target.name), time.monotonic()
    before_mb = _peak_mb()
    round_number = start
    while tally.inputs < inputs:
        _round(target, min(inputs - tally.inputs, _AT_A_TIME), round_number, tally)
        round_number += 1
        tally.seconds, tally.peak_mb = time.monotonic() - began, _peak_mb()
        if tally.peak_mb - before_mb > GROWTH_LIMIT_MB:
            tally.crashes += 1
            tally.first = tally.first or f"the process has grown by {tally.peak_mb - before_mb:.0f} MB"
            break
        told(tally)
    return tally


def _round(target: Target, inputs: int, number: int, tally: Tally) -> None:
    last: Any = None

    @seed(number)
    @settings(
        max_examples=-(-inputs // (1 + VARIANTS)),
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    @given(target.inputs, st.integers(0, 2**32))
    def one(made: Any, chance: int) -> None:
        nonlocal last
        random = Random(chance)
        for last in (made, *(vary(made, random) for _ in range(VARIANTS))):  # what is left is told of
            tally.inputs += 1
            began = time.process_time()
            try:
                with _limited():
                    target.check(last)
            except TimeoutError as error:  # kept as it is: to look for a smaller one would take minutes
                tally.crash(error, last)
                return
            tally.slowest_s = max(tally.slowest_s, time.process_time() - began)

    try:
        one()
    except Exception as error:  # noqa: BLE001  # whatever comes out is what is looked for
        tally.crash(error, last)


class _limited:
    """Raises TimeoutError in what takes more processor time than an input may."""

    def __enter__(self) -> None:
        self._before = signal.signal(signal.SIGPROF, _too_long)
        signal.setitimer(signal.ITIMER_PROF, INPUT_LIMIT_S)

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, self._before)


def _too_long(_: int, __: FrameType | None) -> None:
    raise TimeoutError(f"one input took more than {INPUT_LIMIT_S:g} s")


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
