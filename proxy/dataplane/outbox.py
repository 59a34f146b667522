"""What goes out to clients and replicas, sent at the end of the event loop's turn."""

from __future__ import annotations

import asyncio
from collections import deque

LARGE_BYTES = 64 * 1024
"""A larger body is sent at once, and not put behind its head in one buffer: a copy costs more than a second buffer."""

MOST_POSTED = 32
"""Messages after which they are sent in the middle of a turn: one over hundreds of connections would let the first wait
for long, and all of them fall out of the processor's cache."""


class Outbox:
    """Gathers what is to be sent within a turn. Then head and body of a message are one system call and one packet, and
    a busy peer is woken once, not by every message.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._posted: deque[tuple[asyncio.WriteTransport, bytes]] = deque()

    def post(self, transport: asyncio.WriteTransport, head: bytes, body: bytes = b"") -> None:
        """Send these at the end of the turn, or now if there is much; not if the transport is closing by then."""
        if len(body) > LARGE_BYTES:
            self.send()
            if not transport.is_closing():
                transport.writelines((head, body))
            return
        if not self._posted:
            self._loop.call_soon(self.send)
        self._posted.append((transport, head + body))
        if len(self._posted) >= MOST_POSTED:
            self.send()

    def send(self) -> None:
        """Send what has been posted. Call it before a transport is closed."""
        posted = self._posted
        try:
            while posted:
                transport, data = posted.popleft()
                if not transport.is_closing():
                    transport.write(data)
        finally:
            if posted:  # a write has failed, which is nobody else's fault
                self._loop.call_soon(self.send)
