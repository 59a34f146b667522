"""Run a call that may hang, such as a look at a mount, where it holds up nothing, not even the end of the process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
Result = TypeVar("Result")

MAX_HANGING = 256
"""Calls at once. A mount that hangs takes a thread for each look at it, for ever, and a process that can start no more
threads is lost. At a restart 64 replicas are looked after at the same time."""


async def in_daemon_thread(call: Callable[[], Result]) -> Result:
    """Return what `call()` returns, or raise what it raises. Cancelled, it is left to itself.

    It has no limit of its own: whoever awaits it sets one. Raises TimeoutError at once if too many others hang already.
    The loop's own threads are few, shared with those who need them for moments, and waited for at the end.
    """
    return await asyncio.get_running_loop().run_in_executor(_DAEMONS, call)


class _DaemonThreads(Executor):
    """A thread for each call."""

    def __init__(self) -> None:
        self._free = threading.BoundedSemaphore(MAX_HANGING)

    def submit(self, call: Callable[P, Result], /, *args: P.args, **kwargs: P.kwargs) -> Future[Result]:
        """Begin a call. Raises TimeoutError if there are too many."""
        if not self._free.acquire(blocking=False):
            raise TimeoutError(f"{MAX_HANGING} calls hang already")
        future: Future[Result] = Future()
        future.set_running_or_notify_cancel()  # nobody can call it off any more

        def work() -> None:
            try:
                result = call(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001  whoever awaits it gets it
                self._free.release()
                future.set_exception(error)
            else:
                self._free.release()
                future.set_result(result)

        threading.Thread(target=work, daemon=True).start()
        return future


_DAEMONS = _DaemonThreads()
