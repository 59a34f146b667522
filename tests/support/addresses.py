"""Addresses of this machine."""

from __future__ import annotations

import socket
from contextlib import closing


def own_address() -> str | None:
    """Return an address of this machine that is not loopback, None if it has none. Nothing is sent."""
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        try:
            probe.connect(("198.51.100.1", 9))  # TEST-NET-2; a UDP socket sends nothing by this
        except OSError:
            return None
        address = str(probe.getsockname()[0])
    return None if address.startswith("127.") else address
