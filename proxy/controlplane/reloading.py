"""Base weights from a checkpoint in the store: no network between the machines, and no replica that serves half of it.

Rolling: one replica after the other, each once its rollouts have ended, so that none is of two versions; the others
serve on. Together: all at once, while rollouts stand still and then go on with the new weights. What does not reach a
replica keeps that replica out, and it is reloaded as soon as it is back.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from proxy.artifacts.checkpoint import MODEL_CONFIG, Checkpoint, differences, read_checkpoint
from proxy.artifacts.manifest import verify_manifest
from proxy.contract import ReloadReport, ReloadRequest, ReplicaReload
from proxy.controlplane.announcing import refuse_path
from proxy.controlplane.changes import Changes
from proxy.controlplane.collective import together
from proxy.controlplane.pausing import OWN_PAUSE, Pausing
from proxy.controlplane.plan import differ
from proxy.controlplane.replica_api import ReplicaApi
from proxy.controlplane.storage import Gate
from proxy.controlplane.turn import Turn
from proxy.controlplane.verify import read_proof
from proxy.controlplane.weights import EMPTY_CACHE, LABEL_PATH, json_body
from proxy.errors import ApiError, ArtifactError
from proxy.fleet.pool import Fleet
from proxy.fleet.replica import Replica, ReplicaState
from proxy.fleet.weights import ORIGINAL, SEPARATOR, UPDATING, Member
from proxy.settings import ControlSettings

RPC_PATH = "/collective_rpc"


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
        self._known: Checkpoint | None = None
        """What the last good checkpoint looked like."""
        self._tried: dict[int, int] = {}
        """By a replica's serial, the life in which it was reloaded last by itself."""
        self._logprobs: dict[str, tuple[float, ...]] = {}
        """What replicas with the wanted version have answered to the probe, by URL."""

    async def reload(self, request: ReloadRequest) -> ReloadReport:
        """Bring a checkpoint to every replica that is up.

        Raises ApiError: 400 and 409 before any replica has been touched; 500 if none of them serves it in the end, with
        the report in its details.
        """
        with self._turn.taken(f"the reload of {request.name}"):
            fleet, clock = self._fleet, self._fleet.clock
            if fleet.weights.update is not None:
                raise ApiError(409, "An update of base weights is under way: finish it first.", reason="updating")
            began = clock()
            await self._refuse_early(request)
            files = request.policy.files if request.policy else ()
            limit_s = self._settings.lora_load_timeout_s
            await self._gate.wait(request.path, files, least=(MODEL_CONFIG,), timeout_s=limit_s)
            await self._refuse_path(request)  # once more: the files may have come since
            gated = clock()
            warnings = await self._checked(request)
            checked = clock()
            label, outcomes = await self._carried_out(request)
            served = any(outcome.status == "reloaded" for outcome in outcomes)
            report = ReloadReport(
                name=request.name,
                version=label,
                status="live" if served else "failed",
                seconds=clock() - began,
                phases={"gate": gated - began, "check": checked - gated, "reload": clock() - checked},
                replicas=tuple(outcomes),
                warnings=tuple(warnings),
            )
            if not served:
                said = "; ".join(f"{outcome.replica}: {outcome.message}" for outcome in outcomes)
                message = f"{request.name} was reloaded on no replica. {said}"
                raise ApiError(500, message, reason="reload_failed", details=report.model_dump())
            return report

    async def run(self) -> None:
        """Reload, for ever, replicas that come back without the version that is served. Cancel it to stop."""
        while True:
            await self._changes.wait_until(lambda: self._lacking() is not None, deadline=math.inf)
            replica = self._lacking()
            weights = self._fleet.weights
            if replica is None or weights.version is None or weights.checkpoint is None:
                continue
            self._tried[replica.serial] = replica.life
            with self._turn.taken(f"the reload of {replica.url}"):
                await self._one(replica, weights.version, weights.checkpoint)

    def _lacking(self) -> Replica | None:
        """Return a replica that could be reloaded now, and has not been in this life."""
        weights = self._fleet.weights
        if self._turn.taken_by or weights.checkpoint is None or not weights.settled:
            return None
        return next(
            (
                replica
                for replica in self._fleet.replicas
                if self._fleet.is_outdated(replica) and self._tried.get(replica.serial) != replica.life
            ),
            None,
        )

    # Before any replica is touched: a bad path tears the model, and the next request kills the engine

    async def _refuse_early(self, request: ReloadRequest) -> None:
        await self._refuse_path(request)
        if not self._fleet.up:
            raise ApiError(503, "No replica is up.", reason="no_replica", retry_after_s=1)

    async def _refuse_path(self, request: ReloadRequest) -> None:
        path, roots = PurePosixPath(request.path), self._settings.adapter_roots
        if refused := await asyncio.to_thread(refuse_path, path, roots=roots, param="path"):
            raise refused

    async def _checked(self, request: ReloadRequest) -> list[str]:
        directory = Path(request.path)
        if not await asyncio.to_thread(directory.parent.is_dir):
            return [f"the proxy cannot see {directory}, so that nobody has checked it"]
        models = {r.facts.model for r in self._fleet.up if r.facts and r.facts.model}
        try:
            found, original = await asyncio.to_thread(_read, request, models)
        except ArtifactError as error:
            raise ApiError(409, f"{request.name}: {error}", reason="checkpoint", param="path") from None
        expected = original or self._known
        wrong = list(differences(found, expected)) if expected else []
        if wrong:
            message = f"{request.name} cannot take the place of the base model: {directory}: {'; '.join(wrong)}"
            raise ApiError(400, message, reason="unservable", param="path")
        self._known = found
        return [] if expected else ["the proxy cannot see the base model, so that nobody has compared it"]

    # On the replicas

    async def _carried_out(self, request: ReloadRequest) -> tuple[str, list[ReplicaReload]]:
        fleet = self._fleet
        version = fleet.weights.version
        again = version is not None and version.partition(SEPARATOR)[2] == request.name
        label = version if again and version is not None else fleet.weights.next_version(request.name)
        todo = [r for r in fleet.up if r.state is not ReplicaState.DRAINING and r.weights != label]
        if not again:
            self._logprobs.clear()
        if self._settings.reload == "together":
            outcomes = await self._together(todo, label, request.path)
        else:
            outcomes = await self._rolling(todo, label, request.path)
        done = [
            ReplicaReload(replica=r.url, status="reloaded", seconds=0.0)
            for r in fleet.up
            if r not in todo and r.weights == label
        ]
        return label, [*done, *outcomes]

    async def _rolling(self, replicas: list[Replica], label: str, path: str) -> list[ReplicaReload]:
        """Reload one after the other. The old version is served beside the new one, until the first failure of all."""
        fleet = self._fleet
        old, from_old = fleet.weights.version, fleet.weights.checkpoint
        outcomes: list[ReplicaReload] = []
        fleet.want_weights(label, checkpoint=path, beside=old or ORIGINAL)
        try:
            for replica in replicas:
                outcomes.append(await self._one(replica, label, path, drain=True))
                if all(outcome.status == "failed" for outcome in outcomes):
                    break  # it may be the checkpoint: the others keep what they have
        finally:
            served = any(replica.weights == label for replica in fleet.up)
            fleet.want_weights(label if served else old, checkpoint=path if served else from_old)
        return outcomes

    async def _together(self, replicas: list[Replica], label: str, path: str) -> list[ReplicaReload]:
        """Reload all at once, with rollouts in flight standing still meanwhile."""
        fleet = self._fleet
        paused_here = await self._pausing.stand_still()
        fleet.begin_update(tuple(Member.now(replica) for replica in replicas))
        old, from_old = fleet.weights.version, fleet.weights.checkpoint
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._one(replica, label, path)) for replica in replicas]
        finally:
            served = any(replica.weights == label for replica in fleet.up)
            fleet.end_update(label if served else old, checkpoint=path if served else from_old)
            if paused_here:
                await self._pausing.go_on()
        return [task.result() for task in tasks]

    async def _one(self, replica: Replica, label: str, path: str, *, drain: bool = False) -> ReplicaReload:
        """Reload one replica; until it has the checkpoint it serves nothing."""
        fleet, began = self._fleet, self._fleet.clock()
        member = Member.now(replica)
        has: str | None = UPDATING
        fleet.take_out(replica)
        try:
            if drain:
                deadline = began + self._settings.drain_timeout_s
                await self._changes.wait_until(lambda: replica.inflight == 0 or not member.is_there, deadline=deadline)
            replica.weights = UPDATING
            fleet.changed()  # what it has still goes elsewhere, and is of one version there
            why = await self._read_there(member, label, path)
            has = UPDATING if why else label
            if why and member.is_there and (await self._apis[replica.index].health()).status != 200:
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

    async def _read_there(self, member: Member, label: str, path: str) -> str:
        """Carry out the steps on one replica. Return why one of them has failed, empty if none has."""
        api = self._apis[member.replica.index]
        rpc = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        paused = self._fleet.pause is not None and self._fleet.pause.real
        steps: list[tuple[str, dict[str, Any] | None, float | None]] = [
            (LABEL_PATH, {"new_version": UPDATING}, None),
            (OWN_PAUSE, None, None),
            (RPC_PATH, rpc, self._settings.reload_timeout_s),
            (EMPTY_CACHE, None, None),  # vLLM keeps KV that the old weights have computed
        ]
        if not paused:
            steps.append(("/resume", None, None))
        for target, body, timeout_s in steps:
            if why := await self._failed(member, target, body, timeout_s):
                return why
        self._fleet.cache_was_reset(member.replica)
        if not paused and (why := await self._proved(member, api)):
            return why
        return await self._failed(member, LABEL_PATH, {"new_version": label}, None)

    async def _failed(self, member: Member, target: str, body: dict[str, Any] | None, timeout_s: float | None) -> str:
        """Send one call, give it up when the replica goes down, and return why it has failed; empty if it has not."""
        calls = [(member, json_body(body) if body else b"")]
        answers = await together(calls, target, apis=self._apis, changes=self._changes, timeout_s=timeout_s)
        answer = answers[member]
        return "" if answer.ok else f"{target.partition('?')[0]}: {answer.status or 'no answer'} {answer.message}"

    async def _proved(self, member: Member, api: ReplicaApi) -> str:
        """Ask for one token: the engine works, its values are numbers, and the others answer alike."""
        facts = member.replica.facts
        if facts is None or not facts.model_names:
            return ""
        proof = read_proof(await api.prove(facts.model_names[0]))
        if proof.spoiled:
            return f"its answers are not numbers: {proof.message}"
        for url, theirs in self._logprobs.items():
            if url != api.url and (said := differ(api.url, proof.logprobs, url, theirs)):
                self._fleet.note("weights.disagree", said, level="error", replica=member.replica)
        if proof.logprobs:
            self._logprobs[api.url] = proof.logprobs
        return ""


def _read(request: ReloadRequest, models: set[str]) -> tuple[Checkpoint, Checkpoint | None]:
    """Return the checkpoint, and the base model's if it is to be seen here."""
    directory = Path(request.path)
    if request.policy is not None:
        verify_manifest(directory, request.policy, request.name)
    found = read_checkpoint(directory)
    for model in sorted(models):
        if Path(model).is_absolute() and Path(model).is_dir():
            return found, read_checkpoint(Path(model))
    return found, None
