"""What is no HTTP never gets past the door, and what needs no key brings nothing in."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message, Receive, Scope, Send

from proxy.access import OPEN_PATHS, Keys
from proxy.dataplane.door import Door


class Visited:
    """An application that notes who came in, and with what."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.bodies.append((await receive())["body"])


def knock(scope: Scope, keys: Keys) -> tuple[Visited, list[Message]]:
    behind, said = Visited(), []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"a body", "more_body": False}

    async def send(message: Message) -> None:
        said.append(message)

    asyncio.run(Door(behind, keys)(scope, receive, send))
    return behind, said


def http(path: str, *headers: tuple[bytes, bytes]) -> Scope:
    return {"type": "http", "method": "POST", "path": path, "headers": list(headers)}


@pytest.mark.parametrize("keys", [Keys(), Keys(["key"])])
def test_a_websocket_is_refused(keys: Keys) -> None:
    headers = [(b"authorization", b"Bearer key")]
    behind, said = knock({"type": "websocket", "path": "/health", "headers": headers}, keys)
    assert behind.bodies == [] and said == [{"type": "websocket.close", "code": 1008}]


@pytest.mark.parametrize("kind", ["lifespan", "something-new"])
def test_so_is_any_other_scope(kind: str) -> None:
    with pytest.raises(ValueError, match=kind):
        knock({"type": kind}, Keys())


@pytest.mark.parametrize("path", sorted(OPEN_PATHS))
def test_what_needs_no_key_is_not_read(path: str) -> None:
    behind, _ = knock(http(path), Keys(["key"]))
    assert behind.bodies == [b""]


@pytest.mark.parametrize("path", ["/health/", "//health", "/Health", "/ping/x", "/proxy", "/proxy/live2", "", "*", "/"])
def test_nothing_else_is_open(path: str) -> None:
    behind, said = knock(http(path), Keys(["key"]))
    assert behind.bodies == [] and said[0]["status"] == 401
    assert (b"www-authenticate", b'Basic realm="lora-sync-proxy", charset="UTF-8"') in said[0]["headers"]


def test_with_a_key_the_body_comes_in() -> None:
    behind, said = knock(http("/v1/completions", (b"authorization", b"Bearer key")), Keys(["key"]))
    assert (behind.bodies, said) == ([b"a body"], [])


def test_of_two_authorizations_none_is_guessed_to_be_right() -> None:
    both = (b"authorization", b"Bearer key"), (b"authorization", b"Bearer other")
    behind, _ = knock(http("/v1/completions", *both), Keys(["key"]))
    assert behind.bodies == []
