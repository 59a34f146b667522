"""What clients get through the server protocol, on real sockets: ways of asking, and ways of answers to fail."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import weakref
from contextlib import suppress
from contextvars import ContextVar
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from proxy.dataplane import server_protocol
from proxy.dataplane.budget import Account
from proxy.dataplane.client_request import ClientRequest
from proxy.dataplane.server_protocol import MAX_WAITING, UNREAD_S, UNREAD_TIGHT_S, close_late
from tests.support.waiting import at_rest, until
from tests.unit.dataplane.serving import BUDGET_BYTES, CLOSE, LIMIT_S, Served, echo, head, part, post, serving


def answers(raw: bytes) -> list[bytes]:
    """Return the answers in `raw`, without their heads."""
    return [answer.partition(b"\r\n\r\n")[2] for answer in raw.split(b"HTTP/1.1 ")[1:]]


def test_a_connection_carries_one_request_after_the_other() -> None:
    async def scenario(served: Served) -> None:
        async with served.client() as (reader, writer):
            for body in (b"one", b"two"):
                writer.write(post(body))
                assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK\r\n")
                assert await reader.readexactly(3) == body

    serving(echo, scenario)


def test_requests_that_come_together_are_answered_in_their_order() -> None:
    async def scenario(served: Served) -> None:
        raw = b"".join(post(b"%d" % number) for number in range(50)) + post(b"end", CLOSE)
        assert answers(await served.say(raw)) == [b"%d" % number for number in range(50)] + [b"end"]

    serving(echo, scenario)


def test_what_a_request_sets_in_its_context_is_its_own() -> None:
    """The spans of traces go by it, also those of what is served right after it."""
    seen: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(SET.get())
        SET.set("by the one before")
        await echo(scope, receive, send)

    async def scenario(served: Served) -> None:
        await served.say(post(b"one") + post(b"two") + post(b"three", CLOSE))

    serving(app, scenario)
    assert seen == ["by nobody"] * 3


SET = ContextVar("SET", default="by nobody")


def test_more_requests_than_may_wait_are_not_kept() -> None:
    go_on = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await go_on.wait()
        await echo(scope, receive, send)

    async def scenario(served: Served) -> None:
        async with served.client() as (reader, writer):
            writer.write(b"GET / HTTP/1.1\r\n\r\n" * 5000)
            await until(lambda: bool(served.state.tasks))
            gc.collect()
            assert sum(isinstance(kept, ClientRequest) for kept in gc.get_objects()) <= 1 + MAX_WAITING
            go_on.set()
            assert answers(await reader.read()) == [b""] * (1 + MAX_WAITING)

    serving(app, scenario)


@pytest.mark.parametrize("more", [b"\r\n", b"GET / HTTP/1.1\r\nhost: p\r\n\r\n"])
def test_what_follows_the_last_request_is_not_served(more: bytes) -> None:
    async def scenario(served: Served) -> None:
        assert answers(await served.say(post(b"hi", CLOSE) + more)) == [b"hi"]

    serving(echo, scenario)


BROKEN_BODY = b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nno size\r\n"


@pytest.mark.parametrize("broken", [b"what?\r\n", BROKEN_BODY])
def test_what_came_whole_before_something_broken_is_answered(broken: bytes) -> None:
    async def scenario(served: Served) -> None:
        assert answers(await served.say(post(b"one") + post(b"two") + broken + post(b"three"))) == [b"one", b"two"]

    serving(echo, scenario)


def test_a_broken_request_behind_another_is_refused_once() -> None:
    """However often one looks: what else waits is still answered, and the loop that looks lives."""
    go_on = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        with suppress(TimeoutError):
            await asyncio.wait_for(receive(), 0.01)  # which has the connection read from again
        await go_on.wait()
        await send(head(2))
        await send(part(b"ok", more=False))

    async def scenario(served: Served) -> None:
        async with served.client() as (reader, writer):
            writer.write(post(b"one") + post(b"two") + BROKEN_BODY)
            await until(lambda: bool(served.state.tasks))
            now = asyncio.get_running_loop().time()
            for seconds in (100, 200, 300):
                await asyncio.sleep(0)
                close_late(served.connections, now + seconds, limit_s=1)
            go_on.set()
            assert answers(await reader.read()) == [b"ok", b"ok"]

    serving(app, scenario)


def test_a_long_body_comes_whole() -> None:
    async def scenario(served: Served) -> None:
        body = bytes(range(256)) * 40_000
        assert answers(await served.say(post(body, CLOSE))) == [body]

    serving(echo, scenario)


def test_a_chunked_body_comes_whole_and_without_its_trailers() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await echo(scope, receive, send)
        assert b"x-late" not in dict(scope["headers"])

    async def scenario(served: Served) -> None:
        raw = b"POST / HTTP/1.1\r\nhost: p\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
        assert answers(await served.say(raw + b"2\r\nhi\r\n1\r\n!\r\n0\r\nx-late: 1\r\n\r\n")) == [b"hi!"]

    serving(app, scenario)


ENDLESS = {"trailer": b"0\r\nx-late: ", "extension": b"1;extension=", "trailers": b"0\r\n"}


@pytest.mark.parametrize("endless", ENDLESS.values(), ids=ENDLESS)
def test_what_comes_around_a_body_is_bounded(endless: bytes) -> None:
    """The parser keeps a header until it is whole, and trailers are headers."""

    async def scenario(served: Served) -> None:
        async with served.client() as (reader, writer):
            writer.write(b"POST / HTTP/1.1\r\nhost: p\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n" + endless)
            for _ in range(100):
                writer.write(b"x" * 10_000 if endless != b"0\r\n" else b"x: y\r\n" * 1000)
            assert (await reader.read(300)).startswith(b"HTTP/1.1 431 ")

    serving(echo, scenario)


def test_headers_count_with_what_separates_them() -> None:
    """Tens of thousands of them would be taken otherwise, if they come at once."""

    async def scenario(served: Served) -> None:
        raw = b"GET / HTTP/1.1\r\nhost: p\r\nconnection: close\r\n" + b"x:\r\n" * 20_000 + b"\r\n"
        assert (await served.say(raw)).startswith(b"HTTP/1.1 431 ")

    serving(echo, scenario)


def test_a_body_in_the_smallest_pieces_comes_whole() -> None:
    async def scenario(served: Served) -> None:
        raw = b"POST / HTTP/1.1\r\nhost: p\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
        assert answers(await served.say(raw + b"1\r\n.\r\n" * 50_000 + b"0\r\n\r\n")) == [b"." * 50_000]

    serving(echo, scenario)


def test_a_client_that_asks_whether_to_go_on_is_told_once() -> None:
    async def scenario(served: Served) -> None:
        async with served.client() as (reader, writer):
            whole = post(b"hi", b"expect: 100-continue", CLOSE)
            writer.write(whole[:-2])
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(b"hi")
            said = await reader.read()
            assert said.startswith(b"HTTP/1.1 200") and answers(said) == [b"hi"]

    serving(echo, scenario)


def test_a_client_of_http_1_0_is_not_told_to_go_on() -> None:
    """It would take that for the answer (RFC 9110, section 10.1.1)."""

    async def scenario(served: Served) -> None:
        assert (await served.say(post(b"hi", b"expect: 100-continue", version=b"1.0"))).startswith(b"HTTP/1.1 200")

    serving(echo, scenario)


def test_a_client_of_http_1_0_gets_a_body_that_ends_with_the_connection() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for message in (head(), part(b"he"), part(b"llo"), part(b"", more=False)):
            await send(message)

    async def scenario(served: Served) -> None:
        said = await served.say(post(b"", version=b"1.0"))
        assert answers(said) == [b"hello"] and b"chunked" not in said

    serving(app, scenario)


@pytest.mark.parametrize(("method", "status"), [("HEAD", 200), ("GET", 204), ("GET", 304)])
def test_an_answer_without_a_body_has_none(method: str, status: int) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(head(5 if method == "HEAD" else None, status))
        await send(part(b"hello" if method == "HEAD" else b"", more=False))

    async def scenario(served: Served) -> None:
        raw = f"{method} / HTTP/1.1\r\nhost: p\r\n\r\n".encode()
        said = await served.say(raw + raw.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
        assert answers(said) == [b"", b""] and b"chunked" not in said
        assert said.count(b"content-length: 5") == (2 if method == "HEAD" else 0)

    serving(app, scenario)


@pytest.mark.parametrize("status", [299, 499, 529, 599, 999])
def test_an_answer_may_have_a_status_that_python_knows_no_name_of(status: int) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(head(2, status))
        await send(part(b"ok", more=False))

    async def scenario(served: Served) -> None:
        said = await served.say(post(b"", CLOSE))
        assert said.startswith(b"HTTP/1.1 %d \r\n" % status) and answers(said) == [b"ok"]

    serving(app, scenario)


def test_the_head_of_a_stream_comes_before_its_first_bytes() -> None:
    """A browser that listens for events must see that it is connected."""
    seen = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(head())
        await seen.wait()
        await send(part(b"data: 1\n\n", more=False))

    async def scenario(served: Served) -> None:
        async with served.client() as (reader, writer):
            writer.write(post(b""))
            await reader.readuntil(b"\r\n\r\n")
            seen.set()
            assert await reader.readexactly(19) == b"9\r\ndata: 1\n\n\r\n0\r\n\r\n"

    serving(app, scenario)


def test_a_client_that_reads_slowly_holds_the_stream_up() -> None:
    sent, most = 0, 0

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal sent
        await send(head())
        for _ in range(500):
            await send(part(b"x" * 65_536))
            sent += 1
            await asyncio.sleep(0)
        await send(part(b"", more=False))

    async def scenario(served: Served) -> None:
        nonlocal most
        async with served.client() as (reader, writer):
            writer.write(post(b"", CLOSE))
            most = await at_rest(lambda: sent)
            assert len(await reader.read()) > 500 * 65_536

    serving(app, scenario)
    assert most < 250 and sent == 500


def test_a_client_that_reads_nothing_is_given_up_in_the_end() -> None:
    ended = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(head())
        for _ in range(500):
            await send(part(b"x" * 65_536))
            await asyncio.sleep(0)
        ended.set()

    async def scenario(served: Served) -> None:
        async with served.client() as (_, writer):
            writer.write(post(b""))
            await until(lambda: any(connection.is_full for connection in served.connections))
            now = asyncio.get_running_loop().time()
            for seconds in (0, UNREAD_S / 2):
                close_late(served.connections, now + seconds, limit_s=1)
            assert served.connections and not ended.is_set()
            close_late(served.connections, now + UNREAD_S + 1, limit_s=1)
            await ended.wait()
            assert not served.connections

    serving(app, scenario)


@pytest.mark.parametrize("header", [CLOSE, b"x: y"], ids=["the last", "one of many"])
def test_a_whole_answer_that_is_not_read_is_given_up_in_the_end(header: bytes) -> None:
    """Also where nothing but its delivery keeps the connection; but not as long as some of it is taken."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(head(30_000_000))
        await send(part(bytes(30_000_000), more=False))

    async def scenario(served: Served) -> None:
        def unsent() -> int:
            return sum(connection.unsent for connection in served.connections)

        async with served.client() as (reader, writer):
            writer.write(post(b"", header))
            await until(lambda: unsent() > 0 and not served.state.tasks)
            now = asyncio.get_running_loop().time()
            for hour in range(3):
                left = await at_rest(unsent)
                close_late(served.connections, now + hour * UNREAD_S, limit_s=1)
                while unsent() == left:
                    await reader.read(65_536)
            assert served.connections
            await at_rest(unsent)
            for hours in (3, 4.5):
                close_late(served.connections, now + hours * UNREAD_S, limit_s=1)
            await until(lambda: not served.connections)

    serving(app, scenario)


