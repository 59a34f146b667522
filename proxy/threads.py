"""Run a call that may hang, such as a look at a mount, where it holds up nothing, not even the end of the process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

Result = TypeVar("Result")

MAX_HANGING = 256
"""Calls at once. A mount that hangs takes a thread for each look at it, for ever, and a process that can start no more
threads is lost. At a restart 64 replicas are looked after at the same time."""

_free = threading.BoundedSemaphore(MAX_HANGING)


async def in_daemon_thread(call: Callable[[], Result]) -> Result:
    """Return what `call()` returns, or raise what it raises. Cancelled, it is left to itself.

    It has no limit of its own: whoever awaits it sets one. Raises TimeoutError at once if too many others hang already.
    The loop's own threads are few, shared with those who need them for moments, and waited for at the end.
    """
    if not _free.acquire(blocking=False):
        raise TimeoutError(f"{MAX_HANGING} calls hang already")
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[Result] = loop.create_future()

    def settle(result: Result | None, error: BaseException | None) -> None:
        if ended.done():
            return
        if error is not None:
            ended.set_exception(error)
        else:
            ended.set_result(result)  # type: ignore[arg-type]  # it is None only if Result is

    def work() -> None:
        result, error = None, None
        try:
            result = call()
        except BaseException as raised:  # noqa: BLE001  whoever awaits it gets it
            error = raised
        _free.release()
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, daemon=True).start()
    return await ended
