"""The client against replicas that misbehave, over real sockets: each test scripts what its replica says."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop

from proxy.auth import Credentials
from proxy.dataplane.budget import Account, Budget
from proxy.dataplane.errors import UpstreamError
from proxy.dataplane.exchange import Exchange
from proxy.dataplane.upstream import Upstream
from proxy.settings import UpstreamSettings
from tests.support.waiting import at_rest, until

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter, int], Awaitable[None]]

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
HOLD = 1 << 24
LIMIT_S = 5


class Replica:
    """A server that runs `script` for every connection, which gets the connection's number (from 1)."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.connections = 0
        self.closed = 0
        """Connections that the client has closed."""
        self._serving: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> Replica:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 20)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.sleep(0.01)  # what the kernel has accepted becomes a task first; a closed server would lose it
        self._server.close()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        self.connections += 1
        try:
            await self._script(reader, writer, self.connections)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.closed += 1
        finally:
            self._serving.discard(task)
            writer.transport.abort() if task.cancelling() else writer.close()


async def request(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Read one request: head and body."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    return head, await reader.readexactly(length)


async def polite(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _: int) -> None:
    """Answer every request on a connection."""
    while True:
        await request(reader)
        writer.write(OK)


async def ask(upstream: Upstream, url: str, body: bytes = b"{}") -> bytes | None:
    async with sent(upstream, url, body) as answer:
        return await answer.read(HOLD)


@asynccontextmanager
async def sent(upstream: Upstream, url: str, body: bytes = b"{}") -> AsyncIterator[Exchange]:
    """Send a request as the relay does, and close its connection unless its answer has been read whole."""
    under_way: set[Exchange] = set()
    connection, answer = await upstream.start(
        url,
        "POST",
        "/v1/completions?x=1",
        [(b"content-type", b"application/json")],
        body,
        account=Account(Budget(1 << 30)),
        under_way=under_way,
    )
    assert under_way == {answer}
    try:
        yield answer
    finally:
        if not answer.complete:
            connection.close()


def run(
    scenario: Callable[[Upstream], Awaitable[Any]], *, read: Callable[[], str | None] = lambda: None, **settings: Any
) -> Any:
    """Run `scenario` with a client of its own, within a limit. `read` gives the token."""

    async def limited() -> Any:
        credentials = Credentials(read)
        async with Upstream(UpstreamSettings(**settings), credentials) as upstream, asyncio.timeout(LIMIT_S):
            return await scenario(upstream)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as the proxy itself runs
        return runner.run(limited())


def test_the_request_arrives_whole() -> None:
    seen: list[tuple[bytes, bytes]] = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _: int) -> None:
        seen.append(await request(reader))
        writer.write(OK)

    async def scenario(upstream: Upstream) -> None:
        async with Replica(script) as replica:
            assert await ask(upstream, replica.url, b"x" * 3_000_000) == b"ok"
            host = replica.url.removeprefix("http://").encode()
            head = [b"POST /v1/completions?x=1 HTTP/1.1", b"host: " + host]
            head += [b"content-type: application/json", b"content-length: 3000000"]
            assert seen == [(b"\r\n".join(head) + b"\r\n\r\n", b"x" * 3_000_000)]

    run(scenario)


def test_a_connection_is_used_again() -> None:
    async def scenario(upstream: Upstream) -> None:
        async with Replica(polite) as replica:
            for _ in range(5):
                assert await ask(upstream, replica.url) == b"ok"
            assert replica.connections == 1

    run(scenario)


def test_connections_stay_below_the_bound_and_everyone_is_served() -> None:
    async def scenario(upstream: Upstream) -> None:
        async with Replica(polite) as replica:
            answers = await asyncio.gather(*(ask(upstream, replica.url) for _ in range(100)))
            assert answers == [b"ok"] * 100
            assert replica.connections <= 4

    run(scenario, conn_limit=4)


