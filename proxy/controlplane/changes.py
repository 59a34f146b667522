"""Wait until something about the fleet is true."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from proxy.fleet.pool import Fleet

_LOOK_AGAIN_S = 0.5
"""What becomes true by the clock alone is noticed so late at most."""


async def woken(event: asyncio.Event, *, within_s: float) -> bool:
    """Wait for `event`, at most so many seconds; return whether it is set."""
    try:
        async with asyncio.timeout(within_s):
            await event.wait()
    except TimeoutError:
        pass
    return event.is_set()


class Changes:
    """Wakes those who wait whenever the fleet changes."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._waiting: dict[asyncio.Event, None] = {}  # in the order in which they came: first come, first served
        fleet.on_change(self._wake)

    def _wake(self) -> None:
        for event in self._waiting:
            event.set()

    async def wait_until(self, true: Callable[[], bool], *, deadline: float) -> bool:
        """Wait until `true()`, at most to `deadline` on the fleet's clock; return whether it is."""
        event = asyncio.Event()
        self._waiting[event] = None
        try:
            while not true():
                left = deadline - self._fleet.clock()
                if left <= 0:
                    return False
                event.clear()
                await woken(event, within_s=min(left, _LOOK_AGAIN_S))
            return True
        finally:
            del self._waiting[event]
