"""A time limit for work that has none of its own, such as writing to a mount that hangs."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

from trainer_client.errors import StoreError

Result = TypeVar("Result")


def within(limit_s: float, work: Callable[[float], Result], *, what: str) -> Result:
    """Return what `work` returns, or raise StoreError once `limit_s` seconds have passed.

    `work` gets the deadline in `time.monotonic` seconds. A system call that hangs cannot be broken off, so that `work`
    may still be at it after the error: it must look at the deadline before it does anything that counts.
    """
    done: Future[Result] = Future()
    deadline = time.monotonic() + limit_s
    # a daemon, because a mount that hangs must not keep the process from ending
    Thread(target=_settle, args=(done, work, deadline), name="lora-sync-store", daemon=True).start()
    try:
        return done.result(limit_s)
    except TimeoutError as error:
        if done.done():
            raise  # the work's own
        raise StoreError(f"{what} did not end within {limit_s:g} s; see whether the store still answers") from error


def _settle(done: Future[Result], work: Callable[[float], Result], deadline: float) -> None:
    try:
        done.set_result(work(deadline))
    except BaseException as error:  # noqa: BLE001  whoever waits for it gets it
        done.set_exception(error)
