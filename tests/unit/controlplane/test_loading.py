"""What may happen between an announcement and the first call to a replica."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from proxy.contract import LoadReport, LoadRequest
from proxy.controlplane.loading import phases_of_broadcast
from proxy.errors import ApiError
from proxy.fleet.policies import Policy
from proxy.fleet.replica import Replica, Trial
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


def trial_of(policy: Policy, index: int, *, load_s: float, proven_at: float) -> Replica:
    replica = Replica(index, f"http://{index}")
    replica.trials[policy.upstream] = Trial(10.0, load_s=load_s, proven_at=proven_at, proven=proven_at > 0)
    return replica


def test_the_slowest_replica_makes_each_phase_and_the_phases_make_the_whole() -> None:
    policy = Policy("p", "p", "/p", version=1, step=None, digest=None, announced_at=10.0)
    replicas = [
        trial_of(policy, 0, load_s=1, proven_at=14),
        trial_of(policy, 1, load_s=3, proven_at=13.5),
        trial_of(policy, 2, load_s=9, proven_at=0),  # a quorum went on without it
    ]
    assert phases_of_broadcast(policy, replicas, began=10, ended=14.5) == {"load": 3, "verify": 1, "commit": 0.5}
    assert phases_of_broadcast(policy, [], began=10, ended=12) == {"load": 0, "verify": 0, "commit": 2}


def test_a_policy_that_went_live_says_how_long_each_phase_took(loop: VirtualTime) -> None:
    world = World(loop, slots=2)
    report = world.announce("first").result()
    assert list(report.phases) == ["check", "name", "gate", "slot", "load", "verify", "commit"]
    assert sum(report.phases.values()) == pytest.approx(report.seconds, abs=0.001)
