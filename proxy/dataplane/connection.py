"""One connection to a replica. It carries one exchange at a time and says when it can carry another."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import cast

from proxy.dataplane.budget import Account
from proxy.dataplane.errors import UpstreamError
from proxy.dataplane.exchange import Exchange
from proxy.dataplane.outbox import Outbox

KEEPALIVE_S = 25
"""A connection whose other end has vanished without a word (a machine that died, a NAT that forgot it) breaks off after
so many seconds of silence: its replica may be well on all others. Linux alone would take two hours."""

_KEEPALIVE = ((socket.TCP_KEEPIDLE, KEEPALIVE_S - 15), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))


class Connection(asyncio.Protocol):
    """`released` is called when an answer has ended and the connection may be used again, `lost` when it is gone."""

    def __init__(
        self, released: Callable[[Connection], None], lost: Callable[[Connection], None], outbox: Outbox
    ) -> None:
        self._released = released
        self._lost = lost
        self._outbox = outbox
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._loop = asyncio.get_running_loop()
        self.used = False
        """Whether it has carried an exchange before: its replica may have closed it meanwhile."""
        self.idle_since = self._loop.time()

    def start(self, head: bytes, body: bytes, account: Account) -> Exchange:
        """Send a request and return its exchange."""
        transport = self._transport
        assert transport is not None and self._exchange is None
        exchange = self._exchange = Exchange(transport.pause_reading, transport.resume_reading, account, self._loop)
        self._outbox.post(transport, head, body)
        return exchange

    def close(self) -> None:
        """Close at once. The exchange, if there is one, breaks off; the replica sees that nobody listens any more."""
        if self._transport is not None:
            self._transport.abort()
        self._gone(None)

    @property
    def is_open(self) -> bool:
        """Whether it can carry an exchange."""
        return self._transport is not None and not self._transport.is_closing()

    def is_fresh(self, limit_s: float) -> bool:
        """Whether it is open and has been idle for less than `limit_s` seconds."""
        return self.is_open and self._loop.time() - self.idle_since < limit_s

    def __repr__(self) -> str:
        state = "closed" if not self.is_open else "busy" if self._exchange else "idle"
        return f"<Connection {state} used={self.used}>"

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        with suppress(OSError):  # it is gone already
            _notice_silence(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        exchange = self._exchange
        if exchange is None:
            self.close()  # nobody asked: what comes on this connection next could be anything
            return
        try:
            exchange.feed(data)
        except UpstreamError as error:
            exchange.fail(error)
            self.close()
            return
        if exchange.complete:
            self._exchange = None
            self.used = True
            self.idle_since = self._loop.time()
            if exchange.keep_alive:
                self._released(self)
            else:
                self.close()

    def eof_received(self) -> bool:
        return False  # a replica that has said everything: close our side as well

    def connection_lost(self, error: Exception | None) -> None:
        self._gone(error)

    def _gone(self, error: Exception | None) -> None:
        self._transport = None
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.closed(error)
        self._lost(self)


def _notice_silence(of: socket.socket) -> None:
    of.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        of.setsockopt(socket.IPPROTO_TCP, option, value)
