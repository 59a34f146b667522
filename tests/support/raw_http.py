"""Raw bytes to the proxy and back: requests that no HTTP client would send."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

LIMIT_S = 10.0
"""For an answer. Longer is a hang."""


@contextmanager
def connected(port: int) -> Iterator[socket.socket]:
    """Give a connection to the proxy on this machine."""
    with socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S) as connection:
        yield connection


LAST = b"GET /proxy/live HTTP/1.1\r\nhost: p\r\nconnection: close\r\n\r\n"
"""Put behind a request it shows whether the proxy still knows where that one ended: its answer is the last 200."""


def say(port: int, *parts: bytes) -> bytes:
    """Send `parts` and LAST as packets, and return all that comes back until the proxy closes. Raises TimeoutError."""
    with connected(port) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with suppress(ConnectionError):  # refused before all of it was sent
            for part in (*parts, LAST):
                connection.sendall(part)
        return until_closed(connection)


def until_closed(connection: socket.socket) -> bytes:
    """Return what comes until the other side closes. Raises TimeoutError if it does not."""
    said = b""
    while True:
        try:
            piece = connection.recv(65536)
        except ConnectionResetError:
            return said
        if not piece:
            return said
        said += piece


def statuses(said: bytes) -> list[int]:
    """Return the status of each answer in `said`, none of whose bodies holds a status line."""
    return [int(part[:3]) for part in said.split(b"HTTP/1.1 ")[1:]]
