"""Watch every replica: probe it, notice when it is gone or has restarted, let it in again only when it is whole (P3).

One loop for each replica. A probe that fails takes it out at once; from there it comes back only by joining.
"""

from __future__ import annotations

import asyncio
import logging

from proxy.contract import version_of
from proxy.controlplane.loading import Loading
from proxy.controlplane.plan import Adopt, Load, Unload, is_remnant, live_missing, plan
from proxy.controlplane.replica_api import LoadOutcome, ReplicaApi, adapters
from proxy.controlplane.retiring import Retiring
from proxy.fleet.policies import Policy, PolicyState
from proxy.fleet.pool import Fleet
from proxy.fleet.replica import Facts, Replica, ReplicaState
from proxy.settings import ControlSettings

logger = logging.getLogger(__name__)


class Monitor:
    """Probes and joins."""

    def __init__(
        self,
        fleet: Fleet,
        apis: dict[int, ReplicaApi],
        loading: Loading,
        retiring: Retiring,
        settings: ControlSettings,
    ) -> None:
        self._fleet = fleet
        self._apis = apis
        self._loading = loading
        self._retiring = retiring
        self._settings = settings
        self._wake = {replica.index: asyncio.Event() for replica in fleet.replicas}
        fleet.on_change(self._wake_joining)

    async def run(self) -> None:
        """Watch all replicas for ever."""
        async with asyncio.TaskGroup() as group:
            for replica in self._fleet.replicas:
                group.create_task(self._watch(replica))

    def _wake_joining(self) -> None:
        for replica in self._fleet.replicas:
            if replica.state is ReplicaState.JOINING:
                self._wake[replica.index].set()

    async def _watch(self, replica: Replica) -> None:
        wake = self._wake[replica.index]
        while True:
            wake.clear()
            await self._look(replica)
            try:
                async with asyncio.timeout(self._settings.probe_s):
                    await wake.wait()
            except TimeoutError:
                continue
            # A join that does not succeed must not spin on the changes that it makes itself.
            await asyncio.sleep(self._settings.probe_s / 20)

    async def _look(self, replica: Replica) -> None:
        api = self._apis[replica.index]
        health = await api.health()
        if health.status != 200:
            said = f"/health: {health.status or 'no answer'} {health.message}".strip()
            self._fleet.set_state(replica, ReplicaState.DOWN, said)
            return
        if replica.is_ready:
            await self._compare(replica, api)
        if not replica.is_ready:
            await self._join(replica, api)

    async def _compare(self, replica: Replica, api: ReplicaApi) -> None:
        """Read what a ready replica holds; take it out if it lacks a live policy, since then it has restarted."""
        async with api.lifecycle:
            models = await api.models()
            if models is None:
                return
            replica.held = adapters(models)
            missing = live_missing(self._fleet.policies.values(), replica.held)
            if missing:
                names = ", ".join(policy.name for policy in missing)
                self._fleet.set_state(replica, ReplicaState.JOINING, f"it has lost {names}")
        # An unload that got no answer, or that a load overtook, leaves its policy behind in one of vLLM's slots.
        for name, path in list(replica.held.items()):
            if is_remnant(self._fleet.policies.get(name), path):
                await self._retiring.remove_remnant(replica, name)

    async def _join(self, replica: Replica, api: ReplicaApi) -> None:
        """Load what is missing, confirm, then let it in."""
        if replica.state is ReplicaState.DOWN:
            self._fleet.set_state(replica, ReplicaState.JOINING, "it answers")
        models = await api.models()
        if models is None:
            self._fleet.set_state(replica, ReplicaState.JOINING, "/v1/models does not answer")
            return
        facts = await api.facts(models)
        self._note(replica, facts)
        replica.held = adapters(models)
        for action in plan(self._fleet.policies, replica.held):
            match action:
                case Adopt(name, path):
                    self._adopt(replica, name, path)
                case Unload(name):
                    await self._retiring.remove_remnant(replica, name)
                case Load(policy):
                    await self._load_missing(replica, policy)
        async with api.lifecycle:
            confirmed = await api.models()
            if confirmed is None:
                return
            replica.held = adapters(confirmed)
            if missing := self._fleet.admit(replica, facts):
                names = ", ".join(policy.name for policy in missing)
                reason = replica.reason if replica.reason.startswith("cannot load") else f"lacks {names}"
                self._fleet.set_state(replica, ReplicaState.JOINING, reason)

    def _note(self, replica: Replica, facts: Facts) -> None:
        """Log what the replica lacks, once for each of its lives."""
        if replica.facts is None or replica.facts.lacks != facts.lacks:
            for lack in facts.lacks:
                logger.warning("replica %s: %s", replica.url, lack.message)
        replica.facts = facts

    def _adopt(self, replica: Replica, name: str, path: str) -> None:
        policy = Policy(
            name=name,
            path=path,
            version=version_of(name),
            step=None,
            digest=None,
            announced_at=self._fleet.clock(),
            adopted=True,
        )
        logger.info("adopting %s, found on %s", name, replica.url)
        self._fleet.add_policy(policy)
        self._fleet.commit(policy, [replica])

    async def _load_missing(self, replica: Replica, policy: Policy) -> None:
        asked = await self._loading.ask(replica, policy, first=False)
        if asked.outcome is LoadOutcome.LOADED:
            return
        self._fleet.set_state(replica, ReplicaState.JOINING, f"cannot load {policy.name}: {asked.message}")
        final = asked.outcome in (LoadOutcome.LATE, LoadOutcome.TORN, LoadOutcome.REFUSED)
        if policy.adopted and final and policy.state is PolicyState.LIVE:
            # It was found, not announced: nobody vouches for its files, and it must not keep a replica out.
            self._retiring.retire(policy, f"adopted, but {replica.url} cannot load it: {asked.message}")
