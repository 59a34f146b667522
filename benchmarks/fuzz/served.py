"""The proxy's server without a socket: what a protocol needs around it, to be fed bytes and looked at."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp, Receive
from uvicorn.server import ServerState

from proxy.dataplane.budget import Budget
from proxy.dataplane.outbox import Outbox
from proxy.dataplane.server_protocol import ServerProtocol


class Peer(asyncio.Transport):
    """A client's side of a connection: what it was told until it was closed, and whether it is read from."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.reading = True
        self.closed = False

    @property
    def said(self) -> bytes:
        """All that was written."""
        return b"".join(self.writes)

    def write(self, data: Any) -> None:
        if not self.closed:
            self.writes.append(data)

    def writelines(self, parts: Any) -> None:
        self.write(b"".join(parts))

    def close(self) -> None:
        self.closed = True

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.closed = True  # as far as the client can see

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


def config_of(app: ASGIApp) -> uvicorn.Config:
    """Return what uvicorn gives its protocols."""
    config = uvicorn.Config(cast(Any, app), interface="asgi3", proxy_headers=False, lifespan="off", log_config=None)
    config.load()
    return config


def connection_to(app: ASGIApp, state: ServerState) -> ServerProtocol:
    """Return the proxy's side of a connection, with room enough, within a running event loop."""
    outbox = Outbox(asyncio.get_running_loop())
    return ServerProtocol(config_of(app), state, {}, outbox=outbox, budget=Budget(1 << 30))


async def body_of(receive: Receive) -> bytes | None:
    """Return the body of a request; None if the client leaves before it is whole."""
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body, more = body + message["body"], message["more_body"]
    return body
