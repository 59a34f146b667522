"""Answer announcements: from the request to the moment in which every replica serves the policy, or none does (P2).

The story: refuse what cannot work, look at the files, wait until the store has them all, find a slot. From there the
policy is wanted, and keepers and reconciler do the rest; who announced it waits and is told how it went.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar
from weakref import WeakValueDictionary

from proxy.artifacts.manifest import ADAPTER_FILES
from proxy.contract import LoadReport, LoadRequest, LoadStatus, ReplicaLoad, version_of
from proxy.controlplane.announcing import (
    Relation,
    Seen,
    inspect,
    name_in_use,
    no_slot,
    refuse_early,
    refuse_unable,
    relation,
)
from proxy.controlplane.changes import Changes
from proxy.controlplane.keeper import next_pause_s
from proxy.controlplane.looking import look
from proxy.controlplane.phases import Phases
from proxy.controlplane.storage import Gate
from proxy.errors import ApiError
from proxy.fleet.policies import OCCUPYING, Policy, PolicyState, slot_to_take
from proxy.fleet.pool import Fleet
from proxy.fleet.replica import Replica
from proxy.metrics.loads import LoadMetrics
from proxy.settings import ControlSettings

Found = TypeVar("Found")


@dataclass(frozen=True)
class _Asked:
    """A policy on its way, and the replicas that were asked for it."""

    policy: Policy
    replicas: tuple[tuple[Replica, int], ...]
    """Each with its life at that time."""
    new: bool
    """Whether this announcement has made it, rather than met it."""


class Loading:
    """Carries out load requests."""

    def __init__(
        self, fleet: Fleet, changes: Changes, gate: Gate, settings: ControlSettings, metrics: LoadMetrics
    ) -> None:
        self._fleet = fleet
        self._changes = changes
        self._gate = gate
        self._settings = settings
        self._metrics = metrics
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._counted = itertools.count(1)

    async def load(self, request: LoadRequest) -> LoadReport:
        """Load a policy on every ready replica and make it visible.

        Announcing what is live already, with the same path and content, answers at once. Raises ApiError, after the
        rollback, if it did not reach every replica. A caller that leaves does not stop the load.
        """
        try:
            report, new = await self._load(request)
        except ApiError as error:
            self._metrics.announced(error.reason)
            raise
        self._metrics.announced("live" if new else "known")
        return report

    async def _load(self, request: LoadRequest) -> tuple[LoadReport, bool]:
        """Return the report, and whether this announcement has made the policy."""
        fleet, began = self._fleet, self._fleet.clock()
        roots = self._settings.adapter_roots
        refused = partial(refuse_early, request, base_models=fleet.base_models, roots=roots)
        deadline = began + self._settings.lora_load_timeout_s
        # A mount that hangs must not hold up rollouts, and only with roots does it look at one.
        if (refusal := await self._look(request, deadline, refused) if roots else refused()) is not None:
            raise refusal
        await self._changes.wait_until(lambda: not fleet.weights.all_out, deadline=deadline)
        asked = await self._announced(request, deadline)
        policy = asked.policy
        if policy.state is PolicyState.LOADING:
            policy.callers += 1
            try:
                await self._ended(policy)
            finally:
                policy.callers -= 1
        report = _report(asked, seconds=fleet.clock() - began)
        if asked.new:
            self._metrics.loaded(report, [replica.index for replica, _ in asked.replicas])
        if report.status == "failed":
            raise _load_failed(report, policy)
        return report, asked.new

    async def _announced(self, request: LoadRequest, deadline: float) -> _Asked:
        """Return the policy that `request` means: a new one, or the one that is live or under way already."""
        async with self._alone(request.lora_name, deadline):
            phases = Phases(self._fleet.clock)
            # Before the proxy looks itself, where it can: its own mount remembers a look that came too early as well.
            landed = self._is_known_to_hub(request)
            if landed and not self._is_live(request):
                await self._pass_gate(request, deadline)
                phases.end("gate")
            seen = await self._seen(request, deadline, landed=landed)
            phases.end("check")
            if (known := await self._same(request, seen, deadline)) is not None:
                if request.policy and request.policy.alias:
                    self._fleet.name_also(known, request.policy.alias)
                return self._asked(known, new=False)
            if (refusal := refuse_unable(self._fleet)) is not None:
                raise refusal
            phases.end("name")
            if not landed:
                await self._pass_gate(request, deadline)
                phases.end("gate")
            await self._find_slot(request.lora_name, deadline)
            phases.end("slot")
            policy = self._wanted(request, seen, deadline)
            policy.phases = phases.seconds
            return self._asked(policy, new=True)

    @asynccontextmanager
    async def _alone(self, name: str, deadline: float) -> AsyncIterator[None]:
        """Let one announcement of a name at a time decide what it means. Raises ApiError at the deadline."""
        lock = self._locks.setdefault(name, asyncio.Lock())
        try:
            async with asyncio.timeout(deadline - self._fleet.clock()):
                await lock.acquire()
        except TimeoutError:
            message = f"'{name}' was not loaded: an earlier announcement of the same name has not been settled."
            raise ApiError(503, message, reason="under_way", param="lora_name", retry_after_s=1) from None
        try:
            yield
        finally:
            lock.release()

    def _is_known_to_hub(self, request: LoadRequest) -> bool:
        """Return whether the Hub can be asked for the files without a look at them here."""
        return request.policy is not None and request.policy.from_hub and self._gate.covers(request.lora_path)

    def _is_live(self, request: LoadRequest) -> bool:
        digest = request.policy.digest if request.policy else None
        return relation(request, digest, self._fleet.named.get(request.lora_name)) is Relation.SAME

    async def _pass_gate(self, request: LoadRequest, deadline: float) -> None:
        """Wait until the store has the files whole. Raises ApiError at the deadline, or if it never will."""
        if self._gate.covers(request.lora_path):
            self._fleet.events.add("load.gate", "waits until the Hub lists its files", policy=request.lora_name)
        files = request.policy.files if request.policy else ()
        left_s = deadline - self._fleet.clock()
        await self._gate.wait(request.lora_path, files, least=ADAPTER_FILES, timeout_s=left_s)

    async def _seen(self, request: LoadRequest, deadline: float, *, landed: bool) -> Seen:
        """Look at the files, and go on looking while they are only half there."""
        ranks = [r.facts.max_lora_rank for r in self._fleet.replicas if r.facts and r.facts.max_lora_rank is not None]
        roots = self._settings.adapter_roots
        inspected = partial(inspect, request, max_lora_rank=min(ranks, default=None), roots=roots, landed=landed)
        pause_s, told = next_pause_s(0, self._settings), ""
        while True:
            seen = await self._look(request, deadline, inspected)
            if not seen.unfinished:
                return seen
            if seen.unfinished != told:
                told = seen.unfinished
                self._fleet.events.add("load.unfinished", f"waits for its files: {told}", policy=request.lora_name)
            if self._fleet.clock() + pause_s > deadline:
                message = f"'{request.lora_name}' was not loaded: {seen.unfinished}. No replica was asked for it."
                raise ApiError(500, message, reason="unfinished", param="lora_path")
            await asyncio.sleep(pause_s)
            pause_s = next_pause_s(pause_s, self._settings)

    async def _look(self, request: LoadRequest, deadline: float, at: Callable[[], Found]) -> Found:
        """Look at the files, until the deadline at most. Raises ApiError if their mount hangs."""
        try:
            return await look(deadline - self._fleet.clock(), at)
        except TimeoutError:
            message = f"'{request.lora_name}' was not loaded: {request.lora_path} cannot be read; its mount hangs."
            raise ApiError(500, message, reason="unfinished", param="lora_path") from None

    async def _same(self, request: LoadRequest, seen: Seen, deadline: float) -> Policy | None:
        """Return the policy that the name means already if it is the announced one; see to it that the name is free.

        Raises ApiError 409 if clients use the name for something else until the deadline.
        """
        fleet, name = self._fleet, request.lora_name
        while True:
            known = fleet.named.get(name)
            match relation(request, seen.digest, known):
                case Relation.NEW:
                    return None
                case Relation.SAME:
                    return known
                case Relation.REPLACES:
                    assert known is not None
                    fleet.hurry(known, f"announced again, from {request.lora_path}")
                    await self._changes.wait_until(lambda p=known: p.state not in OCCUPYING, deadline=deadline)  # type: ignore[misc]
                case Relation.IN_USE:
                    assert known is not None
                    fleet.note("policy.name_in_use", f"announced again, from {request.lora_path}", policy=known)
                    if not await self._changes.wait_until(lambda p=known: _is_free(p), deadline=deadline):  # type: ignore[misc]
                        raise name_in_use(request, known)

    async def _find_slot(self, name: str, deadline: float) -> None:
        """Wait until fewer policies are registered than vLLM has slots, making room where nobody would miss it (P4)."""
        fleet = self._fleet

        def is_free() -> bool:
            slots = fleet.slots()
            return slots is None or len(fleet.occupying()) + len(fleet.leaving()) < slots

        def becomes_free() -> bool:
            if is_free():
                return True
            victim = slot_to_take(fleet.occupying(), now=fleet.clock(), idle_s=self._settings.policy_idle_s)
            if not fleet.leaving() and victim is not None and victim.deadline != -float("inf"):
                fleet.hurry(victim, f"its slot is needed for {name}")
            return False

        if not is_free():
            fleet.events.add("load.no_slot", "waits for one of the slots to be free", policy=name)
        if not await self._changes.wait_until(becomes_free, deadline=deadline):
            raise no_slot(name, fleet.occupying() + fleet.leaving(), fleet.slots() or 0)

    def _wanted(self, request: LoadRequest, seen: Seen, deadline: float) -> Policy:
        """Take the policy in as wanted. No await since its slot was found."""
        fleet, announced = self._fleet, request.policy
        now = fleet.clock()
        version = announced.version if announced else version_of(request.lora_name)
        policy = Policy(
            name=request.lora_name,
            upstream=request.lora_name if announced else fleet.new_upstream(request.lora_name),
            path=request.lora_path,
            version=next(self._counted) if version is None else version,
            step=announced.step if announced else None,
            digest=seen.digest,
            announced_at=now,
            run=announced.run if announced else None,
            managed=announced is not None,
            alias=announced.alias if announced else None,
            deadline=deadline,
            scout=None if seen.checked else min((replica.index for replica in fleet.ready), default=None),
            last_named_at=now,
        )
        for replica in fleet.replicas:
            if not replica.holds(policy):
                replica.trials.pop(policy.upstream, None)  # of an earlier announcement
        fleet.note("policy.announced", f"announced from {policy.path}", policy=policy)
        fleet.add_policy(policy)
        return policy

    def _asked(self, policy: Policy, *, new: bool) -> _Asked:
        return _Asked(policy, tuple((replica, replica.life) for replica in self._fleet.ready), new)

    async def _ended(self, policy: Policy) -> None:
        """Wait until the policy is live, or has failed and is gone again as far as that can be had."""
        began = policy.announced_at
        await self._changes.wait_until(lambda: policy.state is not PolicyState.LOADING, deadline=policy.deadline + 60)
        ended = self._fleet.clock()
        if policy.state is not PolicyState.FAILED:
            policy.phases |= phases_of_broadcast(policy, self._fleet.ready, began=began, ended=ended)
            return
        policy.phases["load"] = ended - began
        await self._changes.wait_until(
            lambda: self._is_taken_back(policy), deadline=ended + self._settings.call_timeout_s
        )
        policy.phases["rollback"] = self._fleet.clock() - ended

    def _is_taken_back(self, policy: Policy) -> bool:
        """Whether every replica that is up has unloaded it, or has failed to."""
        return all(
            not replica.may_hold(policy.upstream) or policy.upstream in replica.unload_at for replica in self._fleet.up
        )


def phases_of_broadcast(policy: Policy, replicas: list[Replica], *, began: float, ended: float) -> dict[str, float]:
    """Split the seconds from `began`, when the replicas were told of a policy, to `ended`, when it was live. Pure.

    `load` lasts until the last replica had loaded it, `verify` until the last one had proven it, `commit` to the end.
    """
    trials = [trial for replica in replicas if (trial := replica.trials.get(policy.upstream)) and trial.proven]
    loaded = max([began, *(trial.started_at + trial.load_s for trial in trials)])
    proven = max([loaded, *(trial.proven_at for trial in trials)])
    return {"load": loaded - began, "verify": proven - loaded, "commit": max(ended - proven, 0.0)}


def _is_free(policy: Policy) -> bool:
    return policy.state not in OCCUPYING or not (policy.leases or policy.callers)


def _report(asked: _Asked, *, seconds: float) -> LoadReport:
    policy = asked.policy
    replicas = asked.replicas if asked.new or policy.state is PolicyState.FAILED else ()
    return LoadReport(
        policy=policy.name,
        version=policy.version,
        status="failed" if policy.state is PolicyState.FAILED else "live",
        seconds=round(seconds, 4),
        phases={name: round(took, 4) for name, took in policy.phases.items()} if asked.new else {},
        replicas=tuple(_told(replica, life, policy) for replica, life in replicas),
        warnings=tuple(
            f"{replica.url}: {lack.message}"
            for replica, _ in asked.replicas
            if replica.facts
            for lack in replica.facts.lacks
        ),
    )


def _told(replica: Replica, life: int, policy: Policy) -> ReplicaLoad:
    """Say how the load went on one replica."""
    trial = replica.trials.get(policy.upstream)
    status, message = _ending(replica, life, policy)
    return ReplicaLoad(
        replica=replica.url,
        status=status,
        attempts=trial.tries if trial else 0,
        seconds=round(trial.load_s + trial.verify_s, 4) if trial else 0.0,
        phases={"load": round(trial.load_s, 4), "verify": round(trial.verify_s, 4)} if trial else {},
        message=message,
    )


def _ending(replica: Replica, life: int, policy: Policy) -> tuple[LoadStatus, str]:
    trial = replica.trials.get(policy.upstream)
    if replica.life != life or not replica.is_up:
        return "unknown", f"it left the fleet meanwhile: {replica.reason}"
    if policy.state is not PolicyState.FAILED:
        return ("loaded", "") if replica.has_proven(policy) else ("unknown", f"it joins again: {replica.reason}")
    if trial is not None and trial.outcome == "loaded" and not trial.final:
        return ("unknown", "it has not unloaded it yet") if replica.may_hold(policy.upstream) else ("rolled_back", "")
    return "failed", trial.message if trial else "it was not asked"


def _load_failed(report: LoadReport, policy: Policy) -> ApiError:
    # Never 404 here: TRL takes it for "runtime LoRA is disabled". 503, which says "try again", when nobody refused it.
    refused = any(result.status == "failed" for result in report.replicas)
    left = [f"{result.replica}: {result.message}" for result in report.replicas if result.status == "unknown"]
    return ApiError(
        500 if refused else 503,
        f"'{report.policy}' was not loaded: {'; '.join([policy.reason, *left])}. It was taken back from the others.",
        reason="load_failed",
        retry_after_s=None if refused else 1,
        details=report.model_dump(),
    )
