"""Who belongs to the fleet: replicas come and go while everything runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from proxy.controlplane.changes import Changes
from proxy.controlplane.keeper import Keeper
from proxy.controlplane.monitor import Monitor
from proxy.controlplane.pausing import Pausing
from proxy.controlplane.replica_api import ReplicaApi
from proxy.fleet.pool import Fleet
from proxy.fleet.replica import Replica, ReplicaState
from proxy.settings import ControlSettings


class Members:
    """Starts and ends the loops of every replica. `apis` is shared with all who call replicas, by index."""

    def __init__(
        self,
        fleet: Fleet,
        apis: dict[int, ReplicaApi],
        make_api: Callable[[str], ReplicaApi],
        pausing: Pausing,
        changes: Changes,
        settings: ControlSettings,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._fleet = fleet
        self._apis = apis
        self._make_api = make_api
        self._pausing = pausing
        self._changes = changes
        self._settings = settings
        self._tasks = tasks
        self._loops: dict[Replica, list[asyncio.Task[None]]] = {}
        self._removals: dict[Replica, asyncio.Task[None]] = {}

    def watch(self, replica: Replica) -> None:
        """Begin to look after a replica of the fleet."""
        api = self._apis[replica.index] = self._make_api(replica.url)
        keeper = Keeper(self._fleet, replica, api, self._pausing, self._settings, self._tasks)
        monitor = Monitor(self._fleet, replica, api, self._pausing, self._settings)
        self._loops[replica] = [self._tasks.create_task(keeper.run()), self._tasks.create_task(monitor.run())]

    def add(self, url: str) -> Replica:
        """Take a replica in, or return the one that has this URL already. It joins by itself."""
        known = next((replica for replica in self._fleet.replicas if replica.url == url), None)
        if known is not None and known.state is not ReplicaState.DRAINING:
            return known
        replica = self._fleet.add_replica(url)
        self.watch(replica)
        return replica

    async def is_ready(self, replica: Replica) -> bool:
        """Wait until a replica has joined, up to PROXY_LORA_LOAD_TIMEOUT_S; return whether it has."""
        deadline = self._fleet.clock() + self._settings.lora_load_timeout_s
        return await self._changes.wait_until(lambda: replica.is_ready, deadline=deadline)

    def remove(self, replica: Replica, why: str = "it is being removed") -> asyncio.Task[None]:
        """Let a replica go: no new rollouts, wait for those it has up to PROXY_DRAIN_TIMEOUT_S, then forget it."""
        if replica not in self._removals:
            drain_s = self._settings.drain_timeout_s if replica.is_up else 0.0
            self._fleet.set_state(replica, ReplicaState.DRAINING, why)
            self._removals[replica] = self._tasks.create_task(self._remove(replica, self._fleet.clock() + drain_s))
        return self._removals[replica]

    async def _remove(self, replica: Replica, deadline: float) -> None:
        fleet = self._fleet
        if not await self._changes.wait_until(lambda: replica.inflight == 0, deadline=deadline):
            said = f"removed with {replica.inflight} rollouts in flight"
            fleet.note("replica.cut_short", said, level="warning", replica=replica)
        for loop in self._loops.pop(replica, []):
            loop.cancel()
        # What still waits for an answer goes to another replica.
        fleet.set_state(replica, ReplicaState.DOWN, "it has been removed")
        fleet.remove_replica(replica)
        del self._removals[replica]

    def stop(self) -> None:
        """End all loops."""
        for loop in [loop for loops in self._loops.values() for loop in loops] + list(self._removals.values()):
            loop.cancel()
