"""No reader of bytes from outside crashes, hangs, or takes memory. `python -m benchmarks.fuzz` tries a million."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import strategies as st

from benchmarks.fuzz.run import Tally, fuzz
from benchmarks.fuzz.targets import TARGETS, Target

INPUTS = 500


@pytest.mark.parametrize("target", TARGETS, ids=[target.name for target in TARGETS])
def test_bad_input_is_answered_or_refused(target: Target) -> None:
    tally = fuzz(target, INPUTS, start=time.time_ns())  # others each time; what crashes is told of
    assert tally.crashes == 0, tally.first
    assert tally.inputs >= INPUTS


def test_a_crash_is_found_and_made_small() -> None:
    def reader(given: bytes) -> None:
        if b"x" in given:
            raise KeyError("no x")

    tally = fuzz(Target("x", st.binary(max_size=50), reader), 5000)
    assert tally.crashes and tally.first.startswith("KeyError: 'no x' <- ") and len(tally.first) < 40


def test_a_hang_is_ended_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.fuzz.run.INPUT_LIMIT_S", 0.1)

    def reader(given: Any) -> None:
        while given == b"":
            pass

    tally = fuzz(Target("hangs", st.just(b""), reader), 1)
    assert tally.crashes and "TimeoutError" in tally.first and tally.inputs >= 1


def test_growth_is_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.fuzz.run.GROWTH_LIMIT_MB", 20)
    kept = []
    tally: Tally = fuzz(Target("grows", st.just(b""), lambda _: kept.append(bytearray(b"x" * 30_000_000))), 1)
    assert tally.crashes == 1 and "grown" in tally.first
