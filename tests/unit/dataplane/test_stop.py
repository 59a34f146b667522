"""The end of the time to drain: whatever is cancelled then is told why, be it in its body or not even begun."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from proxy.app import _Server
from proxy.fleet.pool import Fleet
from tests.support.waiting import until
from tests.unit.dataplane.serving import Served, echo, post, serving

HALF = post(b"hi")[:-1]


def stopping(served: Served) -> Awaitable[None]:
    """Stop as the proxy does, with a time to drain of 0.2 s."""
    served.config.timeout_graceful_shutdown = 0.2  # type: ignore[assignment]  # uvicorn's waits take fractions
    server = _Server(served.config, Fleet((), clock=lambda: 0.0), request_timeout_s=60)
    server.server_state, server.servers = served.state, []
    server.lifespan = served.config.lifespan_class(served.config)
    return asyncio.ensure_future(server.shutdown())  # noqa: TID251


def told_that_it_stops(said: bytes) -> bool:
    return said.startswith(b"HTTP/1.1 503") and b"x-proxy-error: stopping\r\n" in said.lower()


def test_a_request_that_is_cancelled_while_its_body_comes() -> None:
    async def scenario(served: Served) -> None:
        async with served.client() as (reader, writer):
            writer.write(HALF)
            await until(lambda: bool(served.state.tasks))
            await stopping(served)
            assert told_that_it_stops(await reader.read())

    serving(echo, scenario)


def test_a_request_that_is_cancelled_before_its_first_step() -> None:
    """It arrives in the moment of the cancelling, on a connection that came after all others were told to end."""

    async def scenario(served: Served) -> None:
        stopped = stopping(served)
        await asyncio.sleep(0)
        async with served.client() as (reader, _):
            await until(lambda: bool(served.connections))
            with at_the_cancelling(lambda: served.connections[0].data_received(HALF)):
                await stopped
            assert told_that_it_stops(await reader.read())

    serving(echo, scenario)


@contextmanager
def at_the_cancelling(call: Callable[[], None]) -> Iterator[None]:
    """Call this when uvicorn says that it cancels, which it does just before."""

    def said(record: logging.LogRecord) -> bool:
        if record.msg.startswith("Cancel "):
            call()
        return True

    log = logging.getLogger("uvicorn.error")
    log.addFilter(said)
    try:
        yield
    finally:
        log.removeFilter(said)
