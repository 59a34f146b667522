"""The HTTP client of the rollout path, and the only one of this room: a pool of connections for every replica."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from proxy.auth import Credentials
from proxy.dataplane.budget import Account
from proxy.dataplane.connection import Connection
from proxy.dataplane.errors import UpstreamError
from proxy.dataplane.exchange import Exchange
from proxy.dataplane.headers import Headers
from proxy.dataplane.outbox import Outbox
from proxy.dataplane.pool import Pool
from proxy.settings import UpstreamSettings


class Upstream:
    """Sends rollouts to replicas. Made within a running event loop.

    An async context manager; its end breaks off all that is under way.
    """

    def __init__(self, settings: UpstreamSettings, credentials: Credentials) -> None:
        self._settings = settings
        self._credentials = credentials
        self._pools: dict[str, Pool] = {}
        self._outbox = Outbox(asyncio.get_running_loop())

    async def __aenter__(self) -> Upstream:
        return self

    async def __aexit__(self, *_: object) -> None:
        for pool in self._pools.values():
            pool.close()

    def forget_all_but(self, urls: Iterable[str]) -> None:
        """Forget the connections to replicas that have left. Those that still carry something go on to its end."""
        for url in self._pools.keys() - set(urls):
            self._pools.pop(url).keep_none()

    def hidden_in(self, body: bytes) -> bytes:
        """Return an error of a replica without the token, which a gate in front of it may have repeated."""
        return self._credentials.hidden_in(body)

    async def start(
        self,
        url: str,
        method: str,
        target: str,
        headers: Headers,
        body: bytes,
        *,
        account: Account,
        under_way: set[Exchange],
    ) -> tuple[Connection, Exchange]:
        """Send one request to the replica at `url` and return its answer, whose head is there.

        While it is awaited it is among `under_way`, so that others can end it. The caller takes it out there, and
        closes the connection unless the answer is complete, which aborts the request on the replica. Raises
        UpstreamError when there is no answer. Redirects are not followed: the token must not go elsewhere.

        A connection that was used before and dies without a byte was closed by its replica in the moment in which the
        request was sent: then, and only then, the request goes out once more, on a fresh connection. So it does when
        the replica refuses the token and there is another one by now.
        """
        pool = self._pools.get(url) or self._new_pool(url)
        fresh = renewed = False
        while True:
            token = self._credentials.bearer(url)
            head = request_head(pool, token, method, target, headers, len(body))
            connection = await pool.acquire(fresh=fresh)
            exchange = connection.start(head, body, account)
            under_way.add(exchange)
            try:
                await exchange.head()
                refused = exchange.status == 401 and token is not None and not renewed
                if not (refused and self._credentials.has_another_than(token)):
                    return connection, exchange
                renewed = True
                under_way.discard(exchange)
                connection.close()
            except BaseException as error:
                under_way.discard(exchange)
                closed_on_us = connection.used and not connection.is_open and exchange.answered_at is None
                connection.close()
                if fresh or not closed_on_us or not isinstance(error, UpstreamError):
                    raise
                fresh = True

    def _new_pool(self, url: str) -> Pool:
        limit, timeout_s = self._settings.conn_limit, self._settings.connect_timeout_s
        self._pools[url] = Pool(url, limit=limit, connect_timeout_s=timeout_s, outbox=self._outbox)
        return self._pools[url]


def request_head(pool: Pool, token: str | None, method: str, target: str, headers: Headers, length: int) -> bytes:
    """Return the head of a request to the replica of `pool`, as it is sent. Alone says where it ends: its length."""
    lines = [f"{method} {pool.base_path}{target} HTTP/1.1\r\n".encode("latin-1"), pool.own_headers]
    if token is not None:
        lines.append(b"\r\nauthorization: Bearer " + token.encode("latin-1"))
    lines += [b"\r\n%b: %b" % header for header in headers]
    lines.append(b"\r\ncontent-length: %d\r\n\r\n" % length)
    return b"".join(lines)
