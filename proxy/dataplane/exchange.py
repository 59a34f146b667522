"""One request and its answer on a connection: bytes in, the head and then the body out, with back-pressure.

`httptools` parses; this keeps the state of one message. It knows nothing of sockets but how to pause reading.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from time import monotonic

import httptools

from proxy.dataplane.budget import Account
from proxy.dataplane.errors import UpstreamError

HIGH_WATER_BYTES = 64 * 1024
"""A stream whose client is slower than its replica stops being read here; with one more read of at most 192 KB from the
socket, a slow reader holds less than 256 KB."""

MAX_HEAD_BYTES = 256 * 1024
"""Status line and headers; vLLM sends a few hundred bytes. More is not an answer but an accident."""

_NOT_FINAL = range(200)
"""100 Continue, 103 Early Hints; below 100 there are none."""


Sink = Callable[[bytes], bool]
"""Takes more of a body in the moment in which it arrives; False if it does not want it now. May raise UpstreamError."""


class Exchange:
    """The state of one answer. `head` is awaited first, then `read` or `chunk`."""

    def __init__(
        self,
        pause: Callable[[], None],
        resume: Callable[[], None],
        account: Account,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        """In lower case."""
        self.sent_at = monotonic()
        """When the request went out; the times of an exchange are on `time.monotonic`."""
        self.answered_at: float | None = None
        """When the first byte came back."""
        self.ended_at: float | None = None
        """When the last byte had come back."""
        self.complete = False
        self.keep_alive = False
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
        self._pause, self._resume = pause, resume
        self._account: Account | None = account
        self._loop = loop  # asking for the running loop is a system call
        self._paused = False
        self._head_done = False
        self._until_close = True
        self._event_stream = False
        self._head_bytes = 0
        self._chunks: deque[bytes] = deque()
        self.buffered = 0
        self._limit = HIGH_WATER_BYTES
        self._error: UpstreamError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._sink: Sink | None = None

    # What the connection tells

    def feed(self, data: bytes) -> None:
        """Take bytes from the socket. Raises UpstreamError when they are not an answer."""
        if self.answered_at is None:
            self.answered_at = monotonic()
        parser = self._parser
        if parser is None:
            return
        if not self._head_done:
            self._head_bytes += len(data)
        try:
            parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            raise UpstreamError("the replica wants to switch protocols") from None
        except httptools.HttpParserError as error:
            raise UpstreamError(f"the answer is not HTTP: {error}") from error
        if not self._head_done and self._head_bytes > MAX_HEAD_BYTES:
            raise UpstreamError(f"the head of the answer is longer than {MAX_HEAD_BYTES} bytes")
        if self._sink is not None and self._chunks:
            self._pour(self._sink)
        if self.complete:
            # The parser holds on to this object: without a cut the garbage collector would have to find every answer.
            self._parser = None

    def closed(self, error: Exception | None) -> None:
        """The connection is gone: that ends a body without a length, and breaks off any other."""
        if self.complete or self._error is not None:
            return
        if error is None and self._head_done and self._until_close:
            self.on_message_complete()
            return
        where = "before it answered" if self.answered_at is None else "in the middle of its answer"
        self.fail(UpstreamError(f"the replica closed the connection {where}{f' ({error})' if error else ''}"))

    def fail(self, error: UpstreamError) -> None:
        """End the exchange with `error`; whoever waits for it gets it."""
        self._error = self._error or error
        self._parser = None
        self._wake()

    # What the relay asks

    @property
    def is_stream(self) -> bool:
        """Whether this is a stream of server-sent events that has begun well."""
        return self._event_stream and self.status == 200

    async def head(self) -> None:
        """Wait for status and headers. Raises UpstreamError."""
        while not self._head_done:
            await self._more()

    async def read(self, limit: int) -> bytes | None:
        """Return the whole body, or None if it is longer than `limit` bytes: then `chunk` has it from its start.

        Call it once: a whole body is not kept here. Raises UpstreamError if it breaks off.
        """
        self._limit = limit
        self._read_on()
        while not self.complete:
            if self.buffered > limit:
                return None
            await self._more()
        body = b"".join(self._chunks)
        self._chunks.clear()  # a slow client would otherwise have it held twice
        return body

    async def chunk(self, sink: Sink | None = None) -> bytes:
        """Return what has come of the body since the last call, once there is something; nothing at its end.

        What `sink` takes meanwhile is not returned: to wake a task for each event of a stream costs more than all else.
        Raises UpstreamError if it breaks off, after what had arrived.
        """
        if self._account is not None:
            self._account = None  # from here on back-pressure bounds it
            self._limit = HIGH_WATER_BYTES
        if not self._chunks and not self.complete:
            self._sink = sink
            try:
                while not self._chunks and not self.complete:
                    await self._more()
            finally:
                self._sink = None
        return self._taken()

    def _taken(self) -> bytes:
        chunks = self._chunks
        if not chunks:
            return b""
        chunk = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        chunks.clear()
        self.buffered = 0
        self._read_on()
        return chunk

    def _pour(self, sink: Sink) -> None:
        """Give the sink what has come."""
        chunk = self._taken()
        try:
            wanted = sink(chunk)
        except UpstreamError:
            self.complete = self.keep_alive = False  # it may have ended with this, but not well
            raise
        if not wanted:
            self._chunks.append(chunk)
            self.buffered = len(chunk)
            self._wake()

    async def _more(self) -> None:
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _read_on(self) -> None:
        if self._paused:
            self._paused = False
            self._resume()

    # What the parser finds

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head_done:
            return  # trailers, which nobody here wants
        name = name.lower()
        self.headers.append((name, value))
        if name == b"content-length" or name == b"transfer-encoding":
            self._until_close = False
        elif name == b"content-type":
            self._event_stream = value.startswith(b"text/event-stream")

    def on_headers_complete(self) -> None:
        if self.complete:
            return
        assert self._parser is not None
        status = self._parser.get_status_code()
        if status in _NOT_FINAL:
            if status < 100:
                raise UpstreamError(f"{status} is no status")  # which ends the parser
            self.headers.clear()
            self._until_close, self._event_stream = True, False
            return
        self.status = status
        self._head_done = True
        self._wake()

    def on_body(self, body: bytes) -> None:
        if self.complete:
            return
        if self._account is not None and not self._account.take(len(body)):
            self.fail(UpstreamError("the proxy has no room for the answer", over_budget=True))
        self._chunks.append(body)
        self.buffered += len(body)
        if self.buffered > self._limit and not self._paused:
            self._paused = True
            self._pause()
        if self._sink is None:
            self._wake()

    def on_message_complete(self) -> None:
        if self._head_done:
            self.keep_alive = self._parser is not None and self._parser.should_keep_alive() and not self.complete
            self.complete = True
            self.ended_at = monotonic()
            self._read_on()  # the connection may carry another answer before anybody has taken this one
            self._wake()

    def on_message_begin(self) -> None:
        if self.complete:
            # Bytes of another answer behind this one: nobody asked for it, so the connection cannot be trusted.
            self.keep_alive = False
