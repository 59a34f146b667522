"""Send head and body of an answer in one system call.

uvicorn writes them one after the other, and the event loop passes each write on at once: a second system call, and a
second packet, for every rollout. Here what is written within one turn of the loop goes out together.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from proxy.dataplane.arrival import ArrivalProtocol


class OneWriteProtocol(ArrivalProtocol):
    """uvicorn's protocol, with limits, over a transport that gathers writes. Pass it as uvicorn's `http`."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(cast(asyncio.Transport, _Gathering(transport, self.loop)))


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
