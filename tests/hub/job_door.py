"""The way to an exposed port of a Job: a loopback port of its own where https://<job>--<port>.hf.jobs would be.

Like the Hub's, it lets nobody in without the token, unless the port is public, and has nothing to show while the Job's
server is not up. Each connection is looked at once, at its first request.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

_BLOCK = 65536


class Door:
    """Relays connections to a Job's address and port, from `open` to `close`."""

    def __init__(self, address: str, port: int, *, token: str | None) -> None:
        self._address = address
        self._port = port
        self._token = token
        self._clients: set[asyncio.StreamWriter] = set()

    async def open(self) -> str:
        """Begin to listen and return the URL."""
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        """Stop listening and cut off who is connected."""
        self._server.close()
        for client in self._clients:
            client.transport.abort()
        await self._server.wait_closed()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._clients.add(writer)
        try:
            with suppress(OSError, asyncio.IncompleteReadError):
                await self._let_in(reader, writer)
        finally:
            self._clients.remove(writer)
            writer.close()

    async def _let_in(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if self._token is not None and f"authorization: bearer {self._token}".encode() not in head.lower():
            writer.write(_refusal("401 Unauthorized"))
            return
        try:
            job_reader, job_writer = await asyncio.open_connection(self._address, self._port)
        except OSError:
            writer.write(_refusal("503 Service Unavailable"))
            return
        job_writer.write(head)
        async with asyncio.TaskGroup() as both_ways:
            both_ways.create_task(_pump(reader, job_writer))
            both_ways.create_task(_pump(job_reader, writer))


async def _pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while block := await source.read(_BLOCK):
            target.write(block)
            await target.drain()
    target.close()


def _refusal(status: str) -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()
