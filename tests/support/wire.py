"""Stands between the proxy and a replica, passes every byte on, and keeps those that went to the replica.

with Wire(replica.url) as wire, RunningProxy(wire.url) as proxy:
    ...
    assert wire.requests("POST") == [...]
"""

from __future__ import annotations

import select
import socket
import socketserver
import threading
from dataclasses import dataclass
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Sent:
    """One request as a replica sees it, read as strictly as can be."""

    method: str
    target: str
    headers: tuple[tuple[str, str], ...]
    body: bytes


class Wire:
    """Relays connections to `url`."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._to = (parts.hostname or "", parts.port or 80)
        self._streams: list[bytearray] = []
        wire = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                wire._relay(self.request)

        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def forget(self) -> None:
        """Begin anew: what went over the wire so far is not told of again."""
        for stream in self._streams:
            stream.clear()

    def requests(self, method: str = "POST") -> list[Sent]:
        """Return what the replica was sent since `forget`. Raises AssertionError if it could be read in two ways."""
        return [
            sent for stream in list(self._streams) for sent in read_strictly(bytes(stream)) if sent.method == method
        ]

    def _relay(self, client: socket.socket) -> None:
        kept = bytearray()
        self._streams.append(kept)
        with socket.create_connection(self._to) as server:
            while True:
                readable, _, _ = select.select([client, server], [], [])
                for source, sink in ((client, server), (server, client)):
                    if source not in readable:
                        continue
                    try:
                        data = source.recv(65536)
                        if not data:
                            return
                        sink.sendall(data)
                    except OSError:
                        return
                    if source is client:
                        kept += data


def read_strictly(stream: bytes) -> list[Sent]:
    """Read requests off a connection by RFC 9112, without any of its leniencies. Raises AssertionError."""
    found = []
    while stream:
        head, end, stream = stream.partition(b"\r\n\r\n")
        assert end, f"a head without an end: {head!r}"
        start, *lines = head.split(b"\r\n")
        assert not set(head) & {0, 11, 12} and b"\n" not in start and b"\r" not in head.replace(b"\r\n", b""), head
        method, target, version = start.split(b" ")
        assert version == b"HTTP/1.1"
        headers = []
        for line in lines:
            name, colon, value = line.partition(b":")
            assert colon and name and not set(name) & set(b' \t"(),/:;<=>?@[\\]{}\n'), line
            headers.append((name.decode("ascii").lower(), value.strip().decode("latin-1")))
        names = [name for name, _ in headers]
        assert "transfer-encoding" not in names and names.count("host") == 1, head
        lengths = [value for name, value in headers if name == "content-length"]
        assert len(lengths) <= 1 and all(value.isdecimal() for value in lengths), head
        length = int(lengths[0]) if lengths else 0
        assert len(stream) >= length, "a body without an end"
        found.append(Sent(method.decode(), target.decode("latin-1"), tuple(headers), stream[:length]))
        stream = stream[length:]
    return found
