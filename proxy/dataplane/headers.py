"""Which headers cross the proxy, and which it adds."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterable

from proxy.contract import version_of
from proxy.fleet.weights import ORIGINAL, SEPARATOR

Headers = list[tuple[bytes, bytes]]

_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection"
    b" te trailer transfer-encoding upgrade".split()
)
"""RFC 9110, section 7.6.1: these belong to one connection."""

_NOT_FORWARDED = _HOP_BY_HOP | {
    *(b"host", b"content-length", b"expect"),
    *(b"authorization", b"cookie", b"x-api-key", b"api-key"),
}
"""The upstream client writes host and length itself. Keys are for the proxy, never for a replica (P8), under whatever
name clients know them: the SDKs of Anthropic and Azure have names of their own."""

_REWRITTEN = _HOP_BY_HOP | {b"content-length", b"date", b"server", b"set-cookie"}
"""What the proxy's own server says in an answer; and cookies, which a gate gives to the proxy's token alone."""

_USUAL_CONNECTIONS = (b"keep-alive", b"close")

_REQUEST_ID = b"x-request-id"

_process = secrets.token_hex(6).encode()
_numbers = itertools.count(1)


def to_replica(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Return the client's headers that a replica gets (their names in lower case, as ASGI has them), and a request id.

    The replica's own token is not among them: `upstream` adds it.
    """
    kept, has_id, named = [], False, frozenset[bytes]()
    for header in headers:
        if header[0] not in _NOT_FORWARDED:
            kept.append(header)
            has_id = has_id or header[0] == _REQUEST_ID
        elif header[0] == b"connection" and header[1].lower() not in _USUAL_CONNECTIONS:
            named |= {name.strip() for name in header[1].lower().split(b",")}
    if named:  # RFC 9110, section 7.6.1, again: what Connection names is not for replicas
        kept = [header for header in kept if header[0] not in named]
        has_id = has_id and _REQUEST_ID not in named
    if not has_id:
        kept.append((_REQUEST_ID, b"%b-%x" % (_process, next(_numbers))))
    return kept


def request_id(headers: Headers) -> str:
    """Return the id of a request, from the headers that its replica gets."""
    return next(value.decode("latin-1") for name, value in headers if name == _REQUEST_ID)


def to_client(
    headers: Iterable[tuple[bytes, bytes]], *, replica: int, route: str, weights: tuple[str | None, ...] = ()
) -> Headers:
    """Return the response headers for the client: the replica's (lower case), and which replica it was and why.

    `weights`: the labels of the base weights that it generated with, where these change at all.
    """
    kept = [header for header in headers if header[0] not in _REWRITTEN]
    kept.append((b"x-proxy-upstream", b"%d" % replica))
    kept.append((b"x-proxy-route", route.encode()))
    if weights:
        kept.append((b"x-policy-version", ",".join(dict.fromkeys(map(_version, weights))).encode("latin-1", "replace")))
    return kept


def _version(label: str | None) -> str:
    """Return what clients are told of a label: the trainer's own number where the policy's name has it, 0 for the
    weights that the servers started with."""
    number, _, name = (label or "").partition(SEPARATOR)
    version = version_of(name)
    return str(version) if version is not None else "0" if label in (None, ORIGINAL) else number
