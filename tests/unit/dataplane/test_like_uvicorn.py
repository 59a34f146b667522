"""The server protocol and uvicorn's own serve the same requests, whatever bytes come and however they are cut."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

from hypothesis import assume, event, given, settings
from hypothesis import strategies as st
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from benchmarks.fuzz.inputs import cuts, pieces, requests
from benchmarks.fuzz.served import Peer, body_of, config_of, connection_to
from tests.unit.dataplane.serving import CLOSE, head, part, post


class App:
    """Answers with the body that it got, in hexadecimal, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (body := await body_of(receive)) is None:
            return
        names = ("method", "path", "raw_path", "query_string", "http_version")
        self.asked.append((*(scope[name] for name in names), body))
        await send(head(2 * len(body)))
        await send(part(body.hex().encode(), more=False))


class Outcome(NamedTuple):
    asked: list[tuple[Any, ...]]
    statuses: list[int]
    """Of the answers; 100 is none."""
    closed: bool
    """By the server."""


def served(made: Callable[[ASGIApp, ServerState], Any], parts: list[bytes]) -> Outcome:
    """Feed `parts` to a new connection, one a turn."""

    async def run() -> Outcome:
        app, state, peer = App(), ServerState(), Peer()
        protocol = made(app, state)
        protocol.connection_made(peer)
        for data in parts:
            if peer.closed:
                break
            protocol.data_received(data)
            await turns()
        seen = -1
        while seen != len(app.asked):  # until what is left waits for more of its body
            seen = len(app.asked)
            await turns()
        closed = peer.closed
        protocol.connection_lost(None)
        await asyncio.gather(*state.tasks)
        answers = [answer for answer in peer.said.split(b"HTTP/1.1 ")[1:] if not answer.startswith(b"100")]
        return Outcome(app.asked, [int(answer[:3]) for answer in answers], closed)

    return asyncio.run(run())


async def turns() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


def theirs(app: ASGIApp, state: ServerState) -> HttpToolsProtocol:
    return HttpToolsProtocol(config_of(app), state, {})


WHOLE = st.builds(post, st.binary(max_size=300), st.sampled_from([b"x: y", b"expect: 100-continue", CLOSE]))


@settings(max_examples=600, deadline=None)
@given(messages=st.lists(requests | WHOLE, min_size=1, max_size=3), lengths=cuts())
def test_they_serve_the_same_requests(messages: list[bytes], lengths: list[int]) -> None:
    content = b"".join(messages)
    assume(b"pgrade" not in content and b"CONNECT" not in content)  # which ours refuses
    parts = pieces(content, lengths)
    own, reference = served(connection_to, parts), served(theirs, parts)
    event(f"served {len(own.asked)}")
    answered = [200] * len(own.asked)
    assert own.closed == reference.closed
    if reference.statuses[-1:] != [400]:
        assert own.asked == reference.asked and own.statuses == reference.statuses == answered
    else:  # uvicorn says so at once, and drops what came whole together with it: ours answers that, and then closes
        assert own.asked[: len(reference.asked)] == reference.asked
        assert own.statuses in (answered, [*answered, 400])
