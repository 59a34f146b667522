"""Who gets the token (P8). Who may call the proxy itself is told in `access`."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from urllib.parse import urlsplit

HIDDEN = "<token>"
"""Stands for the token where a replica, or a gate in front of it, repeats what it was sent."""


class Credentials:
    """The bearer token, and which replicas get it (P8). `read` returns the token as its source has it at that time."""

    def __init__(
        self, read: Callable[[], str | None], *, network_group_prefix: str = "", token_over_http: bool = False
    ) -> None:
        self._read = read
        self._network_group_prefix = network_group_prefix
        self._token_over_http = token_over_http
        self._bearers: dict[str, str | None] = {}
        self.token = read()

    def bearer(self, url: str) -> str | None:
        """Return the token if it may go to `url`."""
        if url not in self._bearers:
            allowed = may_carry_token(
                url, network_group_prefix=self._network_group_prefix, token_over_http=self._token_over_http
            )
            self._bearers[url] = self.token if allowed else None
        return self._bearers[url]

    def hidden_in(self, body: bytes) -> bytes:
        """Return what a replica has said without the token in it."""
        return body.replace(self.token.encode("latin-1"), HIDDEN.encode()) if self.token else body

    def has_another_than(self, refused: str | None) -> bool:
        """Return whether there is another token by now than one that was refused. Reads it again to find out."""
        if self.token == refused:
            try:
                self.token = self._read()
            except (OSError, ValueError):
                return False
            self._bearers.clear()
        return self.token != refused

    def __repr__(self) -> str:
        return f"<Credentials token={'set' if self.token else 'unset'}>"


def may_carry_token(url: str, *, network_group_prefix: str = "", token_over_http: bool = False) -> bool:
    """Return whether a bearer token may go to `url`: over https, loopback or the Jobs network group.

    Over any other plain http it could be read on the way, so only `token_over_http` allows it.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    if parts.scheme == "https" or token_over_http or is_loopback(host):
        return True
    # Names of the group are one label behind the prefix; with a dot in it, it could be anybody's domain.
    prefix = network_group_prefix.lower()
    return bool(prefix) and host.startswith(prefix) and "." not in host.removeprefix(prefix)


def is_loopback(host: str) -> bool:
    """Return whether `host` (a name or an address) is this machine itself."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
