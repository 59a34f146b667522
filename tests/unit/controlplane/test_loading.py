"""What may happen between an announcement and the first call to a replica."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from proxy.contract import LoadReport, LoadRequest
from proxy.errors import ApiError
from proxy.settings import ControlSettings
from tests.support.driven_fleet import DrivenFleet
from tests.support.model_replica import ModelReplica
from tests.support.virtual_time import VirtualTime, virtual_time


class World:
    """One replica with so many slots, and the proxy before it."""

    def __init__(self, loop: VirtualTime, *, slots: int) -> None:
        self.loop = loop
        self.files: dict[str, int] = {}
        self.replica = ModelReplica(
            "http://0", max_loras=slots, files=self.files, alarm=pytest.fail, on_unload=lambda *_: None
        )
        servers = {self.replica.url: self.replica}
        self.proxy = DrivenFleet(loop, servers, tuple(servers), ControlSettings(), files={}, sees=False)
        loop.advance()

    def announce(self, name: str) -> asyncio.Task[LoadReport]:
        self.files[f"/lora/{name}"] = 1
        request = LoadRequest(lora_name=name, lora_path=f"/lora/{name}")
        loading = self.loop.create_task(self.proxy.loading.load(request))
        self.loop.advance(0.2)
        return loading


@pytest.fixture
def loop() -> Iterator[VirtualTime]:
    with virtual_time() as loop:
        yield loop


def test_the_last_replica_dies_while_a_load_waits_for_a_slot(loop: VirtualTime) -> None:
    world = World(loop, slots=1)
    assert world.announce("first").done()
    waiting = world.announce("second")
    world.replica.die()
    loop.advance(10)
    world.proxy.fleet.retire(world.proxy.fleet.live()[0], "unloaded", deadline=0.0)
    loop.advance(1)
    error = waiting.exception()
    assert isinstance(error, ApiError) and error.status == 503 and "no replica was left" in error.message


def test_who_waits_first_for_a_slot_gets_it_first(loop: VirtualTime) -> None:
    world = World(loop, slots=1)
    fleet = world.proxy.fleet
    world.announce("held")
    waiting = {name: world.announce(name) for name in "abcdefgh"}
    came = []
    for _ in waiting:
        fleet.retire(fleet.live()[0], "unloaded", deadline=0.0)
        loop.advance(1)
        came.append(fleet.live()[0].name)
    assert came == list(waiting)
