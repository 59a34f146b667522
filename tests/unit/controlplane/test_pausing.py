"""What a probe reads while a pause or a resume is under way says nothing: by then it may be otherwise."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from proxy.controlplane.answer import Answer
from proxy.controlplane.pausing import Pausing
from proxy.controlplane.replica_api import ReplicaApi
from proxy.fleet.pool import Fleet
from proxy.fleet.replica import ReplicaState
from proxy.settings import ControlSettings


class SlowApi(ReplicaApi):
    """Answers 200 once it is let."""

    def __init__(self) -> None:
        self.url = "http://replica"
        self.asked = asyncio.Event()
        self.may_answer = asyncio.Event()

    async def call(
        self, method: str, target: str, *, body: bytes | None = None, timeout_s: float | None = None
    ) -> Answer:
        self.asked.set()
        await self.may_answer.wait()
        return Answer(200, "{}")


@pytest.fixture
def api() -> SlowApi:
    return SlowApi()


@pytest.fixture
def fleet() -> Fleet:
    fleet = Fleet(("http://replica",), clock=lambda: 0.0)
    fleet.set_state(fleet.replicas[0], ReplicaState.READY)
    return fleet


@pytest.fixture
def pausing(fleet: Fleet, api: SlowApi) -> Pausing:
    return Pausing(fleet, {0: api}, ControlSettings(pause="real"))


async def within(call: Coroutine[Any, Any, Answer], api: SlowApi, read: Callable[[], Any]) -> Any:
    """Return what `read` gives while `call` is under way, after that has been answered."""
    task = asyncio.get_running_loop().create_task(call)
    await api.asked.wait()
    found = read()
    api.may_answer.set()
    await task
    api.may_answer.clear()
    api.asked.clear()
    return found


def test_a_probe_within_a_resume_finds_no_stranger_s_pause(fleet: Fleet, pausing: Pausing, api: SlowApi) -> None:
    async def scenario() -> None:
        replica = fleet.replicas[0]
        await within(pausing.pause("/pause?mode=keep"), api, lambda: None)
        assert replica.paused
        asked_at = await within(pausing.resume(), api, lambda: pausing.calls_so_far)
        pausing.observed(replica, True, calls=asked_at)
        assert not replica.paused and not replica.found_paused
        pausing.observed(replica, True, calls=pausing.calls_so_far)
        assert replica.found_paused, "what is read after it counts"

    asyncio.run(scenario())


def test_a_probe_within_a_pause_does_not_end_it(fleet: Fleet, pausing: Pausing, api: SlowApi) -> None:
    async def scenario() -> None:
        replica = fleet.replicas[0]
        asked_at = await within(pausing.pause("/pause?mode=keep"), api, lambda: pausing.calls_so_far)
        pausing.observed(replica, False, calls=asked_at)
        assert replica.paused

    asyncio.run(scenario())
