"""Work in the background, one piece after the other, in the order in which it was handed over."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, TypeVar

Result = TypeVar("Result")

MAX_WAITING = 2
"""Pieces that may wait behind the one at work: each holds an adapter's bytes in memory."""


@dataclass(frozen=True)
class _Piece:
    work: Callable[[], Any]
    future: Future[Any]


class Lane:
    """One thread that works off pieces in order. A failed piece fails its own future and nothing else.

    Each piece has to end by itself, whatever happens. One thread at a time may submit. `at_end` is called once, after
    the last piece of a closed lane.
    """

    def __init__(self, name: str, *, at_end: Callable[[], None]) -> None:
        self._at_end = at_end
        self._queue: queue.SimpleQueue[_Piece | None] = queue.SimpleQueue()
        self._open: deque[Future[Any]] = deque()
        # a daemon, because who closes the lane decides how long it is waited for
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def submit(self, work: Callable[[], Result]) -> Future[Result]:
        """Hand a piece over. Waits while MAX_WAITING others wait."""
        while self.pending() > MAX_WAITING:
            wait([self._open[0]])
        self._start()
        future: Future[Result] = Future()
        self._open.append(future)
        self._queue.put(_Piece(work, future))
        return future

    def pending(self) -> int:
        """Return how many pieces are not finished."""
        while self._open and self._open[0].done():
            self._open.popleft()
        return len(self._open)

    def close(self, timeout_s: float) -> bool:
        """Wait for what was handed over, and end. False if the time was too short: then it goes on by itself."""
        self._start()
        self._queue.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _start(self) -> None:
        if self._thread.ident is None:
            self._thread.start()

    def _run(self) -> None:
        while (piece := self._queue.get()) is not None:
            if piece.future.set_running_or_notify_cancel():
                try:
                    piece.future.set_result(piece.work())
                except BaseException as error:  # noqa: BLE001  whoever asks the future gets it
                    piece.future.set_exception(error)
            del piece  # its bytes are not kept while there is nothing to do
        self._at_end()
