"""The wire of benchmarks.chaos: what it carries arrives as it was, and each trouble does what it says."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from benchmarks.chaos import wire as wires
from benchmarks.chaos.wire import PIECE_BYTES, SLOW_DELAY_S, Trouble, Wire

BODY = bytes(range(256)) * 20
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY

Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Replica:
    """Answers each line with ANSWER, in one piece, and notes which of its connections have ended."""

    def __init__(self) -> None:
        self.left = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.readline():
            writer.write(ANSWER)
        self.left.set()
        writer.close()


@asynccontextmanager
async def wired(trouble: Trouble = Trouble.NONE) -> AsyncIterator[tuple[Wire, Replica, Ends]]:
    replica = Replica()
    server = await asyncio.start_server(replica.serve, "127.0.0.1", 0)
    async with server, Wire(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}") as wire:
        ends = await asyncio.open_connection("127.0.0.1", int(wire.url.rpartition(":")[2]))
        wire.trouble = trouble
        yield wire, replica, ends
        ends[1].close()
        await replica.left.wait()


def within_limits(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(10):
            await test()

    asyncio.run(limited())


@pytest.mark.parametrize("trouble", [Trouble.NONE, Trouble.PIECES, Trouble.SLOW])
def test_everything_arrives(trouble: Trouble) -> None:
    async def test() -> None:
        async with wired(trouble) as (_, _, (reader, writer)):
            began = time.monotonic()
            for _ in range(2):
                writer.write(b"?\n")
                assert await reader.readexactly(len(ANSWER)) == ANSWER
            slow = time.monotonic() - began > 4 * SLOW_DELAY_S
            assert slow or trouble is not Trouble.SLOW

    within_limits(test)


def test_pieces_are_pieces() -> None:
    async def test() -> None:
        async with wired(Trouble.PIECES) as (_, _, (reader, writer)):
            writer.write(b"?\n")
            first = await reader.read(len(ANSWER))
            assert 0 < len(first) < len(ANSWER) and len(first) >= min(PIECE_BYTES, len(first))

    within_limits(test)


@pytest.mark.parametrize("trouble", [Trouble.RESET_HEAD, Trouble.RESET_BODY])
def test_a_reset_comes_in_the_middle(trouble: Trouble) -> None:
    async def test() -> None:
        async with wired(trouble) as (_, _, (reader, writer)):
            writer.write(b"?\n")
            got = b""
            with pytest.raises(ConnectionResetError):
                while piece := await reader.read(64):
                    got += piece
            assert len(got) < len(ANSWER)
            if trouble is Trouble.RESET_HEAD:
                assert b"\r\n\r\n" not in got

    within_limits(test)


@pytest.mark.parametrize("trouble", [Trouble.CUT, Trouble.HALF_OPEN])
def test_what_met_a_cut_is_silent_and_what_comes_after_it_is_not(trouble: Trouble) -> None:
    async def test() -> None:
        async with wired() as (wire, replica, (reader, writer)):
            writer.write(b"?\n")
            await reader.readexactly(len(ANSWER))
            wire.trouble = trouble
            writer.write(b"?\n")
            while not wire.lost_bytes:  # noqa: ASYNC110 - sockets tell nobody
                await asyncio.sleep(0.005)
            if trouble is Trouble.HALF_OPEN:
                await replica.left.wait()
            wire.trouble = Trouble.NONE
            answer = asyncio.get_running_loop().create_task(reader.read(1))
            other_reader, other_writer = await asyncio.open_connection("127.0.0.1", int(wire.url.rpartition(":")[2]))
            other_writer.write(b"?\n")
            assert await other_reader.readexactly(len(ANSWER)) == ANSWER
            assert not answer.done(), "neither an answer nor an end"
            answer.cancel()
            other_writer.close()
            await asyncio.sleep(0)

    within_limits(test)


@pytest.mark.parametrize("trouble", [Trouble.CUT, Trouble.HALF_OPEN])
def test_silence_ends_when_keepalive_finds_out(trouble: Trouble, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wires, "KEEPALIVE_S", 0.1)

    async def test() -> None:
        async with wired(trouble) as (_, _, (reader, writer)):
            writer.write(b"?\n")
            with pytest.raises(ConnectionResetError):
                await reader.read(1)

    within_limits(test)
