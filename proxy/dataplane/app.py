"""The ASGI front: takes the routed paths itself and leaves every other request to the application behind it."""

from __future__ import annotations

import asyncio
import logging

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from proxy.dataplane.relay import Relay, Rollout, send_error
from proxy.errors import ApiError
from proxy.routing.request_key import RequestKey, read_request

logger = logging.getLogger(__name__)

GENERATION_PATHS = frozenset(["/v1/completions", "/v1/chat/completions", "/v1/messages", "/inference/v1/generate"])
"""Routed to one replica that holds the policy."""

ANY_REPLICA_PATHS = frozenset(["/tokenize", "/detokenize", "/version"])
"""Answered alike by every replica."""


class ClientGone(Exception):
    """The client closed its connection before it had sent its whole request."""


class Dataplane:
    """Plain ASGI: `app` gets what is not a rollout."""

    def __init__(self, relay: Relay, app: ASGIApp, *, max_body: int) -> None:
        self._relay = relay
        self._app = app
        self._max_body = max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path")
        generation = path in GENERATION_PATHS
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            if not (generation or path in ANY_REPLICA_PATHS):
                body = await self._read_body(scope, receive)
                await self._app(scope, _replayed(body, receive), send)
                return
            rollout = await self._read(scope, receive, generation=generation)
            await self._serve(rollout, receive, send)
        except ApiError as error:
            await send_error(send, error)
        except ClientGone:
            pass

    async def _read(self, scope: Scope, receive: Receive, *, generation: bool) -> Rollout:
        if generation and scope["method"] != "POST":
            raise ApiError(405, "Method Not Allowed", reason="method")
        body = await self._read_body(scope, receive)
        query = scope["query_string"].decode("latin-1")
        return Rollout(
            method=scope["method"],
            target=scope["raw_path"].decode("latin-1") + (f"?{query}" if query else ""),
            headers=scope["headers"],
            body=body,
            key=read_request(body) if generation else RequestKey(model="", pieces=(), stream=False),
            needs_policy=generation,
        )

    async def _read_body(self, scope: Scope, receive: Receive) -> bytes:
        declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if int(declared) > self._max_body:
            raise self._too_large()
        chunks: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            if size > self._max_body:
                raise self._too_large()
            if not message.get("more_body"):
                return b"".join(chunks)

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"The request body is larger than {self._max_body} bytes; raise PROXY_MAX_BODY if that is intended.",
            reason="body_too_large",
        )

    async def _serve(self, rollout: Rollout, receive: Receive, send: Send) -> None:
        """Serve, and stop at once when the client goes away, so that the replica stops generating for nobody."""
        refused: ApiError | None = None

        async def serve() -> None:
            nonlocal refused
            try:
                await self._relay.serve(rollout, send)
            except ApiError as error:
                refused = error
            finally:
                watcher.cancel()

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            serving.cancel()

        async with asyncio.TaskGroup() as group:
            watcher = group.create_task(watch())
            serving = group.create_task(serve())
        if refused is not None:
            raise refused


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives the whole `body` first, and then what the client does next."""
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Message:
        return waiting.pop() if waiting else await receive()

    return next_message
