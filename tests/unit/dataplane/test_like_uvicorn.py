"""The server protocol and uvicorn's own serve the same requests, whatever bytes come and however they are cut."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from hypothesis import assume, event, given, settings
from hypothesis import strategies as st
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from benchmarks.fuzz.inputs import cuts, pieces, requests
from proxy.dataplane.outbox import Outbox
from proxy.dataplane.server_protocol import ServerProtocol
from tests.unit.dataplane.serving import CLOSE, config_of, head, part, post


class Transport:
    """Keeps what was written, until it is closed."""

    def __init__(self) -> None:
        self.said = b""
        self.closed = self.closed_itself = False

    def write(self, data: bytes) -> None:
        self.said += b"" if self.closed else data

    def writelines(self, parts: list[bytes]) -> None:
        self.write(b"".join(parts))

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default


class App:
    """Answers with the body that it got, in hexadecimal, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message["body"], message["more_body"]
        names = ("method", "path", "raw_path", "query_string", "http_version")
        self.asked.append((*(scope[name] for name in names), body))
        await send(head(2 * len(body)))
        await send(part(body.hex().encode(), more=False))


def served(made: Callable[[ASGIApp, ServerState], Any], parts: list[bytes]) -> tuple[App, Transport]:
    """Feed `parts` to a new connection, one a turn."""

    async def run() -> tuple[App, Transport]:
        app, state, transport = App(), ServerState(), Transport()
        protocol = made(app, state)
        protocol.connection_made(transport)
        for data in parts:
            if transport.closed:
                break
            protocol.data_received(data)
            for _ in range(8):
                await asyncio.sleep(0)
        while any(not task.done() for task in state.tasks) and not transport.closed:
            before = len(app.asked)
            for _ in range(8):
                await asyncio.sleep(0)
            if len(app.asked) == before:
                break  # it waits for more of a body
        transport.closed_itself = transport.closed
        protocol.connection_lost(None)
        await asyncio.gather(*state.tasks)
        return app, transport

    return asyncio.run(run())


def ours(app: ASGIApp, state: ServerState) -> ServerProtocol:
    return ServerProtocol(config_of(app), state, {}, outbox=Outbox(asyncio.get_running_loop()))


def theirs(app: ASGIApp, state: ServerState) -> HttpToolsProtocol:
    return HttpToolsProtocol(config_of(app), state, {})


def statuses(transport: Transport) -> list[int]:
    """Return those of the answers; 100 is none."""
    return [int(answer[:3]) for answer in transport.said.split(b"HTTP/1.1 ")[1:] if not answer.startswith(b"100")]


WHOLE = st.builds(post, st.binary(max_size=300), st.sampled_from([b"x: y", b"expect: 100-continue", CLOSE]))


@settings(max_examples=600, deadline=None)
@given(messages=st.lists(requests | WHOLE, min_size=1, max_size=3), lengths=cuts())
def test_they_serve_the_same_requests(messages: list[bytes], lengths: list[int]) -> None:
    content = b"".join(messages)
    assume(b"pgrade" not in content and b"CONNECT" not in content)  # which ours refuses
    parts = pieces(content, lengths)
    (app, transport), (other, reference) = served(ours, parts), served(theirs, parts)
    event(f"served {len(app.asked)}")
    assert transport.closed_itself == reference.closed_itself
    said, answered = statuses(reference), [200] * len(app.asked)
    if said[-1:] != [400]:
        assert app.asked == other.asked and statuses(transport) == said == answered
    else:  # uvicorn says so at once, and drops what came whole together with it: ours answers that, and then closes
        assert app.asked[: len(other.asked)] == other.asked
        assert statuses(transport) in (answered, [*answered, 400])
