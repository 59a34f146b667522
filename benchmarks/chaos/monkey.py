"""Strike in a random order, one fault every so many seconds, and watch how long the fleet takes to recover from each.

Kinds are dealt from a shuffled deck, so that each comes up; and a fault waits until there is something for it to hit.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx2

from benchmarks.chaos.faults import Act, Kind, Site
from benchmarks.chaos.fleet import Fleet
from benchmarks.chaos.scale import Scale
from benchmarks.chaos.tally import Tally
from proxy.demo.run import wait

LOOK_EVERY_S = 0.1


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

    def __init__(self, fleet: Fleet, tally: Tally, scale: Scale, kinds: Sequence[Kind], *, seed: int) -> None:
        self._kinds = kinds
        self.by_kind = {kind.name: Struck() for kind in kinds}
        self._fleet = fleet
        self._tally = tally
        self._scale = scale
        self._random = random.Random(seed)
        self._out: set[Site] = set()
        """Replicas that a fault keeps from serving, or that have not recovered from it."""
        self._deck: list[Kind] = []
        """Kinds that are still to come in this round."""
        self._all_struck = False
        """A fault of what all depend on is in force."""

    @property
    def has_hit_enough(self) -> bool:
        """Whether every kind has hit as many rollouts as it takes to prove something."""
        return not any(self._has_hit_little(kind) for kind in self._kinds)

    async def run(self, stop: asyncio.Event) -> None:
        """Strike until `stop`; return when every fault has ended and what it struck has recovered."""
        async with asyncio.TaskGroup() as faults:
            while not await wait(stop, self._scale.every_s):
                if not self._deck:
                    short = [kind for kind in self._kinds if self._has_hit_little(kind)]
                    self._deck = deck(short or self._kinds, shares=self._scale.shares, chance=self._random)
                position = next((n for n, kind in enumerate(self._deck) if self._can_strike(kind)), None)
                if position is None:
                    continue
                faults.create_task(self._fault(self._deck.pop(position), stop))

    def _has_hit_little(self, kind: Kind) -> bool:
        return self.by_kind[kind.name].hit < self._scale.least_hits

    def _can_strike(self, kind: Kind) -> bool:
        """Half of the replicas are always left, so that there is somebody to serve."""
        if kind.everyone:
            return not self._all_struck
        return not kind.takes_out or 2 * (len(self._out) + 1) <= len(self._fleet.sites)

    async def _fault(self, kind: Kind, stop: asyncio.Event) -> None:
        struck = self._victims(kind)
        if kind.takes_out:
            self._out.update(struck)
        self._all_struck = self._all_struck or kind.everyone
        self._begins(kind.name, await self._aim(kind, struck, stop))
        try:
            await self._on_each(kind, kind.strike, struck)
            if kind.lasts and not (kind.restarts and self._scale.vllm):  # starting takes long enough
                await wait(stop, self._random.uniform(*self._scale.fault_s))
                await self._met(kind, struck, stop)
            await self._on_each(kind, kind.end, struck)
            await self._recovery(kind, struck)
        finally:
            self._tally.ends(kind.name)
            if kind.takes_out:
                self._out.difference_update(struck)
            self._all_struck = self._all_struck and not kind.everyone

    async def _on_each(self, kind: Kind, act: Act, struck: list[Site]) -> None:
        once = struck[:1] if kind.everyone else struck
        await asyncio.gather(*(asyncio.to_thread(act, site) for site in once))

    def _begins(self, kind: str, hit: int) -> None:
        self.by_kind[kind].faults += 1
        self.by_kind[kind].hit += hit
        self._tally.begins(kind)

    def _victims(self, kind: Kind) -> list[Site]:
        if kind.everyone:
            return list(self._fleet.sites)
        whole = [site for site in self._fleet.sites if site not in self._out]
        return self._random.sample(whole, self._random.randint(1, len(whole)) if kind.many else 1)

    async def _aim(self, kind: Kind, struck: list[Site], stop: asyncio.Event) -> int:
        """Wait for rollouts in flight on what is about to be struck, but not for ever; return how many there are."""
        deadline = time.monotonic() + self._scale.aim_s
        while True:
            hits = len(self._tally.in_flight) if kind.everyone else await self._in_flight_on(struck)
            if hits or time.monotonic() > deadline or await wait(stop, LOOK_EVERY_S):
                return hits

    async def _met(self, kind: Kind, struck: list[Site], stop: asyncio.Event) -> None:
        """Wait until a fault has met what it is there for, but not for ever."""
        deadline = time.monotonic() + self._scale.aim_s
        while not all(kind.has_met(site) for site in struck) and time.monotonic() < deadline:
            if await wait(stop, LOOK_EVERY_S):
                return

    async def _in_flight_on(self, struck: list[Site]) -> int:
        """Return how many rollouts these replicas have, by the proxy's count; none while it is away."""
        try:
            standings = await self._fleet.standings()
        except httpx2.HTTPError:
            return 0
        return sum(standings[site.wire.url].inflight for site in struck)

    async def _recovery(self, kind: Kind, struck: list[Site]) -> None:
        """Wait until all that was struck is ready again, but for what another fault has taken out meanwhile."""
        began = time.monotonic()
        while (took := time.monotonic() - began) < self._scale.recover_s:
            if await self._are_ready(kind, struck):
                self.by_kind[kind.name].recovered_s.append(took)
                return
            await asyncio.sleep(LOOK_EVERY_S)
        self.by_kind[kind.name].never += 1
        self._tally.tell(f"never: {struck} did not recover from {kind.name}: {await self._standings()}")

    async def _are_ready(self, kind: Kind, struck: list[Site]) -> bool:
        try:
            standings = await self._fleet.standings()
        except httpx2.HTTPError:
            return False
        ours = [site for site in struck if kind.takes_out or site not in self._out]
        return all(standings[site.wire.url].state == "ready" for site in ours)

    async def _standings(self) -> str:
        try:
            return str(await self._fleet.standings())
        except httpx2.HTTPError as error:
            return f"the proxy does not answer: {error}"


def deck(kinds: Sequence[Kind], *, shares: int, chance: random.Random) -> list[Kind]:
    """Return one round: each kind once if it ends runs, else `shares` times, shuffled."""
    cards = [kind for kind in kinds for _ in range(1 if kind.ends_runs else shares)]
    chance.shuffle(cards)
    return cards
