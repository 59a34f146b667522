"""What is posted in a turn of the event loop goes out at its end, in order, whatever becomes of others."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from proxy.dataplane.outbox import LARGE_BYTES, MOST_POSTED, Outbox


class Transport(asyncio.Transport):
    def __init__(self, *, breaks: bool = False) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.closed = False
        self.breaks = breaks

    def write(self, data: Any) -> None:
        if self.breaks:
            raise RuntimeError("broken")
        self.writes.append(data)

    def writelines(self, parts: Any) -> None:
        self.writes.append(b"".join(parts))

    def is_closing(self) -> bool:
        return self.closed


def test_what_is_posted_goes_out_at_the_end_of_the_turn() -> None:
    async def scenario() -> None:
        outbox, one, other = Outbox(asyncio.get_running_loop()), Transport(), Transport()
        outbox.post(one, b"head ", b"body")
        outbox.post(other, b"else")
        assert not one.writes and not other.writes
        await asyncio.sleep(0)
        assert one.writes == [b"head body"] and other.writes == [b"else"]

    asyncio.run(scenario())


def test_a_large_body_goes_out_at_once_behind_what_was_posted() -> None:
    async def scenario() -> None:
        outbox, transport = Outbox(asyncio.get_running_loop()), Transport()
        outbox.post(transport, b"first")
        outbox.post(transport, b"head", large := b"x" * (LARGE_BYTES + 1))
        outbox.post(transport, b"last")
        assert transport.writes == [b"first", b"head" + large]
        await asyncio.sleep(0)
        assert transport.writes[2:] == [b"last"]

    asyncio.run(scenario())


def test_many_do_not_wait_for_the_end_of_the_turn() -> None:
    async def scenario() -> None:
        outbox, transport = Outbox(asyncio.get_running_loop()), Transport()
        for number in range(MOST_POSTED + 1):
            outbox.post(transport, b"%d" % number)
        assert transport.writes == [b"%d" % number for number in range(MOST_POSTED)]
        await asyncio.sleep(0)
        assert transport.writes[MOST_POSTED:] == [b"%d" % MOST_POSTED]

    asyncio.run(scenario())


@pytest.mark.parametrize("body", [b"", b"x" * (LARGE_BYTES + 1)])
def test_nothing_goes_to_who_is_being_closed(body: bytes) -> None:
    async def scenario() -> None:
        outbox, transport = Outbox(asyncio.get_running_loop()), Transport()
        outbox.post(transport, b"posted before")
        transport.closed = True
        outbox.post(transport, b"posted after", body)
        await asyncio.sleep(0)
        assert transport.writes == []

    asyncio.run(scenario())


def test_a_write_that_fails_keeps_nobody_elses_back() -> None:
    async def scenario() -> None:
        told: list[Any] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: told.append(context["exception"]))
        outbox, broken, whole = Outbox(loop), Transport(breaks=True), Transport()
        outbox.post(broken, b"lost")
        outbox.post(whole, b"kept")
        for _ in range(3):
            await asyncio.sleep(0)
        assert whole.writes == [b"kept"] and [str(error) for error in told] == ["broken"]

    asyncio.run(scenario())
