"""Reading an answer from bytes: in whatever pieces they come, and whatever is wrong with them."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.dataplane.budget import Account, Budget
from proxy.dataplane.errors import UpstreamError
from proxy.dataplane.exchange import HIGH_WATER_BYTES, MAX_HEAD_BYTES, Exchange

HOLD = 1 << 20

LOOP = asyncio.new_event_loop()


@pytest.fixture(scope="module", autouse=True)
def close_loop() -> Iterator[None]:
    yield
    LOOP.close()


class Reading:
    """Stands for the socket: whether the exchange wants to read on."""

    paused = False

    def pause(self) -> None:
        assert not self.paused
        self.paused = True

    def resume(self) -> None:
        assert self.paused
        self.paused = False


def exchange() -> tuple[Exchange, Reading]:
    reading = Reading()
    return Exchange(reading.pause, reading.resume, Account(Budget(1 << 30)), LOOP), reading


def fed(*pieces: bytes) -> Exchange:
    made, _ = exchange()
    for piece in pieces:
        made.feed(piece)
    return made


def body_of(answer: Exchange) -> bytes | None:
    return LOOP.run_until_complete(answer.read(HOLD))


def chunked(*chunks: bytes, trailers: bytes = b"") -> bytes:
    body = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body + b"0\r\n" + trailers + b"\r\n"


ANSWERS = {
    "length": (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello", b"hello", True),
    "empty": (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", b"", True),
    "no content": (b"HTTP/1.1 204 No Content\r\n\r\n", b"", True),
    "chunked": (chunked(b"hel", b"lo"), b"hello", True),
    "trailers": (chunked(b"hello", trailers=b"x-late: 1\r\n"), b"hello", True),
    "closing": (b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 5\r\n\r\nhello", b"hello", False),
    "old": (b"HTTP/1.0 200 OK\r\ncontent-length: 5\r\n\r\nhello", b"hello", False),
    "continue first": (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi", b"hi", True),
    "hints first": (
        b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi",
        b"hi",
        True,
    ),
}


@pytest.mark.parametrize("kind", ANSWERS)
@pytest.mark.parametrize("size", [1, 2, 7, 10_000])
def test_an_answer_is_the_same_in_pieces_of_any_size(kind: str, size: int) -> None:
    raw, body, keep_alive = ANSWERS[kind]
    answer = fed(*(raw[start : start + size] for start in range(0, len(raw), size)))
    assert answer.complete and answer.keep_alive is keep_alive
    assert body_of(answer) == body
    assert answer.status in (200, 204)


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=6), st.lists(st.integers(1, 30), min_size=1, max_size=40))
def test_any_chunked_body_in_any_pieces(chunks: list[bytes], cuts: list[int]) -> None:
    raw, answer = chunked(*chunks), exchange()[0]
    for cut in cuts:
        answer.feed(raw[:cut])
        raw = raw[cut:]
        if not raw:
            break
    if raw:
        answer.feed(raw)
    assert body_of(answer) == b"".join(chunks)


def test_interim_headers_and_trailers_are_not_the_answers() -> None:
    answer = fed(ANSWERS["hints first"][0])
    assert answer.headers == [(b"content-length", b"2")]
    assert [name for name, _ in fed(ANSWERS["trailers"][0]).headers] == [b"transfer-encoding"]


def test_a_body_without_a_length_ends_with_the_connection() -> None:
    answer = fed(b"HTTP/1.1 200 OK\r\n\r\nhel", b"lo")
    assert not answer.complete
    answer.closed(None)
    assert answer.complete and not answer.keep_alive and body_of(answer) == b"hello"


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"HTTP/1.1 2",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhel",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhel",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n",
    ],
)
def test_a_connection_that_closes_early_breaks_the_answer(raw: bytes) -> None:
    answer, _ = exchange()
    if raw:
        answer.feed(raw)
    answer.closed(None)
    assert (answer.answered_at is not None) is bool(raw)
    with pytest.raises(UpstreamError, match="closed the connection"):
        body_of(answer)


@pytest.mark.parametrize(
    "raw",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: five\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
        b"HTTP/1.1 099 What?\r\ncontent-length: 0\r\n\r\n",
        b"<html>",
    ],
)
def test_what_is_not_http_is_refused(raw: bytes) -> None:
    with pytest.raises(UpstreamError):
        fed(raw)


def test_an_endless_head_is_refused() -> None:
    answer, _ = exchange()
    answer.feed(b"HTTP/1.1 200 OK\r\n")
    with pytest.raises(UpstreamError, match="longer than"):
        for number in range(MAX_HEAD_BYTES // 100 + 2):
            answer.feed(b"x-%08d: %b\r\n" % (number, b"y" * 100))


def test_a_large_head_is_not() -> None:
    answer = fed(b"HTTP/1.1 200 OK\r\nx-large: " + b"y" * 60_000 + b"\r\ncontent-length: 0\r\n\r\n")
    assert answer.complete


def test_bytes_behind_the_answer_end_the_connections_use() -> None:
    answer = fed(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhiHTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nbad")
    assert answer.complete and not answer.keep_alive and body_of(answer) == b"hi"


def test_a_stream_that_nobody_reads_stops_reading_and_goes_on_when_it_is_read() -> None:
    answer, reading = exchange()
    answer.feed(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")

    async def scenario() -> int:
        while not reading.paused:
            answer.feed(b"1000\r\n" + b"x" * 4096 + b"\r\n")
        assert HIGH_WATER_BYTES < answer.buffered <= HIGH_WATER_BYTES + 4096
        received = len(await answer.chunk())
        assert not reading.paused and answer.buffered == 0
        answer.feed(b"0\r\n\r\n")
        assert await answer.chunk() == b""
        return received

    assert LOOP.run_until_complete(scenario()) > HIGH_WATER_BYTES


def test_a_held_body_is_read_up_to_the_limit_and_passed_on_beyond_it() -> None:
    size = 300_000
    answer = fed(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)

    async def scenario() -> tuple[bytes | None, bytes]:
        answer.feed(b"x" * (size // 2))
        held = await answer.read(size // 3)
        answer.feed(b"x" * (size - size // 2))
        return held, await answer.chunk() + await answer.chunk()

    held, rest = LOOP.run_until_complete(scenario())
    assert held is None and len(rest) == size


@pytest.mark.parametrize("limit", [0, HOLD], ids=["a stream's", "a held one's"])
def test_a_connection_whose_answer_has_ended_is_read_from(limit: int) -> None:
    """It may carry the next answer before anyone has taken this one: its own reader may be slow, or done."""
    answer, reading = exchange()
    body = b"x" * (HOLD + 1)

    async def arrive() -> None:
        answer.feed(body)
        assert answer.complete and not reading.paused

    async def scenario() -> None:
        answer.feed(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body))
        async with asyncio.TaskGroup() as tasks:
            read = tasks.create_task(answer.read(limit))
            tasks.create_task(arrive())
        assert read.result() == body

    LOOP.run_until_complete(scenario())


def test_a_whole_answer_is_held_once() -> None:
    pieces = [b"x" * (HOLD // 16)] * 16
    tracemalloc.start()
    answer = fed(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % HOLD, *pieces)
    body = body_of(answer)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert body == b"".join(pieces) and answer.complete
    assert held < 1.5 * HOLD


def test_what_has_arrived_before_a_break_is_passed_on() -> None:
    answer = fed(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhello")
    answer.closed(ConnectionResetError("reset"))

    async def scenario() -> bytes:
        received = await answer.chunk()
        with pytest.raises(UpstreamError, match="reset"):
            await answer.chunk()
        return received

    assert LOOP.run_until_complete(scenario()) == b"hello"


def test_an_answer_that_the_budget_has_no_room_for_fails() -> None:
    budget = Budget(100)
    answer = Exchange(lambda: None, lambda: None, account := Account(budget), LOOP)
    answer.feed(b"HTTP/1.1 200 OK\r\ncontent-length: 200\r\n\r\n" + b"x" * 90)
    answer.feed(b"x" * 90)
    with pytest.raises(UpstreamError) as caught:
        body_of(answer)
    assert caught.value.over_budget
    account.close()
    account.close()
    assert budget.used == 0


class Sink:
    """Takes what arrives, as long as it is open."""

    def __init__(self) -> None:
        self.got: list[bytes] = []
        self.open = True
        self.refuses = b""

    def __call__(self, chunk: bytes) -> bool:
        if self.refuses and self.refuses in chunk:
            raise UpstreamError("not that")
        if self.open:
            self.got.append(chunk)
        return self.open


def piece(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)


def poured(*steps: bytes, sink: Sink, last: bool = True) -> list[bytes]:
    """Feed a stream piece by piece while a sink is there, and return what was left for who waits."""
    answer, _ = exchange()
    answer.feed(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")

    async def scenario() -> list[bytes]:
        left: list[bytes] = []

        async def wait() -> None:
            while chunk := await answer.chunk(sink):
                left.append(chunk)
                sink.open = True

        async def arrive() -> None:
            await asyncio.sleep(0)
            for step in steps:
                try:
                    answer.feed(step)
                except UpstreamError as error:
                    answer.fail(error)
                    return
                await asyncio.sleep(0)
                await asyncio.sleep(0)

        async with asyncio.timeout(5), asyncio.TaskGroup() as tasks:
            tasks.create_task(wait())
            tasks.create_task(arrive())
        return left

    return LOOP.run_until_complete(scenario())


END = b"0\r\n\r\n"


def test_what_a_sink_takes_wakes_nobody() -> None:
    sink = Sink()
    assert poured(piece(b"one"), piece(b"two") + piece(b"three"), END, sink=sink) == []
    assert sink.got == [b"one", b"twothree"]


def test_what_a_sink_does_not_want_is_waited_for_and_nothing_is_lost_or_turned_round() -> None:
    sink = Sink()
    sink.open = False
    assert poured(piece(b"one"), piece(b"two"), piece(b"three") + END, sink=sink) == [b"one"]
    assert sink.got == [b"two", b"three"]


@pytest.mark.parametrize("end", [b"", END])
def test_what_a_sink_refuses_breaks_the_answer_off_even_if_it_ends_with_it(end: bytes) -> None:
    sink = Sink()
    sink.refuses = b"bad"
    with pytest.raises(ExceptionGroup) as caught:
        poured(piece(b"good"), piece(b"bad") + end, sink=sink)
    assert caught.group_contains(UpstreamError, match="not that") and sink.got == [b"good"]
