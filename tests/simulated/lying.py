"""A replica, or a gate before it, that does as it likes: sends the proxy elsewhere, or repeats what it was sent."""

from __future__ import annotations

import json
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.simulated.flaky import FlakyReplica

SESSION = "session=of-the-gate"
"""A cookie with which the gate would know the proxy again; its clients are not to have it."""


@dataclass(frozen=True)
class Lie:
    """An answer to one kind of call, in place of the right one."""

    status: int
    location: str | None = None
    repeats: bool = False
    """Whether its body holds every header that came in."""


class LyingReplica(FlakyReplica):
    """Answers rightly, except to the calls in `lies` ("METHOD /path")."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        super().__init__(host)
        self.lies: dict[str, Lie] = {}
        self.told = 0
        """Lies so far."""
        self.authorizations: set[str | None] = set()
        self.hosts: set[str | None] = set()
        """Every value that came in under these names."""

    def _answer(self, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        self.authorizations.add(handler.headers["Authorization"])
        self.hosts.add(handler.headers["Host"])
        lie = self.lies.get(f"{handler.command} {handler.path.partition('?')[0]}")
        if lie is None:
            super()._answer(handler, body)
            return
        self.told += 1
        message = " ".join(f"{name}: {value}" for name, value in handler.headers.items()) if lie.repeats else "no"
        content = json.dumps({"error": {"message": message, "type": "x", "param": None, "code": lie.status}}).encode()
        handler.send_response(lie.status)
        if lie.location is not None:
            handler.send_header("Location", lie.location)
            handler.send_header("Refresh", f"0; url={lie.location}")
        handler.send_header("Set-Cookie", SESSION)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content)
