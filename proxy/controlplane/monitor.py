"""Ask every replica whether it lives: the server through /health, and the engine behind it through /is_paused.

A hung engine answers /health as if nothing were wrong. A probe that fails takes the replica out at once; one that
succeeds again only lets it join (P3). What it holds is the business of its keeper.
"""

from __future__ import annotations

import asyncio
import math

from proxy.controlplane.changes import woken
from proxy.controlplane.jobs_gate import job_behind
from proxy.controlplane.label import label_told
from proxy.controlplane.pausing import Pausing
from proxy.controlplane.replica_api import ReplicaApi
from proxy.fleet.pool import Fleet
from proxy.fleet.replica import Replica, ReplicaState
from proxy.settings import ControlSettings

LEAST_S = 0.05
"""A question gets so long at least, and what ends so shortly before its limit has run into it."""

MAX_WORDS = 200
"""Characters of what a server says that is not well. A proxy in its place repeats what it was told before."""

_SILENT = "its engine does not answer"


class Monitor:
    """Probes one replica."""

    def __init__(
        self, fleet: Fleet, replica: Replica, api: ReplicaApi, pausing: Pausing, settings: ControlSettings
    ) -> None:
        self._fleet = fleet
        self._replica = replica
        self._api = api
        self._pausing = pausing
        self._settings = settings
        self._wake = asyncio.Event()
        self._seen = replica.state
        self._alive_at = -math.inf
        """When its engine last answered, or was kept from it by a call of ours."""

    async def run(self) -> None:
        """Probe for ever. Cancel it to stop."""
        remove = self._fleet.on_change(self._fleet_changed)
        try:
            while True:
                self._wake.clear()
                await self._probe()
                await woken(self._wake, within_s=self._settings.probe_s)
        finally:
            remove()

    def _fleet_changed(self) -> None:
        """Look at once when a rollout has found the replica unfit."""
        if self._replica.state is not self._seen:
            self._seen = self._replica.state
            if self._seen is ReplicaState.JOINING:
                self._wake.set()

    async def _probe(self) -> None:
        fleet, replica, calls = self._fleet, self._replica, self._pausing.calls_so_far
        paused, why = await self._asked()
        if why:
            self._down(why)
            return
        if paused is not None:
            if replica in fleet.weights.reloading:
                return  # it is paused, and not read yet, for a reason
            if replica.state in (ReplicaState.READY, ReplicaState.QUARANTINED):
                await self._read_weights()
            if replica.state is ReplicaState.QUARANTINED:
                await self._pausing.read_back(replica, paused)
            elif replica.state is ReplicaState.READY:
                self._pausing.observed(replica, paused, calls=calls)
        if replica.state is ReplicaState.DOWN:
            fleet.set_state(replica, ReplicaState.JOINING, "it answers")

    async def _asked(self) -> tuple[bool | None, str]:
        """Ask the server and its engine, until PROXY_STALL_S after the last sign of life.

        Return whether the engine is paused (None: a call keeps it busy, so it was not asked), and what is wrong.
        """
        clock, stall_s, replica = self._fleet.clock, self._settings.stall_s, self._replica
        began = clock()
        while True:
            hung_at = max(self._alive_at, replica.heard_at, began - stall_s / 2) + stall_s
            health = await self._api.health(timeout_s=max(hung_at - clock(), LEAST_S))
            if health.status != 200:
                paused, why = None, f"/health: {health.status or 'no answer'} {health.message[:MAX_WORDS]}".strip()
            elif self._api.engine_is_busy(self._settings.call_stall_s):
                self._alive_at = clock()
                return None, ""
            else:
                paused, why = await self._api.is_paused(timeout_s=max(hung_at - clock(), LEAST_S)), _SILENT
            if paused is not None:
                self._alive_at = clock()
                return paused, ""
            replica.silent = clock() >= hung_at - LEAST_S
            if not replica.silent or replica.heard_at + stall_s <= hung_at:
                return None, why
            # Rollouts have got bytes meanwhile: it is slow, not hung.

    async def _read_weights(self) -> None:
        """Look whether a replica has restarted between two probes, or has the fleet's base weights by now."""
        fleet, replica = self._fleet, self._replica
        if replica.is_ready and fleet.weights.version is None:
            return  # nobody has changed base weights: a restart is seen by the policies that are missing
        label = await label_told(fleet, replica, self._api)
        if label is None:
            return
        if replica.weights is not None and label not in (replica.weights, fleet.weights.version):
            self._down(f"it has restarted: its base weights are labelled {label}, not {replica.weights}")
        else:
            fleet.saw_weights(replica, label)

    def _down(self, why: str) -> None:
        if self._replica.state is not ReplicaState.DRAINING:
            about = self._replica.about or job_behind(self._replica.url)
            self._fleet.set_state(self._replica, ReplicaState.DOWN, f"{why} ({about})" if about else why)
