"""A fault waits until there is something for it to hit, but not for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest

from benchmarks.chaos.faults import Kind, Site
from benchmarks.chaos.fleet import Fleet, Standing
from benchmarks.chaos.monkey import Monkey
from benchmarks.chaos.scale import QUICK, Scale
from benchmarks.chaos.tally import Tally
from benchmarks.chaos.views import View
from benchmarks.chaos.wire import Wire
from tests.support.replicas import SimulatedReplica

ONE_FAULT = replace(QUICK, every_s=0.5, fault_s=(0.0, 0.0), shares=1, aim_s=5.0)


class ToldFleet(Fleet):
    """One replica that has in flight what it is told to, look after look; the last figure stays. None: no proxy."""

    def __init__(self, folder: Path, in_flight: list[int | None]) -> None:
        folder.mkdir()
        self.sites = [Site(SimulatedReplica(), Wire("http://127.0.0.1:9"), View(folder / "replica", folder))]
        self.looks = 0
        self._in_flight = in_flight

    async def standings(self) -> dict[str, Standing]:
        inflight = self._in_flight[min(self.looks, len(self._in_flight) - 1)]
        self.looks += 1
        if inflight is None:
            raise httpx2.ConnectError("the proxy is away")
        return {"": Standing("ready", since=0, held={}, inflight=inflight)}


def struck(fleet: ToldFleet, scale: Scale) -> Iterator[int]:
    """Let one fault strike; yield the look at which it did, and how much it has hit."""
    looked: list[int] = []
    kind = Kind("touch", lambda site: looked.append(fleet.looks), lambda site: None, lasts=False)
    monkey = Monkey(fleet, Tally(), scale, [kind], seed=1)

    async def once() -> None:
        stop = asyncio.Event()
        async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
            tasks.create_task(monkey.run(stop))
            while not looked:  # noqa: ASYNC110 - threads set no events
                await asyncio.sleep(0.005)
            hit = monkey.by_kind["touch"].hit
            stop.set()
        looked.append(hit)

    asyncio.run(once())
    yield looked[0]
    yield looked[-1]


def test_it_strikes_once_rollouts_are_in_flight(tmp_path: Path) -> None:
    look, hit = struck(ToldFleet(tmp_path / "published", [0, None, 0, 3]), ONE_FAULT)
    assert (look, hit) == (4, 3)


@pytest.mark.parametrize("nothing", [0, None])
def test_it_strikes_in_the_end_if_there_are_none(tmp_path: Path, nothing: int | None) -> None:
    fleet = ToldFleet(tmp_path / "published", [nothing, nothing, 0])
    _, hit = struck(fleet, replace(ONE_FAULT, aim_s=0.2))
    assert hit == 0
