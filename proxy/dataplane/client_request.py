"""One request of a client and its answer, as an ASGI application sees them: `scope`, `receive`, `send`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Protocol

from starlette.types import ASGIApp, Message, Scope

from proxy.dataplane.answers import told
from proxy.dataplane.headers import Headers
from proxy.errors import stopping

logger = logging.getLogger(__name__)

STATUS_LINE = {status: b"HTTP/1.1 %d \r\n" % status for status in range(100, 1000)} | {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus
}
"""Of every number that a replica can answer with: gates use some, such as 499 and 529, that have no name here."""

_CONTINUE = STATUS_LINE[100] + b"\r\n"

_WITHOUT_BODY = (204, 304)
"""RFC 9110, section 6.4.1; nor has the answer to a HEAD one."""

_BROKEN = b"The proxy failed; its log has the reason."


CLIENT = "lora_sync.client"
"""In a scope, while it is served: its ClientRequest. Rollouts are read and answered by that, which spares them a
coroutine and a dictionary for each message of ASGI."""


class Client(Protocol):
    """What an answer needs of the connection that it goes out on."""

    is_full: bool
    """Whether the client is slower than its answer: wait for `room`."""

    async def room(self) -> None:
        """Wait until the client has taken enough of what was written, or has left."""

    def write(self, head: bytes, body: bytes = b"") -> None:
        """Send these at the end of the event loop's turn."""

    def common_headers(self) -> bytes:
        """Return the lines that every answer has."""

    def read_on(self) -> None:
        """Take in more of the request."""

    def answered(self, *, keep_alive: bool) -> None:
        """Go on to the next request, or close."""

    def close(self) -> None:
        """Close, so that half an answer is not taken for a whole one."""

    def soon(self, call: Callable[[], None]) -> None:
        """Call this at the end of the event loop's turn."""


