"""Work in the background: in order, whatever fails, and ended when it is closed."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from trainer_client.lane import Lane


def test_pieces_run_in_order_and_a_failed_one_fails_alone() -> None:
    done: list[int] = []
    lane = Lane("test", at_end=lambda: done.append(0))
    first = lane.submit(lambda: done.append(1))
    failed = lane.submit(lambda: 1 // 0)
    last = lane.submit(lambda: done.append(2))
    assert lane.close(timeout_s=5)
    assert first.result() is last.result() is None
    assert isinstance(failed.exception(), ZeroDivisionError)
    assert done == [1, 2, 0]


def test_a_piece_may_be_cancelled_before_its_turn() -> None:
    gate, done = threading.Event(), []
    lane = Lane("test", at_end=lambda: None)
    lane.submit(gate.wait)
    cancelled = lane.submit(lambda: done.append("cancelled"))
    last = lane.submit(lambda: done.append("last"))
    assert cancelled.cancel()
    gate.set()
    last.result(5)
    assert done == ["last"]
    assert lane.close(timeout_s=5)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_not_even_an_exit_ends_the_lane(error: Any) -> None:
    def leave() -> None:
        raise error

    lane = Lane("test", at_end=lambda: None)
    assert isinstance(lane.submit(leave).exception(5), error)
    assert lane.submit(lambda: 1).result(5) == 1
    assert lane.close(timeout_s=5)


def test_closing_has_a_limit_and_the_rest_goes_on() -> None:
    gate, ended = threading.Event(), threading.Event()
    lane = Lane("test", at_end=ended.set)
    lane.submit(gate.wait)
    assert lane.pending() == 1
    assert not lane.close(timeout_s=0.05)
    gate.set()
    assert ended.wait(5)
    assert lane.pending() == 0
