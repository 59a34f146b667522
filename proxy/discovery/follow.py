"""Keep the fleet in line with what a source lists."""

from __future__ import annotations

import asyncio
from typing import Protocol

from proxy.discovery.listing import Listing, Lookup, LookupFailed
from proxy.discovery.plan import plan
from proxy.fleet.pool import Fleet
from proxy.fleet.replica import Replica, ReplicaState
from proxy.metrics.lookups import LookupMetrics

LOOKUP_S = 30.0
"""Seconds for one lookup in all: a little longer than the Hub's client goes on trying by itself."""

_LONGEST_PAUSE_S = 30.0
"""Between two lookups of a source that fails: its limits are counted over minutes."""


class Members(Protocol):
    """Who lets replicas in and out."""

    def add(self, url: str) -> Replica:
        """Take a replica in."""

    def remove(self, replica: Replica, why: str) -> object:
        """Let a replica go."""


class Discovery:
    """Asks a source again and again. What it cannot tell changes nothing."""

    def __init__(
        self, fleet: Fleet, members: Members, lookup: Lookup, metrics: LookupMetrics, *, source: str, every_s: float
    ) -> None:
        self._fleet = fleet
        self._members = members
        self._lookup = lookup
        self._metrics = metrics
        self._source = source
        self._every_s = every_s
        self._added: dict[str, Replica] = {}
        self._before: frozenset[str] = frozenset()
        self._unusable: tuple[str, ...] = ()
        self._failures = 0

    async def run(self) -> None:
        """Follow the source for ever. Cancel it to stop."""
        while True:
            try:
                async with asyncio.timeout(LOOKUP_S):
                    listing = await self._lookup()
            except LookupFailed as failed:
                self._failed(str(failed))
            except TimeoutError:
                self._failed(f"no answer within {LOOKUP_S:g} s")
            else:
                self._follow(listing)
            await asyncio.sleep(pause_s(self._failures, every_s=self._every_s))

    def _failed(self, why: str) -> None:
        self._metrics.looked("failed")
        self._failures += 1
        if self._fleet.discovering and self._fleet.replicas:  # those that there are need not wait for others
            self._fleet.discovering = False
            self._fleet.changed()
        if self._failures == 1:
            said = f"{self._source}: {why}; the fleet stays as it is until it can be read again"
            self._fleet.note("discovery.failed", said, level="warning")

    def _follow(self, listing: Listing) -> None:
        self._metrics.looked("listed")
        if self._failures:
            self._fleet.note("discovery.works", f"{self._source} can be read again after {self._failures} failures")
        self._failures = 0
        for said in listing.unusable:
            if said not in self._unusable:
                self._fleet.note("discovery.unusable", said, level="warning")
        self._unusable = listing.unusable
        self._move(listing)
        for replica in self._fleet.replicas:
            replica.about = listing.replicas.get(replica.url, "")
        self._fleet.discovering = False
        self._fleet.changed()

    def _move(self, listing: Listing) -> None:
        present = {r.url: r for r in self._fleet.replicas if r.state is not ReplicaState.DRAINING}
        ours = [url for url, replica in self._added.items() if present.get(url) is replica]
        moves = plan(listing.replicas, before=self._before, present=present.keys(), ours=ours)
        for url in moves.add:
            self._added[url] = self._members.add(url)
            self._fleet.note("replica.found", f"listed by {self._source}", replica=self._added[url])
        for url in moves.remove:
            why = f"{self._source} does not list it any more"
            told = f" ({listing.gone[url]})" if url in listing.gone else ""
            self._members.remove(self._added[url], why + told)
        self._before = frozenset(listing.replicas)
        self._added = {url: replica for url, replica in self._added.items() if url in self._before}


def pause_s(failures: int, *, every_s: float) -> float:
    """Return the seconds to the next lookup after so many failures in a row: doubled, up to half a minute."""
    return min(every_s * 2.0 ** min(failures, 16), max(every_s, _LONGEST_PAUSE_S))
