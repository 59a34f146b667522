"""Answer the calls that the server cancels because the proxy stops and the time to drain is over."""

from __future__ import annotations

import asyncio

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from proxy.errors import ApiError


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
                stopping = ApiError(503, "The proxy is stopping.", reason="stopping", retry_after_s=1)
                await JSONResponse(stopping.body(), stopping.status, stopping.headers())(scope, receive, send)
