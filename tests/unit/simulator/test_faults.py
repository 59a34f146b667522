"""Faults count per adapter name, from the first load on."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from proxy.simulator.faults import FaultBox, Faults


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def statuses(box: FaultBox, name: str, count: int) -> list[int | None]:
    verdicts = [box.judge_load(name, f"/{name}") for _ in range(count)]
    return [verdict.status if verdict else None for verdict in verdicts]


def test_late_by_attempts() -> None:
    box = FaultBox()
    box.set({"late": {"attempts": 2}})
    assert statuses(box, "a", 3) == [404, 404, None]
    assert statuses(box, "b", 3) == [404, 404, None]


def test_late_by_seconds() -> None:
    clock = Clock()
    box = FaultBox(clock)
    box.set({"late": {"seconds": 5}})
    clock.now = 100
    assert statuses(box, "a", 2) == [404, 404]
    clock.now = 104
    assert statuses(box, "a", 1) == [404]
    clock.now = 105
    assert statuses(box, "a", 1) == [None]
    assert statuses(box, "b", 1) == [404]


def test_late_then_torn_then_fine() -> None:
    box = FaultBox()
    box.set({"late": {"attempts": 1}, "torn": {"attempts": 2, "kind": "truncated"}})
    assert statuses(box, "a", 3) == [404, 500, None]


def test_only_one_adapter() -> None:
    box = FaultBox()
    box.set({"torn": {"attempts": 1, "name": "a"}})
    assert statuses(box, "b", 1) == [None]
    assert statuses(box, "a", 1) == [500]


def test_an_error_for_some_attempts_or_for_ever() -> None:
    box = FaultBox()
    box.set({"load_error": {"status": 503, "attempts": 1}})
    assert statuses(box, "a", 2) == [503, None]
    box.set({"load_error": {"status": 507}})
    assert statuses(box, "a", 3) == [507, 507, 507]


def test_a_change_leaves_the_other_faults_alone_and_null_ends_one() -> None:
    box = FaultBox()
    box.set({"hang": True, "late": {"attempts": 1}})
    box.set({"slow": 2})
    assert (box.now.hang, box.now.slow) == (True, 2)
    box.set({"late": None})
    assert box.now.late is None
    assert repr(box) == "FaultBox({'slow': 2.0, 'hang': True})"
    box.clear()
    assert box.now == Faults()


def test_a_misspelt_fault_is_refused() -> None:
    with pytest.raises(ValidationError):
        FaultBox().set({"lat": {"attempts": 1}})
