"""Answer the calls that the server cancels because the proxy stops and the time to drain is over."""

from __future__ import annotations

import asyncio

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from proxy.errors import stopping


class AnsweredWhenStopped:
    """Pass on to `app`. What is cancelled before its answer has begun is a 503; what has begun breaks off."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def sent(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        serving = asyncio.current_task()
        assert serving is not None
        try:
            await self._app(scope, receive, sent)
        except asyncio.CancelledError:
            serving.uncancel()
            if not started:
                error = stopping()
                await JSONResponse(error.body(), error.status, error.headers())(scope, receive, send)
