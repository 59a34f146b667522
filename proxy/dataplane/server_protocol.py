"""uvicorn's protocol, made fit for many rollouts that take long. Three things are different.

1. Head and body of an answer go out in one system call. uvicorn writes them one after the other, and the event loop
   passes each write on at once: a second system call, and a second packet, for every rollout. Here what is written
   within one turn of the loop goes out together.
2. Whoever serves a client is called when that one leaves. By ASGI it would have to receive while it serves, which takes
   a task for each rollout.
3. What has come of a body that nobody reads goes with the answer. uvicorn keeps it until the next request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

from proxy.dataplane.arrival import ArrivalProtocol

ON_LEAVING = "lora_sync.on_leaving"
"""In a scope: a set of functions that are called when the client's connection is gone."""


class ServerProtocol(ArrivalProtocol):
    """One client's connection, with limits for what arrives on it. Pass the class as uvicorn's `http`."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(cast(asyncio.Transport, _Gathering(transport, self.loop)))
        self._on_leaving: set[Callable[[], None]] = set()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        cast(dict[str, Any], self.scope)[ON_LEAVING] = self._on_leaving

    def on_message_complete(self) -> None:
        super().on_message_complete()
        if not self.pipeline:
            self.flow.resume_reading()  # a long body has paused it: nobody would notice that the client leaves

    def on_response_complete(self) -> None:
        if not self.pipeline:
            self.cycle.body = bytearray()  # of a request that was refused unread: its connection may wait for long
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for leave in tuple(self._on_leaving):
            leave()


class _Gathering:
    """A transport whose writes go out at the end of the loop's turn, and before it closes."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._parts: list[bytes] = []
        self.is_closing = transport.is_closing
        self.pause_reading = transport.pause_reading
        self.resume_reading = transport.resume_reading

    def write(self, data: bytes) -> None:
        if not self._parts:
            self._loop.call_soon(self._flush)
        self._parts.append(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        parts, self._parts = self._parts, []
        if parts and not self._transport.is_closing():
            self._transport.writelines(parts)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
