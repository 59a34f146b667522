"""Waiting for a state within an event loop, with a limit (see `replicas.wait_until` for threads)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LIMIT_S = 10.0

_POLL_S = 0.002

_REST_S = 0.2


async def until(condition: Callable[[], bool]) -> None:
    """Return as soon as `condition()` is true. Raises TimeoutError when it is not by the limit."""
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(_POLL_S)


async def at_rest(value: Callable[[], int]) -> int:
    """Return `value()` once it no longer changes. Raises TimeoutError when it does to the limit."""
    async with asyncio.timeout(LIMIT_S):
        before, now = None, value()
        while before != now:
            await asyncio.sleep(_REST_S)
            before, now = now, value()
    return now
