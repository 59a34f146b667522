"""Which headers cross the proxy, and which it adds."""

from __future__ import annotations

import uuid
from collections.abc import Iterable

Headers = list[tuple[bytes, bytes]]

_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection"
    b" te trailer transfer-encoding upgrade".split()
)
"""RFC 9110, section 7.6.1: these belong to one connection."""

_NOT_FORWARDED = _HOP_BY_HOP | {b"host", b"content-length", b"expect", b"authorization", b"cookie"}
"""Authorization is for the proxy, never for a replica (P8); the client library writes the length itself."""

_REWRITTEN = _HOP_BY_HOP | {b"content-length", b"date", b"server"}
"""What the proxy's own server says in an answer."""

REQUEST_ID = b"x-request-id"


def to_replica(headers: Iterable[tuple[bytes, bytes]], *, token: str | None) -> list[tuple[str, str]]:
    """Return the request headers for a replica: the client's, a request id, and the replica's own token."""
    kept = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers if name not in _NOT_FORWARDED]
    if not any(name == REQUEST_ID.decode() for name, _ in kept):
        kept.append((REQUEST_ID.decode(), uuid.uuid4().hex))
    if token is not None:
        kept.append(("authorization", f"Bearer {token}"))
    return kept


def to_client(headers: Iterable[tuple[bytes, bytes]], *, replica: int, route: str) -> Headers:
    """Return the response headers for the client: the replica's, and which replica it was and why."""
    kept = [(name.lower(), value) for name, value in headers]
    kept = [(name, value) for name, value in kept if name not in _REWRITTEN]
    return [*kept, (b"x-proxy-upstream", str(replica).encode()), (b"x-proxy-route", route.encode())]
