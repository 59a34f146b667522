"""One client's connection: bytes in, one request after the other to the application, bytes out. uvicorn listens.

`httptools` parses, this keeps the state between requests. uvicorn has a protocol of its own, which took a quarter of
what a rollout costs: a timer for each pause between two requests, two regular expressions for each header of an answer,
a system call for its head and one for its body. It also knows no bound for how a request may arrive (`arrival`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from contextvars import copy_context
from functools import lru_cache
from typing import Any, cast
from urllib.parse import unquote

import httptools
import uvicorn
from starlette.types import ASGIApp
from uvicorn.server import ServerState

from proxy.dataplane.answers import told
from proxy.dataplane.arrival import MAX_HEAD_BYTES, Arrival, head_too_large, no_upgrade, not_http
from proxy.dataplane.budget import Account, Budget
from proxy.dataplane.client_request import STATUS_LINE, ClientRequest
from proxy.dataplane.outbox import Outbox
from proxy.errors import ApiError

HIGH_WATER_BYTES = 64 * 1024
"""A body of which the application has not received so much yet is not read on."""

MAX_WAITING = 256
"""Requests that may wait for the answer to one before them. Tiny ones take fifty times in memory what they take in a
packet. The connection ends with the last answer then, and the client can ask again for what has got none."""

UNREAD_S = 3600.0
"""A client that has taken nothing of its answer for so long is given up: as long as a rollout may take by default."""

UNREAD_TIGHT_S = 600.0
"""The same while more than half of PROXY_MAX_BUFFER is taken: clients that read nothing must not keep others out.
Longer than a trainer's step, in which some read nothing: who is refused may come again, what is cut off is lost."""

LINGER_S = 30.0
"""A client that gets its last answer while it still sends has so long to read it (nginx: `lingering_time`). Closed at
once, it would meet a reset, which overtakes the answer."""

LINGER_BYTES = 256 * 1024 * 1024
"""So much of what it sends is dropped meanwhile: four times the largest body that is taken by default."""

_ASGI = {"version": "3.0", "spec_version": "2.3"}
"""From 2.4 on, `send` would have to raise when the client has left."""


