"""Settle the fleet: decide what becomes of every policy whenever something changes or a deadline passes.

This is the half of the loop that sees all replicas; `keeper` is the half that talks to one. Both only compare what is
wanted with what is there, so that load, unload, join, restart, rollback and repair need no steps of their own.
"""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

from proxy.artifacts.digest import CONFIG_FILE
from proxy.controlplane.changes import woken
from proxy.controlplane.looking import look
from proxy.controlplane.plan import Fate, decide, disagreement, no_longer_loads, surplus
from proxy.fleet.policies import Policy, PolicyState
from proxy.fleet.pool import Fleet
from proxy.settings import ControlSettings


class Reconciler:
    """Carries out what `plan` decides about policies."""

    def __init__(self, fleet: Fleet, settings: ControlSettings) -> None:
        self._fleet = fleet
        self._settings = settings
        self._wake = asyncio.Event()
        fleet.on_change(self._wake.set)

    async def run(self) -> None:
        """Settle for ever, and look for the files of blocked policies beside it: their mount may hang."""
        async with asyncio.TaskGroup() as beside:
            beside.create_task(self._look_for_blocked())
            while True:
                self._wake.clear()
                self.settle()
                await woken(self._wake, within_s=self._next_s())

    def settle(self) -> None:
        """Bring every policy as far as it can go now. Synchronous: nobody sees half of it."""
        fleet = self._fleet
        for policy in fleet.occupying():
            match policy.state:
                case PolicyState.LOADING:
                    self._settle_loading(policy)
                case PolicyState.RETIRING:
                    self._settle_retiring(policy)
            if policy.adopted and (why := no_longer_loads(policy, fleet.replicas, now=fleet.clock())) is not None:
                fleet.retire(policy, why, deadline=fleet.clock())
        for policy in surplus(fleet.policies.values(), slots=fleet.slots()):
            fleet.hurry(policy, "the replicas have no slot for it")

    def _settle_loading(self, policy: Policy) -> None:
        fleet = self._fleet
        decision = decide(policy, fleet.replicas, quorum=self._settings.load_quorum, now=fleet.clock())
        if decision.fate is Fate.WAIT:
            self._send_scout(policy)
        elif decision.fate is Fate.COMMIT:
            if (differing := disagreement(policy, fleet.replicas)) is not None:
                fleet.note("policy.differs", differing, level="error", policy=policy)
            fleet.commit(policy)
        else:
            fleet.set_policy_state(policy, PolicyState.FAILED, decision.why)

    def _send_scout(self, policy: Policy) -> None:
        """Tell the others once the scout has proven the policy; send another one if it has left."""
        if policy.scout is None:
            return
        ready = {replica.index: replica for replica in self._fleet.ready}
        scout = ready.get(policy.scout)
        if scout is None:
            policy.scout = min(ready)
        elif scout.has_proven(policy):
            policy.scout = None
        else:
            return
        self._fleet.changed()

    def _settle_retiring(self, policy: Policy) -> None:
        fleet = self._fleet
        if policy.leases and fleet.clock() < policy.deadline:
            return
        if policy.leases:
            fleet.note("policy.cut_short", f"unloaded with {policy.leases} rollouts in flight", policy=policy)
        fleet.set_policy_state(policy, PolicyState.RETIRED, policy.reason)

    async def _look_for_blocked(self) -> None:
        """Let policies that have killed engines be tried again once their files can be seen. For ever."""
        while True:
            for policy in [policy for policy in self._fleet.live() if policy.blocked]:
                await self._unblock(policy)
            await asyncio.sleep(self._settings.probe_s)

    async def _unblock(self, policy: Policy) -> None:
        try:
            is_there = await look(self._settings.call_timeout_s, (Path(policy.path) / CONFIG_FILE).exists)
        except TimeoutError:
            return  # its mount hangs
        if is_there:
            policy.blocked = ""
            self._fleet.note("policy.unblocked", f"its files are in {policy.path}", policy=policy)
            self._fleet.changed()

    def _next_s(self) -> float:
        """Return the seconds to the next deadline, at most one probe's pause."""
        now = self._fleet.clock()
        deadlines = [p.deadline for p in self._fleet.occupying() if p.state is not PolicyState.LIVE]
        return max(min([self._settings.probe_s, *(at - now for at in deadlines if math.isfinite(at))]), 0.001)
