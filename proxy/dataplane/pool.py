"""Connections to one replica: as many as there are rollouts, up to a bound; idle ones are used again while fresh."""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from urllib.parse import urlsplit

from proxy.dataplane.connection import Connection
from proxy.dataplane.errors import UpstreamError
from proxy.dataplane.outbox import Outbox

KEEP_ALIVE_S = 3.0
"""vLLM's uvicorn closes a connection that was idle for 5 s; leave well before it does, since both loops may lag."""


class Pool:
    """Hands out connections. `limit` bounds them all; whoever comes later waits, first come first served."""

    def __init__(self, url: str, *, limit: int, connect_timeout_s: float, outbox: Outbox) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self.base_path = parts.path
        self.own_headers = b"host: " + parts.netloc.encode("latin-1")
        """What every request to this replica says, without a line break at the end."""
        self._host = parts.hostname
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._limit = limit
        self._connect_timeout_s = connect_timeout_s
        self._outbox = outbox
        self._open: set[Connection] = set()
        self._taken = 0
        """Connections that are open, being made, or promised to a waiter."""
        self._idle: dict[Connection, None] = {}
        """In the order in which they became idle: the freshest is used first."""
        self._keeps_idle = True
        self._waiters: deque[asyncio.Future[Connection | None]] = deque()

    async def acquire(self, *, fresh: bool = False) -> Connection:
        """Return a connection that carries nothing; `fresh` asks for a new one.

        Give it back by letting its exchange end, or close it. Raises UpstreamError (unreachable) if none can be made.
        """
        while self._idle and not fresh:
            connection, _ = self._idle.popitem()
            if connection.is_fresh(KEEP_ALIVE_S):
                return connection
            connection.close()
        if self._taken >= self._limit and self._idle:
            next(iter(self._idle)).close()
        if self._taken < self._limit:
            self._taken += 1
            return await self._connect()
        freed = await self._wait()
        if freed is None:
            return await self._connect()
        if not freed.is_open:
            return await self.acquire(fresh=fresh)
        if not fresh:
            return freed
        self._open.discard(freed)  # so that nobody else gets its room
        freed.close()
        return await self._connect()

    async def _wait(self) -> Connection | None:
        """Wait for a connection (returned) or for room to make one (None, and the room is taken)."""
        waiter: asyncio.Future[Connection | None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            # Cancelled in the moment in which it was served: pass on what it got.
            if waiter.done() and not waiter.cancelled():
                connection = waiter.result()
                if connection is None:
                    self._free_room()
                elif connection.is_open:
                    self._released(connection)
            raise

    async def _connect(self) -> Connection:
        """Make a connection in room that is taken already."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(
                    self._new_connection, self._host, self._port, ssl=self._tls
                )
        except BaseException as error:
            self._free_room()
            if isinstance(error, TimeoutError):
                raise UpstreamError(f"no connection within {self._connect_timeout_s:g} s", unreachable=True) from None
            if isinstance(error, OSError):
                raise UpstreamError(f"no connection: {error}", unreachable=True) from error
            raise
        if not connection.is_open:
            self._free_room()
            raise UpstreamError("no connection: it was closed as soon as it was made", unreachable=True)
        self._open.add(connection)
        return connection

    def _new_connection(self) -> Connection:
        return Connection(self._released, self._lost, self._outbox)

    def close(self) -> None:
        """Close every connection; what they carry breaks off."""
        for connection in list(self._open):
            connection.close()

    def keep_none(self) -> None:
        """Close what is idle, and all else once it has carried what it carries: the replica has left."""
        self._keeps_idle = False
        for connection in list(self._idle):
            connection.close()

    def _released(self, connection: Connection) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(connection)
                return
        if self._keeps_idle:
            self._idle[connection] = None
        else:
            connection.close()

    def _lost(self, connection: Connection) -> None:
        self._idle.pop(connection, None)
        if connection in self._open:
            self._open.discard(connection)
            self._free_room()

    def _free_room(self) -> None:
        """Give up room for one connection, to the first waiter if there is one."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
        self._taken -= 1

    def __repr__(self) -> str:
        state = f"open={len(self._open)} idle={len(self._idle)} waiting={len(self._waiters)}"
        return f"<Pool {self._host}:{self._port} {state}>"
