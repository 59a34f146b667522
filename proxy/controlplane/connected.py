"""Do something for as long as the client that asked for it stays."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import Request

from proxy.errors import ApiError

Result = TypeVar("Result")

CLIENT_GONE = 499
"""nginx's word for a client that left before its answer. Nobody reads it."""


async def while_connected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Return what `work` gives, and stop it when the client goes away."""
    serving = asyncio.current_task()
    assert serving is not None
    gone = asyncio.Event()

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        gone.set()
        serving.cancel()

    watching = asyncio.get_running_loop().create_task(watch())  # owned here: it ends with this call
    try:
        return await work
    except asyncio.CancelledError:
        if not gone.is_set():
            raise
        serving.uncancel()
        raise ApiError(CLIENT_GONE, "The client has gone away.", reason="client_gone") from None
    finally:
        watching.cancel()
