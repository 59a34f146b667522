"""Replicas behind one host name: every address that it has is one.

A name that does not resolve is a failed lookup, also where the server says that there is no such name: so answers a
service without ready pods as well, and replicas that are gone get no rollouts anyway, since they fail their probes.
"""

from __future__ import annotations

import socket

from proxy.discovery.listing import Listing, LookupFailed
from proxy.sources import DnsSource
from proxy.threads import in_daemon_thread


class DnsLookup:
    """Resolves the name with the system's resolver, every time anew."""

    def __init__(self, source: DnsSource) -> None:
        self._source = source

    async def __call__(self) -> Listing:
        """Return a replica for every A and AAAA record."""
        return Listing(dict.fromkeys(await in_daemon_thread(self._resolve), ""))

    def _resolve(self) -> list[str]:
        host, port = self._source.host, self._source.port
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise LookupFailed(f"{host} does not resolve: {error}") from None
        return sorted({url_of(str(address[0]), port) for *_, address in found})


def url_of(address: str, port: int) -> str:
    """Return the URL of a server at an IP address."""
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"
