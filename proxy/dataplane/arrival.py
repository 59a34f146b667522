"""How a request may arrive: its head within a size, all of it within a time.

A request line or header of any length would be kept in memory, and a client that sends a byte now and then would hold
its connection, and what it has sent so far, for ever.
"""

from __future__ import annotations

from proxy.errors import ApiError

MAX_HEAD_BYTES = 32 * 1024
"""Request line and headers. Clients send less than 2 KB; nginx, too, takes 32 KB at most. As much may stand between two
pieces of a body, and behind it: extensions and trailers, which nobody sends."""

BYTES_PER_WAIT = 1024 * 1024
"""Each MB that has come gives a body as much time again: 17 KB/s are enough, a byte now and then is not."""


class Arrival:
    """The request that is arriving on a connection."""

    __slots__ = ("came", "came_of_body", "in_head", "since")

    def __init__(self, now: float) -> None:
        self.since: float | None = now
        """When it began, on the event loop's clock; None while none is arriving."""
        self.came = 0
        """Bytes of it so far."""
        self.came_of_body = 0
        """As many as there were when the last piece of its body came; what has come since is no body."""
        self.in_head = False

    def begin(self, now: float) -> None:
        """Note that it begins, unless it has begun."""
        if self.since is None:
            self.since = now

    def end(self) -> None:
        """Note that it is there."""
        self.since, self.came, self.came_of_body = None, 0, 0

    def wait(self, seconds: float) -> None:
        """Allow for a time in which it was not read on."""
        if self.since is not None:
            self.since += seconds

    def late(self, now: float, limit_s: float, *, refused: bool) -> ApiError | None:
        """Return what to say if it has not arrived in `limit_s`, and once more so long for each MB.

        `refused`: it has its answer, so that no more time is given to its body.
        """
        waits = 1 if refused else 1 + self.came // BYTES_PER_WAIT
        if self.since is None or now - self.since <= waits * limit_s:
            return None
        message = f"The request has not arrived within {waits * limit_s:g} s (PROXY_REQUEST_TIMEOUT_S)."
        return ApiError(408, message, reason="too_slow", type="Request Timeout")


def not_http() -> ApiError:
    """Return the answer to what is not a request."""
    return ApiError(400, "Invalid HTTP request received.", reason="bad_http", type="Bad Request")


def no_upgrade() -> ApiError:
    """Return the answer to a request for another protocol."""
    message = "The proxy switches to no other protocol: send the request without Upgrade, and not as CONNECT."
    return ApiError(400, message, reason="upgrade", type="Bad Request")


def head_too_large() -> ApiError:
    """Return the answer to a request whose head is above MAX_HEAD_BYTES."""
    message = f"The request line and headers, or trailers, are larger than {MAX_HEAD_BYTES} bytes."
    return ApiError(431, message, reason="head_too_large", type="Request Header Fields Too Large")
