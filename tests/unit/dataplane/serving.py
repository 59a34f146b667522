"""An application behind the proxy's server protocol, on a real socket of this event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import cast

import uvicorn
import uvloop
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.server import ServerState

from benchmarks.fuzz.served import body_of, config_of
from proxy.dataplane.budget import Budget
from proxy.dataplane.outbox import Outbox
from proxy.dataplane.server_protocol import ServerProtocol
from tests.support.waiting import until

LIMIT_S = 10.0

BUDGET_BYTES = 100_000_000

Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Served:
    """What runs: its port, and what uvicorn would know of it."""

    def __init__(self, port: int, config: uvicorn.Config, state: ServerState, budget: Budget) -> None:
        self.port = port
        self.config = config
        self.state = state
        self.budget = budget

    @property
    def connections(self) -> list[ServerProtocol]:
        return [cast(ServerProtocol, connection) for connection in self.state.connections]

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        """Connect, and close in the end."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            yield reader, writer
        finally:
            writer.close()

    async def say(self, raw: bytes) -> bytes:
        """Send `raw` and return all that comes back until the server closes."""
        async with self.client() as (reader, writer):
            writer.write(raw)
            return await reader.read()


def serving(app: ASGIApp, scenario: Callable[[Served], Awaitable[None]]) -> None:
    """Run `scenario` against `app`; everything that was served has ended then."""

    async def run() -> None:
        config, state, loop = config_of(app), ServerState(), asyncio.get_running_loop()
        budget = Budget(BUDGET_BYTES)
        made = partial(ServerProtocol, config, state, {}, outbox=Outbox(loop), budget=budget)
        server = await loop.create_server(made, "127.0.0.1", 0)
        async with server, asyncio.timeout(LIMIT_S):
            await scenario(Served(server.sockets[0].getsockname()[1], config, state, budget))
            await until(lambda: not state.tasks and not state.connections)
            assert budget.used == 0

    uvloop.run(run())


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the request's own body."""
    if (body := await body_of(receive)) is not None:
        await send(head(len(body)))
        await send(part(body, more=False))


def head(length: int | None = None, status: int = 200, **headers: bytes) -> Message:
    """Return the start of an answer."""
    lines = [(name.encode(), value) for name, value in headers.items()]
    if length is not None:
        lines.append((b"content-length", b"%d" % length))
    return {"type": "http.response.start", "status": status, "headers": lines}


def part(body: bytes, *, more: bool = True) -> Message:
    """Return more of an answer."""
    return {"type": "http.response.body", "body": body, "more_body": more}


def post(body: bytes, *headers: bytes, version: bytes = b"1.1") -> bytes:
    """Return a request."""
    lines = b"".join(header + b"\r\n" for header in (b"host: p", *headers))
    return b"POST /v1/completions HTTP/%b\r\n%bcontent-length: %d\r\n\r\n%b" % (version, lines, len(body), body)


CLOSE = b"connection: close"