class ClientRequest:
    """What has come of a request, and what has gone out of its answer. `run` has it served."""

    __slots__ = (
        *("_chunked", "_client", "_expects_continue", "_head", "_left", "_news", "_pieces", "_wakes"),
        *("buffered", "ended", "gone", "keep_alive", "more_body", "on_answer", "on_leaving", "scope", "started"),
    )

    def __init__(self, client: Client, scope: Scope, *, keep_alive: bool, expects_continue: bool) -> None:
        self._client = client
        self.scope = scope
        self.keep_alive = keep_alive
        """Whether the connection may carry another request."""
        self._expects_continue = expects_continue
        self._pieces: list[bytes] = []
        self.buffered = 0
        """Bytes of the body that have come, and that the application has not received."""
        self.more_body = True
        """Whether the body has not come whole."""
        self._news = False
        self._wakes: asyncio.Event | None = None
        self.gone = False
        """Whether the client has left."""
        self.on_leaving: Callable[[], None] | None = None
        """Is called when it leaves. By ASGI whoever serves would have to receive meanwhile, in a task of its own."""
        self.on_answer: Callable[[int], None] | None = None
        """Is called with the status when the answer begins."""
        self.started = self.ended = False
        """Whether the answer has begun, and whether it has gone out whole."""
        self._head = b""
        """What waits for the first bytes of the body, to go out with them."""
        self._chunked = False
        self._left: int | None = None
        """Bytes of the body that its `content-length` still promises."""

    # What the connection tells

    def feed(self, body: bytes) -> None:
        """Take a piece of the body. Nobody wants it after the answer."""
        if not self.ended:
            self._pieces.append(body)
            self.buffered += len(body)
            self._wake()

    def complete(self) -> None:
        """Take the body for whole."""
        self.more_body = False
        self._wake()

    def leave(self) -> None:
        """Tell the application, at once if it has asked for that, that the client has left."""
        self.gone = True
        self._wake()
        if self.on_leaving is not None:
            self.on_leaving()

    def _wake(self) -> None:
        self._news = True
        if self._wakes is not None:
            self._wakes.set()

    # What the application is given

    async def run(self, app: ASGIApp) -> None:
        """Have `app` serve it. What that leaves without an answer gets a 500, and half an answer is cut off."""
        self.scope[CLIENT] = self
        try:
            await app(self.scope, self.receive, self.send)
        except asyncio.CancelledError:
            self.stop()
            raise
        except Exception:
            logger.exception("%s %s failed", self.scope["method"], self.scope["path"])
        finally:
            del self.scope[CLIENT]
            if not self.ended:
                self._answer_instead(500, [], _BROKEN)

    @property
    def is_running(self) -> bool:
        """Whether it is in the application's hands. One whose task was cancelled before its first step never is."""
        return CLIENT in self.scope

    def stop(self) -> None:
        """Say that the proxy stops, if no answer has begun; cut off one that has."""
        error = stopping()
        self._answer_instead(error.status, *told(error))

    def _answer_instead(self, status: int, head: Headers, body: bytes) -> None:
        """Send the last answer of this connection, unless the application has; half an answer is cut off."""
        if self.ended or self.gone:
            return
        if self.started:
            self._client.close()
            return
        self.keep_alive = False
        self.begin(status, head, len(body))
        self.end(body)

    async def receive(self) -> Message:
        """Return what has come of the body, or that the client has left or has its answer."""
        if self._expects_continue and not self.started:
            self._expects_continue = False
            self._client.write(_CONTINUE)
        while not (self._news or self.gone or self.ended):
            self._client.read_on()
            if self._wakes is None:
                self._wakes = asyncio.Event()
            self._wakes.clear()
            await self._wakes.wait()
        if self.gone or self.ended:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": self._taken(), "more_body": self.more_body}

    async def send(self, message: Message) -> None:
        """Send the head of the answer, or more of its body. Raises RuntimeError for what cannot come next."""
        await self.room()
        if self.gone:
            return
        if message["type"] == "http.response.body" and self.started and not self.ended:
            self._send_body(message.get("body", b""), more=message.get("more_body", False))
        elif message["type"] == "http.response.start" and not self.started:
            self._begin_by(message)
        else:
            raise RuntimeError(f"{message['type']} cannot come next in this answer")

    def _begin_by(self, message: Message) -> None:
        headers, length = [], None
        for header in message.get("headers", ()):
            if header[0] == b"content-length":
                length = int(header[1])
            elif header[0] == b"connection":
                self.keep_alive = self.keep_alive and header[1].lower() != b"close"
            else:
                headers.append(header)
        self.begin(message["status"], headers, length)

    # What those are given who know that it is one: the same, in one step

    def rest_of_body(self) -> bytes | None:
        """Return what nobody has received of the body; None while more of it is to come, or if the client has left, or
        if it has to be told to continue: then `receive`.
        """
        return None if self.more_body or self.gone or self._expects_continue else self._taken()

    @property
    def is_slow(self) -> bool:
        """Whether the client has more of its answer to take before it should be sent more."""
        return self._client.is_full

    async def room(self) -> None:
        """Wait until it is not slow."""
        if self._client.is_full and not self.gone:
            await self._client.room()

    def pass_on(self, body: bytes) -> None:
        """Send more of a body that has begun and does not end here."""
        if not self.gone:
            self._send_body(body, more=True)

    def end(self, body: bytes = b"") -> None:
        """Send the rest of the body."""
        if not self.gone:
            self._send_body(body, more=False)

    def begin(self, status: int, headers: list[tuple[bytes, bytes]], length: int | None = None) -> None:
        """Work out how the body goes out. The head itself goes with what is sent next in the same turn of the loop.

        `headers` say nothing of the body's `length` (in bytes, None: nobody knows), nor of the connection.
        """
        if self.gone:
            return
        if self.on_answer is not None:
            self.on_answer(status)
        text = b"".join([b"%b: %b\r\n" % header for header in headers])
        if not text.count(b"\n") == text.count(b"\r") == len(headers):
            raise RuntimeError("a header of this answer has a line break in it")
        self.started = True
        is_without_body = self.scope["method"] == "HEAD" or status in _WITHOUT_BODY
        self._left = 0 if is_without_body else length
        if length is not None:
            text += b"content-length: %d\r\n" % length
        elif not is_without_body:
            self._chunked = self.scope["http_version"] == "1.1"
            self.keep_alive = self.keep_alive and self._chunked  # else only the connection's end tells the body's
            text += b"transfer-encoding: chunked\r\n" if self._chunked else b""
        end = b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n"
        self._head = b"".join((STATUS_LINE[status], self._client.common_headers(), text, end))
        if not self._left:
            self._client.soon(self._flush)

    def _taken(self) -> bytes:
        self._news = False
        pieces, self._pieces, self.buffered = self._pieces, [], 0
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _send_body(self, body: bytes, *, more: bool) -> None:
        if self._left is not None:
            if self.scope["method"] == "HEAD":
                body = b""
            self._left -= len(body)
            if self._left < 0 or (self._left and not more):
                raise RuntimeError("the answer is not as long as its content-length says")
        elif self._chunked:
            body = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            if not more:
                body += b"0\r\n\r\n"
        head, self._head = self._head, b""
        self._client.write(head, body)
        if not more:
            self.ended = True
            self._pieces, self.buffered = [], 0  # what nobody has received, or ever will
            self._wake()
            self._client.answered(keep_alive=self.keep_alive)

    def _flush(self) -> None:
        head, self._head = self._head, b""
        if head:
            self._client.write(head)
