"""Base weights from a checkpoint in the store: no network between the machines, and no replica that serves half of it.

Rolling: one replica after the other, each once its rollouts have ended, so that none is of two versions; the others
serve on. Together: all at once, while rollouts stand still and then go on with the new weights. What does not reach a
replica keeps that replica out, and it is reloaded as soon as it is back.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import PurePosixPath
from typing import Any, Literal, TypeVar

from proxy.artifacts.checkpoint import MODEL_CONFIG
from proxy.contract import ReloadReport, ReloadRequest, ReplicaReload
from proxy.controlplane.announcing import refuse_path
from proxy.controlplane.changes import Changes
from proxy.controlplane.checkpoints import Checkpoints
from proxy.controlplane.keeper import REPAIR_EVERY_S
from proxy.controlplane.pausing import Pausing
from proxy.controlplane.replica_api import ReplicaApi
from proxy.controlplane.rereading import FailedError, Rereading
from proxy.controlplane.storage import Gate
from proxy.controlplane.turn import Turn
from proxy.errors import ApiError
from proxy.fleet.policies import PolicyState
from proxy.fleet.pool import Fleet
from proxy.fleet.replica import Replica, ReplicaState
from proxy.fleet.weights import ORIGINAL, UPDATING, Member, policy_in
from proxy.settings import ControlSettings
from proxy.threads import in_daemon_thread

Result = TypeVar("Result")


class Reloading:
    """Carries out reloads, one at a time, and repeats them on replicas that lack one."""

    def __init__(
        self,
        fleet: Fleet,
        apis: Mapping[int, ReplicaApi],
        pausing: Pausing,
        changes: Changes,
        gate: Gate,
        turn: Turn,
        settings: ControlSettings,
    ) -> None:
        self._fleet = fleet
        self._apis = apis
        self._pausing = pausing
        self._changes = changes
        self._gate = gate
        self._turn = turn
        self._settings = settings
        self._checkpoints = Checkpoints()
        self._rereading = Rereading(fleet, apis, changes, settings)
        self._unattended = False
        """A reload is under way that nobody waits for: a repair, or one whose caller has left."""
        self._tried: dict[int, tuple[int, float]] = {}
        """By a replica's serial, the life in which it was reloaded last by itself, and when."""

    async def reload(self, request: ReloadRequest) -> ReloadReport:
        """Bring a checkpoint to every replica that is up.

        A caller that leaves has called it off only until the first replica is touched: half a reload would keep
        replicas out for nothing. Raises ApiError: 400 and 409 before any replica has been touched; 500 if none of them
        serves it in the end, with the report in its details.
        """
        fleet, clock = self._fleet, self._fleet.clock
        began = clock()
        await self._changes.wait_until(lambda: not self._unattended, deadline=began + self._settings.reload_timeout_s)
        with self._turn.taken(f"the reload of {request.name}"):
            if fleet.weights.update is not None:
                raise ApiError(409, "An update of base weights is under way: finish it first.", reason="updating")
            await self._refuse_early(request)
            files = request.policy.files if request.policy else ()
            limit_s = self._settings.lora_load_timeout_s
            await self._gate.wait(request.path, files, least=(MODEL_CONFIG,), timeout_s=limit_s)
            await self._refuse_path(request)  # once more: the files may have come since
            gated = clock()
            models = {r.facts.model for r in fleet.up if r.facts and r.facts.model}
            landed = request.policy is not None and request.policy.from_hub and self._gate.covers(request.path)
            async with self._looking(request):
                checkpoint, warnings = await self._checkpoints.checked(request, models, landed=landed)
            checked = clock()
            label, outcomes = await self._carried_through(self._carried_out(request, unseen=checkpoint is None))
            served = any(outcome.status == "reloaded" for outcome in outcomes)
            report = ReloadReport(
                name=request.name,
                version=label,
                status="live" if served else "failed",
                seconds=clock() - began,
                phases={"gate": gated - began, "check": checked - gated, "reload": clock() - checked},
                replicas=tuple(outcomes),
                warnings=tuple(warnings),
                model=next(iter(fleet.base_models), ""),
            )
            if not served:
                said = "; ".join(f"{outcome.replica}: {outcome.message}" for outcome in outcomes)
                message = f"{request.name} was reloaded on no replica. {said}"
                raise ApiError(500, message, reason="reload_failed", details=report.model_dump())
            self._checkpoints.served(checkpoint)
            return report

    async def run(self) -> None:
        """Reload, for ever, replicas that come back without the version that is served. Cancel it to stop."""
        while True:
            await self._changes.wait_until(lambda: self._lacking() is not None, deadline=math.inf)
            replica = self._lacking()
            weights = self._fleet.weights
            if replica is None or weights.version is None or weights.checkpoint is None:
                continue
            self._tried[replica.serial] = (replica.life, self._fleet.clock())
            with self._turn.taken(f"the reload of {replica.url}"):
                self._unattended = True
                try:
                    await self._one(replica, weights.version, weights.checkpoint)
                finally:
                    self._unattended = False

    def _lacking(self) -> Replica | None:
        """Return a replica that could be reloaded now, and has not been in this life, or not for a while."""
        weights = self._fleet.weights
        if self._turn.taken_by or weights.checkpoint is None or not weights.settled:
            return None
        outdated = filter(self._fleet.is_outdated, self._fleet.replicas)
        return next((replica for replica in outdated if self._may_try(replica)), None)

    def _may_try(self, replica: Replica) -> bool:
        life, at = self._tried.get(replica.serial, (None, 0.0))
        return life != replica.life or self._fleet.clock() >= at + REPAIR_EVERY_S

    async def _refuse_early(self, request: ReloadRequest) -> None:
        await self._refuse_path(request)
        if not self._fleet.up:
            raise ApiError(503, "No replica is up.", reason="no_replica", retry_after_s=1)

    async def _refuse_path(self, request: ReloadRequest) -> None:
        path, roots = PurePosixPath(request.path), self._settings.adapter_roots
        async with self._looking(request):
            if refused := await in_daemon_thread(partial(refuse_path, path, roots=roots, param="path")):
                raise refused

    @asynccontextmanager
    async def _looking(self, request: ReloadRequest) -> AsyncIterator[None]:
        """Limit a look at the checkpoint's files to as long as a replica may take to read them."""
        try:
            async with asyncio.timeout(self._settings.reload_timeout_s):
                yield
        except TimeoutError:
            message = f"{request.name} was not loaded: {request.path} cannot be read; its mount hangs."
            raise ApiError(500, message, reason="unfinished", param="path") from None

    async def _carried_through(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Return what `work` gives. A caller that leaves does not end it: this returns after it all the same."""
        task = asyncio.get_running_loop().create_task(work)  # awaited right here
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self._unattended = True
            try:
                with suppress(ApiError):
                    await task
            finally:
                self._unattended = False
            raise

    # On the replicas

    async def _carried_out(self, request: ReloadRequest, *, unseen: bool) -> tuple[str, list[ReplicaReload]]:
        fleet = self._fleet
        version = fleet.weights.version
        again = version is not None and policy_in(version) == request.name
        label = version if again and version is not None else fleet.weights.next_version(request.name)
        todo = [r for r in fleet.up if r.state is not ReplicaState.DRAINING and r.weights != label]
        if not again:
            self._rereading.forget()
        together = self._settings.reload == "together"
        fleet.weights.all_out = together or len(fleet.up) == 1
        try:
            await self._policies_settled()
            if together:
                outcomes = await self._together(todo, label, request.path, scouted=unseen)
            else:
                outcomes = await self._rolling(todo, label, request.path)
            await self._joined(todo)
        finally:
            fleet.weights.all_out = False
            fleet.changed()
        done = [
            ReplicaReload(replica=r.url, status="reloaded", seconds=0.0)
            for r in fleet.up
            if r not in todo and r.weights == label
        ]
        return label, [*done, *outcomes]

    async def _rolling(self, replicas: list[Replica], label: str, path: str) -> list[ReplicaReload]:
        """Reload one after the other. The old version is served beside the new one.

        When all that were sound have failed, the others keep what they have: it may be the checkpoint.
        """
        fleet = self._fleet
        sound = {replica for replica in replicas if replica.weights != UPDATING}
        old, from_old = fleet.weights.version, fleet.weights.checkpoint
        outcomes: list[ReplicaReload] = []
        late_s = self._settings.lora_load_timeout_s
        fleet.want_weights(label, checkpoint=path, beside=old or ORIGINAL)
        try:
            for replica in replicas:
                outcomes.append(await self._one(replica, label, path, late_s=late_s, drain=True))
                tried = [one.status for r, one in zip(replicas, outcomes, strict=False) if r in sound]
                if tried and all(status == "failed" for status in tried):
                    break
                await self._joined([replica])  # the next one goes when this one serves
        finally:
            served = any(replica.weights == label for replica in fleet.up)
            fleet.want_weights(label if served else old, checkpoint=path if served else from_old)
        return outcomes

    async def _together(self, replicas: list[Replica], label: str, path: str, *, scouted: bool) -> list[ReplicaReload]:
        """Reload all at once, with rollouts in flight standing still meanwhile. `scouted`: one of them tries first."""
        fleet = self._fleet
        await self._pausing.stand_still()
        fleet.begin_update(tuple(map(Member.now, fleet.up)))
        old, from_old = fleet.weights.version, fleet.weights.checkpoint
        late_s = self._settings.lora_load_timeout_s
        outcomes: list[ReplicaReload] = []
        try:
            for batch in (replicas[:1], replicas[1:]) if scouted else (replicas,):
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(self._one(replica, label, path, late_s=late_s)) for replica in batch]
                outcomes += [task.result() for task in tasks]
                if all(outcome.status == "failed" for outcome in outcomes):
                    break
        finally:
            served = any(replica.weights == label for replica in fleet.up)
            fleet.end_update(label if served else old, checkpoint=path if served else from_old)
            await self._pausing.go_on()
        return outcomes

    async def _one(
        self, replica: Replica, label: str, path: str, *, late_s: float = 0.0, drain: bool = False
    ) -> ReplicaReload:
        """Reload one replica; until it has the checkpoint it serves nothing. `late_s`: what its mount may lag."""
        fleet, began = self._fleet, self._fleet.clock()
        member, why = Member.now(replica), ""
        has = before = replica.weights
        fleet.take_out(replica)
        try:
            if drain:
                await self._drained(member, deadline=began + self._settings.drain_timeout_s)
            if member.is_there:
                replica.weights = UPDATING
                fleet.changed()  # what it has still goes elsewhere, and is of one version there
            has = UPDATING
            await self._rereading.read(member, label, path, late_s=late_s)
            has = label
        except FailedError as error:
            why = str(error)
            has = before if error.untouched else UPDATING
            if member.is_there and (await self._apis[replica.index].health()).status != 200:
                fleet.set_state(replica, ReplicaState.DOWN, f"it died within its reload: {why}")
        finally:
            if member.is_there:
                fleet.take_back(replica, has)
            else:
                fleet.weights.reloading.discard(replica)
        took_s = fleet.clock() - began
        if not why:
            fleet.note("weights.reloaded", f"it has {label} from {path}", replica=replica, seconds=took_s)
            return ReplicaReload(replica=replica.url, status="reloaded", seconds=took_s)
        fleet.note("weights.not_reloaded", f"{label} from {path}: {why}", level="error", replica=replica)
        status: Literal["failed", "left"] = "failed" if member.is_there else "left"
        return ReplicaReload(replica=replica.url, status=status, seconds=took_s, message=why)

    async def _policies_settled(self) -> None:
        """Wait for policies that load now: with no replica ready their loads would fail."""
        deadline = self._fleet.clock() + self._settings.lora_load_timeout_s
        policies = self._fleet.policies
        await self._changes.wait_until(
            lambda: all(policy.state is not PolicyState.LOADING for policy in policies.values()), deadline=deadline
        )

    async def _joined(self, replicas: list[Replica]) -> None:
        """Wait until those that join have joined."""
        deadline = self._fleet.clock() + self._settings.call_timeout_s
        await self._changes.wait_until(
            lambda: all(replica.state is not ReplicaState.JOINING for replica in replicas), deadline=deadline
        )

    async def _drained(self, member: Member, *, deadline: float) -> None:
        """Wait until its rollouts have ended. While the fleet is really paused none of them would."""
        replica, fleet = member.replica, self._fleet
        await self._changes.wait_until(
            lambda: replica.inflight == 0 or not member.is_there or fleet.stands_still, deadline=deadline
        )