def test_what_a_client_does_not_read_is_counted_and_given_up_sooner_when_there_is_little_room() -> None:
    size = 30_000_000

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(head(size))
        await send(part(bytes(size), more=False))

    async def scenario(served: Served) -> None:
        now = asyncio.get_running_loop().time()
        async with served.client() as (reader, writer):
            writer.write(post(b""))
            await reader.readexactly(len(b"HTTP/1.1 200 OK"))
            assert served.budget.used > size / 2
            await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(size)
            await until(lambda: served.budget.used == 0)
            writer.write(post(b""))
            await until(lambda: served.budget.used > size / 2)
            for seconds in (0, UNREAD_TIGHT_S + 1):
                close_late(served.connections, now + seconds, limit_s=1)
            assert served.connections
            others = Account(served.budget)
            others.hold(BUDGET_BYTES // 2)
            close_late(served.connections, now + UNREAD_TIGHT_S + 1, limit_s=1)
            await until(lambda: not served.connections)
            others.close()

    serving(app, scenario)


def test_a_body_that_nobody_receives_is_not_read_on() -> None:
    go_on, taken = asyncio.Event(), 0
    size = 64 * 1024 * 1024

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal taken
        await go_on.wait()
        more = True
        while more:
            message = await receive()
            taken, more = taken + len(message["body"]), message["more_body"]
        await send(head(0))
        await send(part(b"", more=False))

    async def scenario(served: Served) -> None:
        async with served.client() as (reader, writer):
            writer.write(b"POST / HTTP/1.1\r\nhost: p\r\ncontent-length: %d\r\n\r\n" % size)
            for _ in range(size // 1_048_576):
                writer.write(bytes(1_048_576))
            left = await at_rest(writer.transport.get_write_buffer_size)
            assert left > size // 2, "it was taken in, though nobody has received it"
            go_on.set()
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            assert taken == size

    serving(app, scenario)


async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer without a look at the body."""
    await send(head(2, 401))
    await send(part(b"no", more=False))


def test_an_answer_before_the_body_leaves_the_connection_whole() -> None:
    async def scenario(served: Served) -> None:
        async with served.client() as (reader, writer):
            first = post(b"x" * 300_000)
            writer.write(first[:200])
            assert (await reader.readuntil(b"no")).startswith(b"HTTP/1.1 401")
            writer.write(first[200:] + post(b"", CLOSE))
            assert answers(await reader.read()) == [b"no"]

    serving(refuse, scenario)


def test_a_body_that_goes_wrong_after_its_answer_gets_no_second_one() -> None:
    async def scenario(served: Served) -> None:
        async with served.client() as (reader, writer):
            writer.write(BROKEN_BODY[:-9])
            await reader.readuntil(b"no")
            writer.write(BROKEN_BODY[-9:])
            assert await reader.read() == b""

    serving(refuse, scenario)


BODY_BYTES = 30_000_000
"""More than the network between two sockets takes in."""

TOO_LONG_A_HEAD = b"GET / HTTP/1.1\r\nx: " + bytes(BODY_BYTES)


@pytest.mark.parametrize(
    "raw",
    [post(bytes(BODY_BYTES), CLOSE), post(bytes(BODY_BYTES), version=b"1.0"), TOO_LONG_A_HEAD, bytes(BODY_BYTES)],
    ids=["the last", "of HTTP 1.0", "endless head", "no HTTP"],
)
def test_who_sends_all_before_it_reads_gets_an_early_answer(raw: bytes) -> None:
    """Though nobody wants the rest: closing on it would reset the connection, and the reset overtakes the answer."""

    def told(port: int) -> bytes:
        with socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S) as client:
            client.sendall(raw)
            return client.makefile("rb").read()

    async def scenario(served: Served) -> None:
        assert (await asyncio.to_thread(told, served.port)).startswith(b"HTTP/1.1 4")

    serving(refuse, scenario)


def test_who_goes_on_sending_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """After so many bytes, and after so long, whatever the client does."""

    async def scenario(served: Served) -> None:
        for bound, raw in (("LINGER_BYTES", post(bytes(BODY_BYTES), CLOSE)), ("LINGER_S", post(b"hi", CLOSE)[:-1])):
            with monkeypatch.context() as patched:
                patched.setattr(server_protocol, bound, 0.1)
                async with served.client() as (_, writer):
                    await until(lambda: bool(served.connections))
                    writer.write(raw)
                    await until(lambda: not served.connections)

    serving(refuse, scenario)


def test_who_receives_is_told_that_the_client_has_left() -> None:
    told: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        told.append(await receive())
        await send(head(2))  # which goes nowhere

    async def scenario(served: Served) -> None:
        async with served.client() as (_, writer):
            writer.write(post(b"hi"))
            await until(lambda: bool(served.state.tasks))

    serving(app, scenario)
    assert told == [{"type": "http.disconnect"}]


def test_who_receives_is_told_that_its_answer_is_out() -> None:
    told: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def listen() -> None:
            told.append(await receive())

        await receive()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(listen())
            await asyncio.sleep(0)
            await send(head(2))
            await send(part(b"ok", more=False))

    async def scenario(served: Served) -> None:
        assert answers(await served.say(post(b"", CLOSE))) == [b"ok"]

    serving(app, scenario)
    assert told == [{"type": "http.disconnect"}]


LONGER, SHORTER = [head(2), part(b"long", more=False)], [head(9), part(b"short", more=False)]
LINE_BREAK = [head(2, x=b"a\r\nset-cookie: b"), part(b"ok", more=False)]
BODY_FIRST = [part(b"ok", more=False)]


@pytest.mark.parametrize("messages", [[], LINE_BREAK, BODY_FIRST], ids=["none", "line break", "body first"])
def test_what_has_no_answer_gets_a_500(messages: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for message in messages:
            await send(message)
        raise ValueError("the reason")

    async def scenario(served: Served) -> None:
        said = await served.say(post(b"hi"))
        assert said.startswith(b"HTTP/1.1 500") and len(answers(said)) == 1 and b"set-cookie" not in said

    with caplog.at_level(logging.ERROR):
        serving(app, scenario)
    assert "POST /v1/completions failed" in caplog.text
    assert messages or "the reason" in caplog.text
    caplog.clear()


@pytest.mark.parametrize("messages", [LONGER, SHORTER, [head(), part(b"half")]], ids=["longer", "shorter", "unended"])
def test_half_an_answer_is_cut_off(messages: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for message in messages:
            await send(message)

    async def scenario(served: Served) -> None:
        assert not (await served.say(post(b"hi"))).endswith((b"0\r\n\r\n", b"long", b"short"))

    serving(app, scenario)
    caplog.clear()


def test_a_stop_lets_what_is_served_end_and_closes_what_is_idle() -> None:
    go_on = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await go_on.wait()
        await echo(scope, receive, send)

    async def scenario(served: Served) -> None:
        async with served.client() as (reader, writer), served.client() as (idle, _):
            writer.write(post(b"hi"))
            await until(lambda: bool(served.state.tasks))
            for connection in served.connections:
                connection.shutdown()
            assert await idle.read() == b""
            go_on.set()
            said = await reader.read()
            assert answers(said) == [b"hi"] and b"connection: close" in said

    serving(app, scenario)


@pytest.mark.parametrize("early", [False, True], ids=["a stop", "half a body that comes too slowly"])
def test_an_answer_of_the_same_turn_goes_out_before_the_connection_closes(early: bool) -> None:
    served_by: list[Served] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(head(2))
        await send(part(b"ok", more=False))
        (connection,) = served_by[0].connections
        connection.close_if_late(1e9, limit_s=1) if early else connection.shutdown()

    async def scenario(served: Served) -> None:
        served_by.append(served)
        assert answers(await served.say(post(b"hi")[: -1 if early else None])) == [b"ok"]

    serving(app, scenario)


def test_an_idle_connection_is_closed_in_the_end_and_a_busy_one_is_not() -> None:
    go_on = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["query_string"]:
            await go_on.wait()
        await echo(scope, receive, send)

    async def scenario(served: Served) -> None:
        async with served.client() as (idle, to_idle), served.client() as (busy, to_busy):
            to_idle.write(post(b"hi"))
            await idle.readuntil(b"hi")
            to_busy.write(post(b"yo").replace(b"completions", b"completions?x"))
            await until(lambda: bool(served.state.tasks))
            close_late(served.connections, asyncio.get_running_loop().time() + 3, limit_s=1)
            assert len(served.connections) == 2, "uvicorn keeps one for 5 s"
            close_late(served.connections, asyncio.get_running_loop().time() + 100, limit_s=1)
            assert await idle.read() == b""
            go_on.set()
            assert (await busy.readuntil(b"yo")).startswith(b"HTTP/1.1 200")

    serving(app, scenario)


def test_a_request_that_was_not_read_on_is_not_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has begun to arrive while another one was served for ten minutes, and the rest of it is in the network."""
    go_on = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["query_string"]:
            await go_on.wait()
        await echo(scope, receive, send)

    async def scenario(served: Served) -> None:
        clock = Clock(asyncio.get_running_loop())
        async with served.client() as (reader, writer):
            await until(lambda: bool(served.connections))
            (connection,) = served.connections
            monkeypatch.setattr(connection, "_loop", clock)
            second = post(b"two")
            writer.write(post(b"one").replace(b"completions", b"completions?x") + second[:-1])
            await until(lambda: bool(served.state.tasks))
            clock.ahead_s = 600
            close_late([connection], clock.time(), limit_s=60)
            go_on.set()
            await reader.readuntil(b"one")
            await until(lambda: bool(served.state.tasks))
            close_late([connection], clock.time() + 59, limit_s=60)
            writer.write(second[-1:])
            assert (await reader.readuntil(b"two")).startswith(b"HTTP/1.1 200")

    serving(app, scenario)


class Clock:
    """An event loop whose time can be put forward."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.ahead_s = 0.0

    def time(self) -> float:
        return self._loop.time() + self.ahead_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)


def test_nothing_of_a_connection_is_left() -> None:
    """Neither after its end nor after a reset, however: what held it would hold its last request as well. And no
    garbage collector is needed, since ours comes seldom.
    """
    left: list[weakref.ref[Any]] = []

    async def scenario(served: Served) -> None:
        for how in ("close", "abort"):
            for sent in (b"", b"GET", post(b"hi"), post(b"hi") + BROKEN_BODY, post(b"hi")[:-1], post(b"1") * 3):
                _, writer = await asyncio.open_connection("127.0.0.1", served.port)
                await until(lambda: bool(served.connections))
                left.extend(weakref.ref(connection) for connection in served.connections)
                writer.write(sent)
                await at_rest(lambda: len(served.state.tasks))
                getattr(writer.transport, how)()
                await until(lambda: not served.connections and not served.state.tasks)
                await until(lambda: left[-1]() is None)
        assert len(left) == 12

    gc.disable()
    try:
        serving(echo, scenario)
    finally:
        gc.enable()