def test_waiters_that_give_up_lose_no_connection() -> None:
    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _: int) -> None:
        while True:
            await request(reader)
            await asyncio.sleep(0.002)
            writer.write(OK)

    async def scenario(upstream: Upstream) -> None:
        async with Replica(slow) as replica:
            for round_ in range(20):
                tasks = [asyncio.ensure_future(ask(upstream, replica.url)) for _ in range(8)]  # noqa: TID251
                await asyncio.sleep(0.001 * (round_ % 5))
                for task in tasks[::2]:
                    task.cancel()
                results = await asyncio.gather(*tasks, return_exceptions=True)
                assert all(r == b"ok" or isinstance(r, asyncio.CancelledError) for r in results), results
            assert await ask(upstream, replica.url) == b"ok"

    run(scenario, conn_limit=2)


def test_a_used_connection_that_died_is_replaced_once() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        await request(reader)
        writer.write(OK)
        if number == 1:
            await request(reader)  # takes the second request and closes without a word

    async def scenario(upstream: Upstream) -> None:
        async with Replica(script) as replica:
            assert await ask(upstream, replica.url) == b"ok"
            assert await ask(upstream, replica.url) == b"ok"
            assert replica.connections == 2

    run(scenario)


def test_a_used_connection_that_died_is_replaced_by_a_new_one_at_the_bound_too() -> None:
    """Each connection carries one answer and dies silently under the next request, as gates do that end connections."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _: int) -> None:
        await request(reader)
        writer.write(OK)
        await request(reader)

    async def scenario(upstream: Upstream) -> None:
        async with Replica(script) as replica:
            answers = await asyncio.gather(*(ask(upstream, replica.url) for _ in range(20)))
            assert answers == [b"ok"] * 20

    run(scenario, conn_limit=2)


def test_a_fresh_connection_that_dies_is_an_error() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _: int) -> None:
        await request(reader)

    async def scenario(upstream: Upstream) -> None:
        async with Replica(script) as replica:
            with pytest.raises(UpstreamError, match="before it answered") as caught:
                await ask(upstream, replica.url)
            assert not caught.value.unreachable
            assert replica.connections == 1

    run(scenario)


def test_an_answer_that_has_begun_is_never_asked_for_again() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _: int) -> None:
        await request(reader)
        writer.write(OK)
        await request(reader)
        writer.write(b"HTTP/1.1 2")
        await writer.drain()

    async def scenario(upstream: Upstream) -> None:
        async with Replica(script) as replica:
            assert await ask(upstream, replica.url) == b"ok"
            with pytest.raises(UpstreamError, match="in the middle"):
                await ask(upstream, replica.url)
            assert replica.connections == 1

    run(scenario)


def test_a_connection_that_the_replica_closed_is_not_used() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _: int) -> None:
        await request(reader)
        writer.write(OK)

    async def scenario(upstream: Upstream) -> None:
        async with Replica(script) as replica:
            for _ in range(3):
                assert await ask(upstream, replica.url) == b"ok"
                await asyncio.sleep(0)
            assert replica.connections == 3

    run(scenario)


def test_words_on_an_idle_connection_end_it() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        await request(reader)
        writer.write(OK)
        if number == 1:
            await writer.drain()
            writer.write(b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\n\r\n")
        await request(reader)
        writer.write(OK)

    async def scenario(upstream: Upstream) -> None:
        async with Replica(script) as replica:
            assert await ask(upstream, replica.url) == b"ok"
            await until(lambda: replica.closed == 1)
            assert await ask(upstream, replica.url) == b"ok"
            assert replica.connections == 2

    run(scenario)


def test_a_port_where_nobody_listens_is_unreachable() -> None:
    async def scenario(upstream: Upstream) -> None:
        async with Replica(polite) as replica:
            url = replica.url
        with pytest.raises(UpstreamError, match="no connection") as caught:
            await ask(upstream, url)
        assert caught.value.unreachable

    run(scenario)


def test_leaving_early_closes_the_connection() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _: int) -> None:
        await request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n")
        await reader.readexactly(1)

    async def scenario(upstream: Upstream) -> None:
        async with Replica(script) as replica:
            async with sent(upstream, replica.url) as answer:
                assert await answer.chunk() == b"hi"
            await until(lambda: replica.closed == 1)

    run(scenario)


@pytest.mark.parametrize("moment", ["connecting", "head", "body"])
def test_cancelling_at_any_moment_closes_the_connection(moment: str) -> None:
    reached = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _: int) -> None:
        await request(reader)
        if moment == "body":
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf")
        await writer.drain()
        reached.set()
        await reader.readexactly(1)

    async def scenario(upstream: Upstream) -> None:
        async with Replica(script) as replica:
            task = asyncio.ensure_future(ask(upstream, replica.url))  # noqa: TID251
            if moment != "connecting":
                await reached.wait()
            else:
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await until(lambda: replica.closed == replica.connections)
            assert "open=0 idle=0 waiting=0" in repr(next(iter(upstream._pools.values())))

    run(scenario)


def test_a_slow_reader_holds_back_the_replica() -> None:
    written = 0
    gate = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _: int) -> None:
        nonlocal written
        await request(reader)
        writer.transport.set_write_buffer_limits(high=0)
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(400):
            writer.write(b"10000\r\n" + b"x" * 65_536 + b"\r\n")
            await writer.drain()
            written += 65_536
        writer.write(b"0\r\n\r\n")
        gate.set()

    async def scenario(upstream: Upstream) -> None:
        async with Replica(script) as replica:
            async with sent(upstream, replica.url) as answer:
                await at_rest(lambda: written)
                assert not gate.is_set()
                assert answer.buffered <= 256 * 1024
                received = 0
                while chunk := await answer.chunk():
                    received += len(chunk)
            assert received == 400 * 65_536 and gate.is_set()

    run(scenario)


def test_redirects_are_not_followed() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _: int) -> None:
        await request(reader)
        writer.write(b"HTTP/1.1 307 Temporary Redirect\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n")

    async def scenario(upstream: Upstream) -> None:
        async with (
            Replica(script) as replica,
            sent(upstream, replica.url) as answer,
        ):
            assert answer.status == 307
            assert await answer.read(HOLD) == b""

    run(scenario)


@pytest.mark.parametrize(("renewed", "said"), [(True, b"ok"), (False, b"no")])
def test_a_refused_request_goes_out_once_more_if_the_token_was_renewed(renewed: bool, said: bytes) -> None:
    seen: list[bytes] = []

    async def gate(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _: int) -> None:
        while True:
            head, _body = await request(reader)
            seen.append(head.partition(b"authorization: Bearer ")[2].partition(b"\r\n")[0])
            writer.write(OK if seen[-1] == b"new" else OK.replace(b"200 OK", b"401 No").replace(b"ok", b"no"))

    async def scenario(upstream: Upstream) -> None:
        async with Replica(gate) as replica:
            for _ in range(2):
                assert await ask(upstream, replica.url) == said

    tokens = iter(["old", *(["new"] * 5 if renewed else ["old"] * 5)])
    run(scenario, read=lambda: next(tokens))
    assert seen == ([b"old", b"new", b"new"] if renewed else [b"old", b"old"])


def test_what_a_replica_that_has_left_still_carries_goes_on() -> None:
    async def scenario(upstream: Upstream) -> None:
        async with Replica(polite) as replica:
            await ask(upstream, replica.url)
            async with sent(upstream, replica.url) as answer:
                upstream.forget_all_but([])
                assert await answer.read(HOLD) == b"ok"
            assert replica.connections == 1
            await until(lambda: replica.closed == 1)
            assert await ask(upstream, replica.url) == b"ok"
            assert replica.connections == 2, "it has come back, and begins anew"
            upstream.forget_all_but([])
            await until(lambda: replica.closed == 2)

    run(scenario)


def test_a_replica_that_resets_at_the_door_is_unreachable_and_takes_no_room() -> None:
    def reset(connection: socket.socket) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()

    async def scenario(upstream: Upstream) -> None:
        loop = asyncio.get_running_loop()
        with socket.create_server(("127.0.0.1", 0), backlog=256) as listener:
            listener.setblocking(False)
            loop.add_reader(listener, lambda: reset(listener.accept()[0]))
            for _ in range(200):  # more than there is room for
                with pytest.raises(UpstreamError):
                    await ask(upstream, f"http://127.0.0.1:{listener.getsockname()[1]}")
            loop.remove_reader(listener)

    run(scenario, conn_limit=2)
