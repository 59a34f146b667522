"""The network between the proxy and one replica: a relay of bytes that can be cut, slow, broken into pieces, or reset.

A cut loses what is sent meanwhile, and the connections that it met stay silent, as after a machine or a NAT has died:
neither end is told, until TCP keepalive has found out. A reset is a TCP reset in the middle of an answer.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from contextlib import suppress
from enum import Enum
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

from proxy.dataplane.connection import KEEPALIVE_S

READ_BYTES = 64 * 1024

SLOW_DELAY_S = 0.08
SLOW_BYTES_PER_S = 200_000
"""A poor transatlantic link: 160 ms there and back."""

PIECE_BYTES = 7
"""Smaller than any header, so that every line, chunk and number is cut somewhere."""

_NO_LINGER = struct.pack("ii", 1, 0)


class Trouble(Enum):
    """What the network does."""

    NONE = "nothing"
    CUT = "network cut"
    HALF_OPEN = "half-open"
    """The replica is told that the proxy has gone, the proxy is not."""
    SLOW = "slow link"
    PIECES = "tiny packets"
    RESET_HEAD = "reset in the head"
    RESET_BODY = "reset in the body"


_SILENT = (Trouble.CUT, Trouble.HALF_OPEN)


class Wire:
    """One relay. An async context manager; `url` is what the proxy is given in place of the replica's."""

    def __init__(self, replica_url: str, *, seed: int = 0) -> None:
        self.trouble = Trouble.NONE
        self.url = ""
        self.lost_bytes = 0
        """What cuts have swallowed."""
        self._host, self._port = urlsplit(replica_url).hostname, urlsplit(replica_url).port
        self._random = random.Random(seed)
        self._carried: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        for task in self._carried:
            task.cancel()
        await asyncio.gather(*self._carried, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._carried.add(task)
        try:
            await self._carry(reader, writer)
        except OSError:
            reset(writer)  # whoever was on the other end is gone without a farewell
        except asyncio.CancelledError:
            pass  # the wire's block has ended; streams of Python 3.11 would print a traceback for it
        finally:
            self._carried.discard(task)
            writer.close()

    async def _carry(self, from_proxy: asyncio.StreamReader, to_proxy: asyncio.StreamWriter) -> None:
        """Carry one connection to its end."""
        if self.trouble in _SILENT:
            await _silence(from_proxy, to_proxy)
            return
        from_replica, to_replica = await asyncio.open_connection(self._host, self._port)
        loop = asyncio.get_running_loop()
        ways = [
            loop.create_task(self._pump(from_proxy, to_replica)),  # both are awaited right here
            loop.create_task(self._pump(from_replica, to_proxy, answers=True)),
        ]
        try:
            done, _ = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            if any(task.result() for task in done):
                ways[0].cancel()
                await asyncio.wait(ways[:1])  # a stream has one reader at a time
                if self.trouble is Trouble.HALF_OPEN:
                    to_replica.close()
                await _silence(from_proxy, to_proxy)
        finally:
            for task in ways:
                task.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            to_replica.close()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, answers: bool = False) -> bool:
        """Carry bytes one way until their end; return whether they went silent instead of ending."""
        while data := await source.read(READ_BYTES):
            trouble = self.trouble
            if trouble in _SILENT:
                self.lost_bytes += len(data)
                return True
            if answers and trouble in (Trouble.RESET_HEAD, Trouble.RESET_BODY):
                sink.write(data[: self._cut(data, trouble)])
                await sink.drain()
                reset(sink)
                return False
            await self._send(sink, data, trouble)
        return False

    def _cut(self, data: bytes, trouble: Trouble) -> int:
        """Return where the reset comes in what an answer begins, or goes on, with."""
        head = data.find(b"\r\n\r\n") + 4 if data.startswith(b"HTTP/") else 0
        if trouble is Trouble.RESET_HEAD and head > 4:
            return self._random.randrange(1, head)
        return self._random.randrange(head, len(data)) if head < len(data) else head

    async def _send(self, sink: asyncio.StreamWriter, data: bytes, trouble: Trouble) -> None:
        if trouble is Trouble.SLOW:
            await asyncio.sleep(SLOW_DELAY_S + len(data) / SLOW_BYTES_PER_S)
        size = PIECE_BYTES if trouble is Trouble.PIECES else len(data)
        for start in range(0, len(data), size):
            sink.write(data[start : start + size])
            await sink.drain()
            if trouble is Trouble.PIECES:
                await asyncio.sleep(0)  # each piece its own packet: asyncio has switched Nagle's waiting off


async def _silence(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Take what comes, and say nothing, until the other end gives up, by itself or by its keepalive.

    This machine is well and answers keepalive's probes, so the end that they would come to is made here.
    """
    with suppress(ConnectionError):
        try:
            async with asyncio.timeout(KEEPALIVE_S):
                while await reader.read(READ_BYTES):
                    pass
        except TimeoutError:
            reset(writer)


def reset(writer: asyncio.StreamWriter) -> None:
    """Close a connection by a TCP reset."""
    of: socket.socket | None = writer.get_extra_info("socket")
    if of is not None and of.fileno() >= 0:
        of.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
    writer.transport.abort()
