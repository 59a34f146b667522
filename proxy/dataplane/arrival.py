"""How a request may arrive: its head within a size, all of it within a time. uvicorn knows no bound for either.

A request line or header of any length would be kept in memory, and a client that sends a byte now and then would hold
its connection, and what it has sent so far, for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from proxy.errors import ApiError

MAX_HEAD_BYTES = 32 * 1024
"""Request line and headers. Clients send less than 2 KB; nginx, too, takes 32 KB at most."""

BYTES_PER_WAIT = 1024 * 1024
"""Each MB that has come gives a body as much time again: 17 KB/s are enough, a byte now and then is not."""


class ArrivalProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits: 431 for a head that is too large, 408 for what does not come on."""

    _since: float | None = None
    """When the request that is arriving began; None while none is."""
    _came = 0
    """Bytes of it so far."""
    _in_head = False
    _refusal: ApiError | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._since = self.loop.time()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # uvicorn does so after a clean end only, and the timer holds all of it

    def data_received(self, data: bytes) -> None:
        if self._since is None and not self._is_answering():
            self._since = self.loop.time()
        self._came += len(data)
        super().data_received(data)
        if self._in_head and self._came > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(_head_too_large())

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        if self._since is None:
            self._since = self.loop.time()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # else it is a trailer, which uvicorn would put among the headers
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        if self._came > MAX_HEAD_BYTES and self._head_bytes() > MAX_HEAD_BYTES:
            self._refusal = _head_too_large()
        elif self.parser.should_upgrade():
            self._refusal = _no_upgrade()  # the parser would skip the body, and take what follows for another protocol
        if self._refusal is not None:
            raise self._refusal  # which ends the parser; uvicorn then asks for `send_400_response`
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._since, self._came = None, 0

    def send_400_response(self, msg: str) -> None:
        self._refuse(self._refusal or ApiError(400, msg, reason="bad_http", type="Bad Request"))

    def refuse_if_late(self, now: float, limit_s: float) -> None:
        """Close the connection if its request has not arrived in `limit_s`, and once more so long for each MB."""
        if self._since is None or self.flow.read_paused or self.transport.is_closing():
            return
        refused = not self._in_head and not self._is_answering()  # and its body has gone on all the same, or is none
        waits = 1 if refused else 1 + self._came // BYTES_PER_WAIT
        if now - self._since <= waits * limit_s:
            return
        if refused:
            self.transport.close()
        else:
            message = f"The request has not arrived within {waits * limit_s:g} s (PROXY_REQUEST_TIMEOUT_S)."
            self._refuse(ApiError(408, message, reason="too_slow", type="Request Timeout"))

    def _is_answering(self) -> bool:
        current: RequestResponseCycle | None = getattr(self, "cycle", None)  # None before the first request
        return current is not None and not current.response_complete

    def _head_bytes(self) -> int:
        return len(self.url) + sum(len(name) + len(value) for name, value in self.headers)

    def _refuse(self, error: ApiError) -> None:
        """Answer in vLLM's shape and close. Nothing is said within another answer, or in its place."""
        if not self._is_answering() or (self.cycle.more_body and not self.cycle.response_started):
            content = msgspec.json.encode(error.body())
            head = {"content-type": "application/json", "content-length": str(len(content)), "connection": "close"}
            lines = [f"{name}: {value}\r\n".encode() for name, value in (head | error.headers()).items()]
            self.transport.write(b"".join([STATUS_LINE[error.status], *lines, b"\r\n", content]))
        self.transport.close()


def refuse_late(connections: Iterable[object], now: float, limit_s: float) -> None:
    """Close every connection whose request does not come on. Call it now and then: no request pays for a timer."""
    for connection in list(connections):
        if isinstance(connection, ArrivalProtocol):
            connection.refuse_if_late(now, limit_s)


def _no_upgrade() -> ApiError:
    message = "The proxy switches to no other protocol: send the request without Upgrade, and not as CONNECT."
    return ApiError(400, message, reason="upgrade", type="Bad Request")


def _head_too_large() -> ApiError:
    message = f"The request line and headers are larger than {MAX_HEAD_BYTES} bytes."
    return ApiError(431, message, reason="head_too_large", type="Request Header Fields Too Large")
