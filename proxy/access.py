"""Who may call the proxy: its keys, and what each is good for. `dataplane.door` asks for them. Pure.

What clients send in Authorization is for the proxy alone and never goes further (`dataplane.headers`).
"""

from __future__ import annotations

import re
from base64 import b64decode
from collections.abc import Iterable
from secrets import compare_digest

from proxy.auth import is_loopback

OPEN_PATHS = frozenset(["/health", "/ping", "/proxy/live", "/proxy/ready"])
"""Need no key: who asks whether the proxy is up (orchestrators, load balancers) rarely can send one."""

_HOST = re.compile(r"(\[(?P<address>[0-9A-Fa-f:.]+)\]|(?P<name>[\w.-]+))(:\d*)?")
"""Host, as RFC 9110, section 7.2, has it; what is looser lets readers disagree on whom it names."""


class Keys:
    """The keys that the proxy asks for: one of `api` (if there are none, it asks for none), `admin` for the fleet."""

    def __init__(self, api: Iterable[str] = (), admin: str | None = None) -> None:
        self._api = tuple(key.encode() for key in api)
        self._admin = admin.encode() if admin else None
        self._admitted = (*self._api, *([self._admin] if self._admin else []))
        self._bearers = tuple(b"Bearer " + key for key in self._admitted)

    def __repr__(self) -> str:
        return f"<Keys api={len(self._api)} admin={'set' if self.has_admin else 'unset'}>"

    @property
    def asked(self) -> bool:
        """Whether callers need a key at all."""
        return bool(self._api)

    @property
    def has_admin(self) -> bool:
        """Whether changing the fleet needs a key of its own."""
        return self._admin is not None

    def admit(self, authorization: bytes) -> bool:
        """Return whether this value of Authorization holds one of the keys, as a bearer token or as Basic's password.

        In constant time: every key is compared, whichever it is. The usual spelling is compared as it stands, because
        every rollout comes through here.
        """
        return _is_one(authorization, self._bearers) or _is_one(_given(authorization), self._admitted)

    def admit_admin(self, authorization: bytes) -> bool:
        """Return whether it holds the admin key as a bearer token.

        Not as a password: browsers send that along with whatever another site asks of the proxy.
        """
        is_bearer = authorization[:6].lower() == b"bearer"
        return self._admin is not None and is_bearer and compare_digest(_given(authorization), self._admin)


def _is_one(given: bytes, known: tuple[bytes, ...]) -> bool:
    found = False
    for one in known:
        found |= compare_digest(given, one)
    return found


def _given(authorization: bytes) -> bytes:
    """Return the key in a value of Authorization; empty if there is none (RFC 6750, RFC 7617)."""
    scheme, _, rest = authorization.partition(b" ")
    scheme = scheme.lower()
    if scheme == b"bearer":
        return rest.strip()
    if scheme == b"basic":
        try:
            return b64decode(rest, validate=True).partition(b":")[2]
        except ValueError:
            return b""
    return b""


def refuse_admin(keys: Keys, *, peer: str, authorization: bytes, host: str, origin: str | None) -> str | None:
    """Return why a caller may not change the fleet, and what to do; None if it may.

    `peer` is its address, `host` and `origin` are what it sent under these names. Without an admin key only this
    machine may, but no page that a browser on it has open: it tells the page's Origin, and under which name it came.
    """
    if keys.has_admin:
        return None if keys.admit_admin(authorization) else "send PROXY_ADMIN_KEY as a bearer token"
    remedy = "set PROXY_ADMIN_KEY on the proxy, and send it as a bearer token"
    if not is_loopback(peer):
        return f"without PROXY_ADMIN_KEY it is for the proxy's own machine alone, and this came from {peer}; {remedy}"
    if origin is not None or (host and not is_loopback(_name_in(host))):
        return f"without PROXY_ADMIN_KEY no web page may do it; call http://127.0.0.1 without one, or {remedy}"
    return None


def is_cross_site(method: str, *, origin: bytes, host: bytes) -> bool:
    """Return whether a page of another site is behind a call that may change something.

    Browsers send such a call with what they know, a Basic password among it, and no key protects a keyless proxy on
    loopback from pages that its user opens. Only browsers send Origin, and they send it with all but GET and HEAD.
    """
    return method not in ("GET", "HEAD") and origin.partition(b"://")[2] != host


def exposure(address: str, keys: Keys) -> str | None:
    """Return who can do what through a proxy that listens on `address` without a key; None if no one elsewhere can."""
    if keys.asked or is_loopback(address):
        return None
    admins = "who has PROXY_ADMIN_KEY" if keys.has_admin else "this machine"
    return (
        f"PROXY_API_KEY is not set, and the proxy listens on {address}: whoever reaches it can generate, load and "
        f"unload adapters, pause, and overwrite base weights; only {admins} may add, remove and reload replicas. "
        "Set PROXY_API_KEY; for TRL, which sends no key, let nobody else reach the port (PROXY_HOST=127.0.0.1, or a "
        "network of its own). PROXY_REQUIRE_KEY=1 refuses to start like this."
    )


def _name_in(host: str) -> str:
    """Return the name or address in a Host header, without its port; empty for what is no such header."""
    found = _HOST.fullmatch(host)
    return (found["address"] or found["name"]).lower() if found else ""
