"""An event loop in which time passes only when a test says so, and then at once."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import TypeVar, TypeVarTuple, Unpack

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")

TURNS = 50_000
"""Turns of the loop in one `advance` after which something is taken to spin."""


class VirtualTime(asyncio.SelectorEventLoop):
    """Runs whatever is ready, and moves its clock from timer to timer. Works without sockets and threads."""

    def __init__(self) -> None:
        self._now = self._until = 0.0
        self._turns = 0
        super().__init__(_Impatient(self._idle))

    def time(self) -> float:
        """Return the seconds that tests have let pass."""
        return self._now

    def advance(self, seconds: float = 0.0) -> None:
        """Let so many seconds pass, and run all that becomes ready. Raises AssertionError if it never comes to rest."""
        self._until, self._turns = self._now + seconds, 0
        self.run_forever()
        self._now = self._until

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[Arguments]], Result], *args: *Arguments
    ) -> asyncio.Future[Result]:
        """Call `func` on the loop's own thread, a turn later."""
        result: asyncio.Future[Result] = self.create_future()

        def work() -> None:
            if not result.cancelled():
                result.set_result(func(*args))

        self.call_soon(work)
        return result

    def _idle(self, timeout: float | None) -> None:
        """Do what stands here for waiting: go to the next timer, or stop when that is too far away."""
        self._turns += 1
        assert self._turns < TURNS, "the tasks never come to rest: one of them spins"
        if timeout is None or self._now + timeout > self._until + 1e-9:
            self.stop()
        else:
            self._now += timeout


class _Impatient(selectors.SelectSelector):
    def __init__(self, idle: Callable[[float | None], None]) -> None:
        super().__init__()
        self._on_idle = idle

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._on_idle(timeout)
        return []


@contextmanager
def virtual_time() -> Iterator[VirtualTime]:
    """Give a loop for one test, and end in order whatever is left in it."""
    loop = VirtualTime()
    yield loop
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.advance()
    loop.close()
