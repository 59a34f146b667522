"""Ask every replica whether it lives: the server through /health, and the engine behind it through /is_paused.

A hung engine answers /health as if nothing were wrong. A probe that fails takes the replica out at once; one that
succeeds again only lets it join (P3). What it holds is the business of its keeper.
"""

from __future__ import annotations

import asyncio

from proxy.controlplane.changes import woken
from proxy.controlplane.jobs_gate import job_behind
from proxy.controlplane.label import label_told
from proxy.controlplane.pausing import Pausing
from proxy.controlplane.replica_api import ReplicaApi
from proxy.fleet.pool import Fleet
from proxy.fleet.replica import Replica, ReplicaState
from proxy.settings import ControlSettings


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
        fleet, replica = self._fleet, self._replica
        health = await self._api.health()
        if health.status != 200:
            self._down(f"/health: {health.status or 'no answer'} {health.message}".strip())
            return
        if not self._api.engine_is_busy(self._settings.call_stall_s):
            calls = self._pausing.calls_so_far
            paused = await self._api.is_paused()
            if paused is None:
                self._down("its engine does not answer")
                return
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

    async def _read_weights(self) -> None:
        """Look whether a replica has restarted between two probes, or has the fleet's base weights by now."""
        fleet, replica = self._fleet, self._replica
        if replica.is_ready and fleet.weights.version is None:
            return  # nobody has changed base weights: a restart is seen by the policies that are missing
        label = await label_told(fleet, replica, self._api)
        if label is None:
            return
        if label not in (replica.weights, fleet.weights.version):
            self._down(f"it has restarted: its base weights are labelled {label}, not {replica.weights}")
        else:
            fleet.saw_weights(replica, label)

    def _down(self, why: str) -> None:
        if self._replica.state is not ReplicaState.DRAINING:
            about = self._replica.about or job_behind(self._replica.url)
            self._fleet.set_state(self._replica, ReplicaState.DOWN, f"{why} ({about})" if about else why)
