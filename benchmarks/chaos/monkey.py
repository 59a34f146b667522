"""Strike at random, one fault every so many seconds, and watch how long the fleet takes to recover from each."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field

import httpx2

from benchmarks.chaos.faults import PROCESS_KINDS, PROXY, STORAGE_KINDS, Kind, kill_proxy
from benchmarks.chaos.fleet import Fleet
from benchmarks.chaos.scale import Scale
from benchmarks.chaos.tally import Tally
from proxy.demo.run import wait
from tests.support.replicas import Replica

LOOK_EVERY_S = 0.1

SHARES = 4
"""How often other faults come for each of those that end a run of TRL, so that some runs last."""


@dataclass
class Struck:
    """What the faults of one kind have hit."""

    faults: int = 0
    hit: int = 0
    """Rollouts in flight, at that moment, on what was struck: the replicas, or the proxy."""
    recovered_s: list[float] = field(default_factory=list)
    """Seconds from the end of each fault until what it had struck was ready again."""
    never: int = 0
    """Faults after which something did not come back in time."""


class Monkey:
    """Breaks the fleet. `by_kind` has what it did."""

    def __init__(self, fleet: Fleet, tally: Tally, scale: Scale, *, seed: int) -> None:
        self._kinds = PROCESS_KINDS if scale.vllm else [*PROCESS_KINDS, *STORAGE_KINDS]
        self.by_kind = {name: Struck() for name in (PROXY, *(kind.name for kind in self._kinds))}
        self._fleet = fleet
        self._tally = tally
        self._scale = scale
        self._random = random.Random(seed)
        self._out: set[Replica] = set()
        """Replicas that a fault keeps from serving, or that have not recovered from it."""
        self._bag: list[Kind | None] = []
        """Kinds that are still to come in this round; None: the proxy."""
        self._proxy_is_away = False

    @property
    def has_hit_enough(self) -> bool:
        """Whether every kind has hit as many rollouts as it takes to prove something."""
        return all(struck.hit >= self._scale.least_hits for struck in self.by_kind.values())

    async def run(self, stop: asyncio.Event) -> None:
        """Strike until `stop`; return when every fault has ended and what it struck has recovered."""
        async with asyncio.TaskGroup() as faults:
            while not await wait(stop, self._scale.every_s):
                if not self._bag:
                    self._bag = self._round()
                position = next((n for n, kind in enumerate(self._bag) if self._can_strike(kind)), None)
                if position is None:
                    continue
                kind = self._bag.pop(position)
                faults.create_task(self._kill_proxy() if kind is None else self._fault(kind, stop))

    def _round(self) -> list[Kind | None]:
        shares = 1 if self._scale.vllm else SHARES
        bag: list[Kind | None] = [None]
        bag += [kind for kind in self._kinds for _ in range(1 if kind.ends_runs else shares)]
        self._random.shuffle(bag)
        return bag

    def _can_strike(self, kind: Kind | None) -> bool:
        """Half of the replicas are always left, so that there is somebody to serve."""
        if kind is None:
            return not self._proxy_is_away
        return not kind.takes_out or 2 * (len(self._out) + 1) <= len(self._fleet.replicas)

    async def _fault(self, kind: Kind, stop: asyncio.Event) -> None:
        struck = self._victims(kind)
        if kind.takes_out:
            self._out.update(struck)
        self._begins(kind.name, await self._hits(struck))
        try:
            await asyncio.gather(*(asyncio.to_thread(kind.strike, replica) for replica in struck))
            if kind.lasts:
                await wait(stop, self._random.uniform(*self._scale.fault_s))
            await asyncio.gather(*(asyncio.to_thread(kind.end, replica) for replica in struck))
            await self._recovery(kind.name, struck)
        finally:
            self._tally.ends(kind.name)
            if kind.takes_out:
                self._out.difference_update(struck)

    async def _kill_proxy(self) -> None:
        self._begins(PROXY, len(self._tally.in_flight))
        self._proxy_is_away = True
        try:
            await asyncio.to_thread(kill_proxy, self._fleet.proxy)
            await self._recovery(PROXY, list(self._fleet.replicas))
        finally:
            self._tally.ends(PROXY)
            self._proxy_is_away = False

    def _begins(self, kind: str, hit: int) -> None:
        self.by_kind[kind].faults += 1
        self.by_kind[kind].hit += hit
        self._tally.begins(kind)

    def _victims(self, kind: Kind) -> list[Replica]:
        whole = [replica for replica in self._fleet.replicas if replica not in self._out]
        return self._random.sample(whole, self._random.randint(1, len(whole)) if kind.many else 1)

    async def _hits(self, struck: list[Replica]) -> int:
        hits = 0
        for replica in struck:
            try:
                hits += await self._fleet.in_flight_on(replica)
            except httpx2.HTTPError:
                self._tally.tell(f"monkey: {replica} did not say what it has in flight")
        return hits

    async def _recovery(self, kind: str, struck: list[Replica]) -> None:
        """Wait until all that was struck is ready again, but for what another fault has taken out meanwhile."""
        began = time.monotonic()
        while (took := time.monotonic() - began) < self._scale.recover_s:
            if await self._are_ready(kind, struck):
                self.by_kind[kind].recovered_s.append(took)
                return
            await asyncio.sleep(LOOK_EVERY_S)
        self.by_kind[kind].never += 1
        self._tally.tell(f"never: {struck} did not recover from {kind}: {await self._standings()}")

    async def _are_ready(self, kind: str, struck: list[Replica]) -> bool:
        try:
            standings = await self._fleet.standings()
        except httpx2.HTTPError:
            return False
        takes_out = any(kind == other.name and other.takes_out for other in PROCESS_KINDS)
        ours = [replica for replica in struck if takes_out or replica not in self._out]
        return all(standings[replica.url].state == "ready" for replica in ours)

    async def _standings(self) -> str:
        try:
            return str(await self._fleet.standings())
        except httpx2.HTTPError as error:
            return f"the proxy does not answer: {error}"
