"""Look at files without waiting for a mount that hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import ParamSpec, TypeVar

from proxy.threads import in_daemon_thread

P = ParamSpec("P")
Seen = TypeVar("Seen")


async def look(limit_s: float, at: Callable[P, Seen], *args: P.args, **kwargs: P.kwargs) -> Seen:
    """Call `at` in a thread and return what it returns. Raises TimeoutError after `limit_s`; the thread hangs on."""
    async with asyncio.timeout(limit_s):
        return await in_daemon_thread(partial(at, *args, **kwargs))
