"""Take policies away: an unload is promised at once and carried out when its rollouts are done (P4)."""

from __future__ import annotations

import asyncio
import logging

from proxy.controlplane.plan import is_remnant
from proxy.controlplane.replica_api import ReplicaApi
from proxy.fleet.policies import Policy, PolicyState
from proxy.fleet.pool import Fleet
from proxy.fleet.replica import Replica, ReplicaState
from proxy.settings import ControlSettings

logger = logging.getLogger(__name__)


class Retiring:
    """Carries out unloads. `tasks` outlives every request and waits for the unloads under way."""

    def __init__(
        self, fleet: Fleet, apis: dict[int, ReplicaApi], settings: ControlSettings, tasks: asyncio.TaskGroup
    ) -> None:
        self._fleet = fleet
        self._apis = apis
        self._settings = settings
        self._tasks = tasks
        self._under_way: dict[str, asyncio.Task[None]] = {}
        self._hurry: dict[str, asyncio.Event] = {}
        fleet.on_change(self._wake_idle)

    def retire(self, policy: Policy, reason: str) -> None:
        """Promise to unload `policy`: rollouts that name it are served until its unload is sent. Safe to call twice."""
        if policy.state is not PolicyState.LIVE:
            return
        self._hurry[policy.name] = asyncio.Event()
        self._fleet.set_policy_state(policy, PolicyState.RETIRING, reason)
        self._under_way[policy.name] = self._tasks.create_task(self._unload_when_idle(policy))

    async def finish(self, policy: Policy, reason: str) -> None:
        """Unload `policy` now, with rollouts in flight if need be (vLLM lets these finish), and wait for its end."""
        self.retire(policy, reason)
        self._hurry[policy.name].set()
        await asyncio.shield(self._under_way[policy.name])

    async def settled(self, name: str) -> None:
        """Wait until no unload of `name` is under way: a load sent meanwhile could be undone by it."""
        while (task := self._under_way.get(name)) is not None:
            await asyncio.shield(task)

    def leaving(self) -> list[str]:
        """Return the policies whose unload is on its way: nobody may use them, but replicas may hold them still."""
        return [name for name in self._under_way if name not in self._hurry]

    def _wake_idle(self) -> None:
        for name, hurry in self._hurry.items():
            if (policy := self._fleet.policies.get(name)) is not None and policy.leases == 0:
                hurry.set()

    async def _unload_when_idle(self, policy: Policy) -> None:
        hurry = self._hurry[policy.name]
        try:
            async with asyncio.timeout(self._settings.unload_wait_s):
                if policy.leases:
                    await hurry.wait()
        except TimeoutError:
            logger.warning("unloading %s with %d rollouts in flight", policy.name, policy.leases)
        finally:
            self._fleet.set_policy_state(policy, PolicyState.RETIRED, policy.reason)
            del self._hurry[policy.name]
        async with asyncio.TaskGroup() as group:
            for replica in self._fleet.up:
                group.create_task(self.unload_on(replica, policy.name))
        del self._under_way[policy.name]

    async def unload_on(self, replica: Replica, name: str) -> bool:
        """Unload `name` from one replica; return whether it is surely gone. 404 is as good as 200."""
        if replica.state is ReplicaState.DOWN:
            return True  # it comes back without it, or the join takes it away
        async with self._apis[replica.index].lifecycle:
            return await self._unload(replica, name)

    async def remove_remnant(self, replica: Replica, name: str) -> None:
        """Unload `name` from a replica that should not hold it, unless it has been announced again meanwhile."""
        async with self._apis[replica.index].lifecycle:
            if is_remnant(self._fleet.policies.get(name), replica.held.get(name)):
                await self._unload(replica, name)

    async def _unload(self, replica: Replica, name: str) -> bool:
        answer = await self._apis[replica.index].unload(name)
        gone = answer.status in (200, 404)
        if gone:
            replica.held.pop(name, None)
        else:
            logger.warning("replica %s did not unload %s: %s %s", replica.url, name, answer.status, answer.message)
        return gone
