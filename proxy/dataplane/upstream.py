"""The HTTP client of the rollout path. A failed exchange is an UpstreamError; `relay` decides what follows."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp
from yarl import URL

from proxy.auth import may_carry_token
from proxy.settings import UpstreamSettings


class UpstreamError(Exception):
    """A replica did not answer, or its answer broke off. Says what happened, not where."""

    def __init__(self, error: BaseException, *, unreachable: bool = False) -> None:
        super().__init__(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
        self.unreachable = unreachable
        """Whether not even a connection could be made."""


@dataclass(frozen=True)
class Answer:
    """The head of a replica's answer; the body follows from `chunks` or `read`."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    _response: aiohttp.ClientResponse

    @property
    def is_stream(self) -> bool:
        """Whether this is a stream of server-sent events."""
        return self._response.content_type == "text/event-stream"

    async def read(self) -> bytes:
        """Return the whole body. Raises UpstreamError if it breaks off."""
        try:
            return await self._response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise UpstreamError(error) from error

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives. Raises UpstreamError if it breaks off."""
        try:
            async for chunk in self._response.content.iter_any():
                yield chunk
        except (aiohttp.ClientError, TimeoutError) as error:
            raise UpstreamError(error) from error


class Upstream:
    """Connections to all replicas. An async context manager."""

    def __init__(self, settings: UpstreamSettings) -> None:
        self._settings = settings
        self._secret = settings.token.get_secret_value() if settings.token else None

    async def __aenter__(self) -> Upstream:
        connector = aiohttp.TCPConnector(
            limit=0,
            limit_per_host=self._settings.conn_limit,
            # vLLM's uvicorn closes a connection that was idle for 5 s; leave well before it, since both loops may lag.
            keepalive_timeout=2.0,
        )
        # A rollout takes as long as it takes: only connecting is limited.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._settings.connect_timeout_s)
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=timeout,
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            cookie_jar=aiohttp.DummyCookieJar(),
            read_bufsize=64 * 1024,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    def token_for(self, url: str) -> str | None:
        """Return the token if it may go to `url` (P8)."""
        allowed = may_carry_token(
            url,
            network_group_prefix=self._settings.network_group_prefix,
            token_over_http=self._settings.token_over_http,
        )
        return self._secret if allowed else None

    @asynccontextmanager
    async def send(
        self, method: str, url: str, *, headers: list[tuple[str, str]], body: bytes
    ) -> AsyncIterator[Answer]:
        """Send one request and yield the head of the answer. Leaving early closes the connection.

        Raises UpstreamError when there is no answer. Redirects are not followed: the token must not go elsewhere.
        """
        try:
            response = await self._session.request(
                method, URL(url, encoded=True), headers=headers, data=body, allow_redirects=False
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise UpstreamError(error, unreachable=True) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise UpstreamError(error) from error
        try:
            yield Answer(response.status, response.raw_headers, response)
        finally:
            # A body that was read to its end has already given its connection back; any other is of no use.
            response.close()
