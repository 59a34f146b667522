"""The server's protocol: one write an answer, word of a client that has left, reading while somebody wants it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from benchmarks.fuzz.served import Peer, connection_to
from proxy.dataplane.client_request import CLIENT
from proxy.dataplane.server_protocol import ServerProtocol

LONG = b"x" * 100_000
"""More than is taken in before reading pauses."""


class App:
    """Reads a request, and answers when it is let go on."""

    def __init__(self) -> None:
        self.left = 0
        self.serving = asyncio.Event()
        self.go_on = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["more_body"]:
            pass
        scope[CLIENT].on_leaving = self.leave
        self.serving.set()
        await self.go_on.wait()
        scope[CLIENT].on_leaving = None
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    def leave(self) -> None:
        self.left += 1
        self.go_on.set()


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[ServerProtocol, Peer, App]]:
    """Yield a connection, and let what is served on it come to its end."""
    app, transport = App(), Peer()
    protocol = connection_to(app, ServerState())
    protocol.connection_made(transport)
    async with asyncio.timeout(5):
        yield protocol, transport, app
        await served(protocol, app)


async def served(protocol: ServerProtocol, app: App) -> None:
    """Let `app` answer, and wait until the answers are out."""
    app.go_on.set()
    while tasks := protocol.server.tasks:
        await asyncio.gather(*tasks)
    await asyncio.sleep(0)


def request(body: bytes = b"{}") -> tuple[bytes, bytes]:
    return b"POST / HTTP/1.1\r\nHost: p\r\nContent-Length: %d\r\n\r\n" % len(body), body


def test_who_serves_is_told_that_the_client_has_left() -> None:
    async def scenario() -> None:
        async with connected() as (protocol, _, app):
            protocol.data_received(b"".join(request()))
            await app.serving.wait()
            protocol.connection_lost(None)
            assert app.left == 1

    asyncio.run(scenario())


def test_who_has_served_is_not_told() -> None:
    async def scenario() -> None:
        async with connected() as (protocol, transport, app):
            protocol.data_received(b"".join(request()))
            await served(protocol, app)
            assert len(transport.writes) == 1, "head and body go out together"
            assert transport.writes[0].endswith(b"\r\n\r\nok")
            protocol.connection_lost(None)
            assert app.left == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("body_at_once", [True, False])
def test_a_connection_is_read_from_while_its_request_is_served(body_at_once: bool) -> None:
    async def scenario() -> None:
        head, body = request(LONG)
        async with connected() as (protocol, transport, app):
            protocol.data_received(head + body if body_at_once else head)
            await asyncio.sleep(0)
            if not body_at_once:
                protocol.data_received(body)
            await app.serving.wait()
            assert transport.reading

    asyncio.run(scenario())


def test_a_connection_is_not_read_from_while_its_next_request_waits() -> None:
    async def scenario() -> None:
        async with connected() as (protocol, transport, app):
            protocol.data_received(b"".join(request()))
            await app.serving.wait()
            protocol.data_received(b"".join(request()))
            assert not transport.reading

    asyncio.run(scenario())