class ServerProtocol(asyncio.Protocol):
    """Pass the class, with an `outbox` and a `budget`, as uvicorn's `http`."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        outbox: Outbox,
        budget: Budget,
    ) -> None:
        self._app = cast(ASGIApp, config.loaded_app)
        self.server = server_state
        self._outbox = outbox
        self._budget = budget
        self._unsent_account = Account(budget)
        """Has what the client has not taken of its answers, while that is much."""
        self._loop = _loop or asyncio.get_running_loop()
        self._context = copy_context()
        self._keep_alive_s = config.timeout_keep_alive
        self._transport = cast(asyncio.Transport, None)
        self._parser: httptools.HttpRequestParser | None = None
        self._about: dict[str, Any] = {"type": "http", "asgi": _ASGI, "root_path": "", "state": app_state}
        """What the scopes of all its requests have."""
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._expects_continue = False
        self._arrival = Arrival(self._loop.time())
        self._refusal: ApiError | None = None
        self._newest: ClientRequest | None = None
        self._served: ClientRequest | None = None
        """The one that is being answered."""
        self._waiting: deque[ClientRequest] = deque()
        """Those that came before the answer to the one before had gone out."""
        self._paused = False
        self._paused_at = 0.0
        self.is_full = False
        """Whether the client is slower than its answer: wait for `room`."""
        self._has_room = asyncio.Event()
        self._unread = 0
        """What was unsent when somebody last looked."""
        self._unread_since = 0.0
        self._idle_since = 0.0
        self._dropped = 0
        """Bytes that nobody wants, since the last answer is settled."""
        self._lingers: asyncio.TimerHandle | None = None
        self._common: tuple[object, bytes] = (None, b"")

    # What the transport tells

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self._parser = httptools.HttpRequestParser(self)
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)  # a line break after the last request
        self.server.connections.add(cast(Any, self))  # which names uvicorn's own two protocols
        self._about |= {
            "scheme": "https" if transport.get_extra_info("sslcontext") else "http",
            "server": _address(transport.get_extra_info("sockname")),
            "client": _address(transport.get_extra_info("peername")),
        }

    def connection_lost(self, exc: Exception | None) -> None:
        self.server.connections.discard(cast(Any, self))
        if self._served is not None:
            self._served.leave()
        self._parser = self._served = self._newest = None  # they hold on to this object
        self._waiting.clear()
        if self._lingers is not None:
            self._lingers.cancel()
        self.resume_writing()

    def eof_received(self) -> None:
        """Let the transport close: a client that has closed its side has left."""

    def data_received(self, data: bytes) -> None:
        if self._parser is None:
            self._drop(data)
            return
        if self._transport.is_closing():
            return
        arrival = self._arrival
        if arrival.since is None and self._served is None:
            arrival.since = self._loop.time()
        arrival.came += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._refuse(self._refusal or not_http())
            return
        if arrival.came - arrival.came_of_body > MAX_HEAD_BYTES:
            self._refuse(head_too_large())
        elif (newest := self._newest) is not None and newest.more_body and newest.buffered > HIGH_WATER_BYTES:
            self._pause()

    def pause_writing(self) -> None:
        self.is_full = True
        self._has_room.clear()
        self._unsent_account.hold(self.unsent)

    def resume_writing(self) -> None:
        self.is_full = False
        self._has_room.set()
        self._unsent_account.close()

    # What the parser finds

    def on_message_begin(self) -> None:
        self._url, self._headers, self._expects_continue = b"", [], False
        self._arrival.begin(self._loop.time())
        self._arrival.in_head = True

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._arrival.in_head:
            return  # trailers, which nobody here wants
        name = name.lower()
        if name == b"expect":
            self._expects_continue = value.lower() == b"100-continue"
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        arrival, parser = self._arrival, self._parser
        assert parser is not None
        arrival.in_head = False
        if arrival.came > MAX_HEAD_BYTES and self._head_bytes() > MAX_HEAD_BYTES:
            self._refusal = head_too_large()
        elif parser.should_upgrade():
            self._refusal = no_upgrade()  # the parser would skip the body, and take what follows for another protocol
        elif len(self._waiting) == MAX_WAITING:
            self._refusal = not_http()  # in vain: others get their answers first, and then it is closed
        if self._refusal is not None:
            raise self._refusal  # which ends the parser
        version = parser.get_http_version()
        path, raw_path, query = _parts_of(self._url)
        scope = {
            **self._about,
            "http_version": version,
            "method": parser.get_method().decode("ascii"),
            "path": path,
            "raw_path": raw_path,
            "query_string": query,
            "headers": self._headers,
        }
        request = self._newest = ClientRequest(
            self,
            scope,
            keep_alive=version == "1.1" and parser.should_keep_alive(),
            expects_continue=self._expects_continue and version == "1.1",
        )
        if self._served is None:
            self._serve(request)
        else:
            self._waiting.append(request)
            self._pause()

    def on_body(self, body: bytes) -> None:
        assert self._newest is not None
        self._newest.feed(body)
        self._arrival.came_of_body = self._arrival.came

    def on_message_complete(self) -> None:
        assert self._newest is not None
        self._newest.complete()
        self._arrival.end()
        if not self._waiting:
            self.read_on()  # a long body has paused it: nobody would notice that the client leaves

    # What an answer asks

    async def room(self) -> None:
        """Wait until the client has taken enough of what was written, or has left."""
        await self._has_room.wait()

    def write(self, head: bytes, body: bytes = b"") -> None:
        """Send these, with whatever else is sent in this turn of the event loop."""
        self._outbox.post(self._transport, head, body)

    def common_headers(self) -> bytes:
        """Return the lines that every answer has: the date, which uvicorn tells once a second."""
        headers, lines = self._common
        if headers is not self.server.default_headers:
            lines = b"".join([b"%b: %b\r\n" % header for header in self.server.default_headers])
            self._common = self.server.default_headers, lines
        return lines

    def read_on(self) -> None:
        """Take in more of the request."""
        if self._paused:
            self._paused = False
            self._arrival.wait(self._loop.time() - self._paused_at)
            self._transport.resume_reading()

    def answered(self, *, keep_alive: bool) -> None:
        """Go on to the next request, or close."""
        self._served = None
        if self._transport.is_closing():
            return
        if not keep_alive:
            self._end()
            return
        self._idle_since = self._loop.time()
        if self._waiting:
            self._context.run(self._serve, self._waiting.popleft())  # not in that of the request before
        if not self._waiting:
            self.read_on()

    def close(self) -> None:
        """Close the connection, once what was written has gone out."""
        self._outbox.send()
        self._transport.close()

    def soon(self, call: Callable[[], None]) -> None:
        """Call this at the end of the event loop's turn."""
        self._loop.call_soon(call)

    # What the server asks

    @property
    def unsent(self) -> int:
        """Bytes that the client has not taken yet, though they were written."""
        return self._transport.get_write_buffer_size()

    def shutdown(self) -> None:
        """Close, after the answer that is under way."""
        if self._served is None:
            self.close()
        else:
            self._served.keep_alive = False

    def stop(self) -> None:
        """Answer what nobody will: a request whose task has been cancelled before its first step."""
        if self._served is not None and not self._served.is_running:
            self._served.stop()

    def close_if_late(self, now: float, limit_s: float) -> None:
        """Close if a request does not arrive in time (see `Arrival.late`), if none has come for long, or if the client
        takes nothing of its answer.
        """
        if self._is_unread(now):
            self._transport.abort()
        if self._paused or self._transport.is_closing():
            return
        if self._arrival.since is None:
            if self._served is None and now - self._idle_since > self._keep_alive_s:
                self.close()
            return
        refused = not self._arrival.in_head and self._served is None  # and its body comes all the same, or is none
        if (late := self._arrival.late(now, limit_s, refused=refused)) is None:
            return
        if refused:
            self.close()
        else:
            self._refuse(late)

    def _serve(self, request: ClientRequest) -> None:
        self._served = request
        task = self._loop.create_task(request.run(self._app))
        self.server.tasks.add(task)
        task.add_done_callback(self.server.tasks.discard)

    def _pause(self) -> None:
        if not self._paused:
            self._paused = True
            self._paused_at = self._loop.time()
            self._transport.pause_reading()

    def _end(self) -> None:
        """Close after the last answer; if the client may still be sending, once it has closed, or within bounds."""
        unfinished = self._newest is not None and self._newest.more_body
        if not (unfinished or self._waiting or self._parser is None):
            self.close()
            return
        self._outbox.send()
        if self._transport.is_closing():
            return
        self._parser = self._newest = None
        self._waiting.clear()
        self._arrival.end()
        self.read_on()
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._idle_since = self._loop.time()
        self._lingers = self._loop.call_later(LINGER_S, self._transport.close)

    def _drop(self, data: bytes) -> None:
        self._dropped += len(data)
        if self._dropped > LINGER_BYTES:
            self._transport.close()

    def _is_unread(self, now: float) -> bool:
        """Whether the client has taken nothing for too long, be it all that the connection is still open for."""
        if not self.unsent or self.unsent != self._unread:
            self._unread, self._unread_since = self.unsent, now
        return now - self._unread_since > (UNREAD_TIGHT_S if self._budget.is_tight else UNREAD_S)

    def _head_bytes(self) -> int:
        separators = b": \r\n"
        return len(self._url) + sum(len(name) + len(value) + len(separators) for name, value in self._headers)

    def _refuse(self, error: ApiError) -> None:
        """Answer in vLLM's shape and close. Requests before it that came whole get their answers first, and no more is
        said then; nor within an answer that has begun. Nothing arrives after that, so that this happens once.
        """
        self._parser = None
        self._arrival.end()
        newest = self._newest
        broken = newest if newest is not None and newest.more_body else None
        if self._served is not None and self._served is not broken:
            if broken is not None:
                self._waiting.pop()
            last = self._waiting[-1] if self._waiting else self._served
            last.keep_alive = False
            return
        if broken is None or not broken.started:
            head, content = told(error)
            head += [(b"content-length", b"%d" % len(content)), (b"connection", b"close")]
            lines = [b"%b: %b\r\n" % header for header in head]
            self.write(b"".join([STATUS_LINE[error.status], *lines, b"\r\n"]), content)
        if broken is not None:
            broken.leave()
            self._served = None
        self._end()


def close_late(connections: Iterable[object], now: float, limit_s: float) -> None:
    """Close every connection whose request does not come on, or is idle. Call it now and then: no request pays for a
    timer.
    """
    for connection in list(connections):
        if isinstance(connection, ServerProtocol):
            connection.close_if_late(now, limit_s)


def stop_unserved(connections: Iterable[object]) -> None:
    """Answer what has not been begun to be served. Call it when all that serves has been cancelled."""
    for connection in list(connections):
        if isinstance(connection, ServerProtocol):
            connection.stop()


@lru_cache(maxsize=64)
def _parts_of(url: bytes) -> tuple[str, bytes, bytes]:
    """Return the path, as ASGI has it and as it was sent, and the query. Raises what the parser takes for not HTTP."""
    parsed = httptools.parse_url(url)
    path = parsed.path.decode("ascii")
    return unquote(path) if "%" in path else path, parsed.path, parsed.query or b""


def _address(name: object) -> tuple[str, int] | None:
    """Return host and port; None of a socket that has none."""
    return (str(name[0]), int(name[1])) if isinstance(name, tuple) else None
