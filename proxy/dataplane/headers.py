"""Which headers cross the proxy, and which it adds."""

from __future__ import annotations

import secrets
from collections.abc import Iterable

Headers = list[tuple[bytes, bytes]]

_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection"
    b" te trailer transfer-encoding upgrade".split()
)
"""RFC 9110, section 7.6.1: these belong to one connection."""

_NOT_FORWARDED = _HOP_BY_HOP | {b"host", b"content-length", b"expect", b"authorization", b"cookie"}
"""Authorization is for the proxy, never for a replica (P8); the upstream client writes host and length itself."""

_REWRITTEN = _HOP_BY_HOP | {b"content-length", b"date", b"server"}
"""What the proxy's own server says in an answer."""

_REQUEST_ID = b"x-request-id"


def to_replica(headers: Iterable[tuple[bytes, bytes]], *, token: str | None) -> Headers:
    """Return the request headers for a replica: the client's, a request id, and the replica's own token."""
    kept = [header for header in headers if header[0] not in _NOT_FORWARDED]
    if not any(name == _REQUEST_ID for name, _ in kept):
        kept.append((_REQUEST_ID, secrets.token_hex(16).encode()))
    if token is not None:
        kept.append((b"authorization", b"Bearer " + token.encode("latin-1")))
    return kept


def to_client(headers: Iterable[tuple[bytes, bytes]], *, replica: int, route: str) -> Headers:
    """Return the response headers for the client: the replica's, and which replica it was and why."""
    kept = [(lower, value) for name, value in headers if (lower := name.lower()) not in _REWRITTEN]
    kept.append((b"x-proxy-upstream", b"%d" % replica))
    kept.append((b"x-proxy-route", route.encode()))
    return kept
