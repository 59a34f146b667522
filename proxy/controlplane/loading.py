"""Bring one policy to every replica or to none (P2).

The story: refuse what cannot work, find a slot, ask every replica and ask late ones again, check what they list, then
one synchronous step makes it visible; or take it away again wherever it arrived, and say who failed and why.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

from proxy.contract import LoadReport, LoadRequest, LoadStatus, ReplicaLoad, version_of
from proxy.controlplane.announcing import (
    announced_digest,
    no_slot,
    refuse_early,
    refuse_unable,
    same_or_refuse,
)
from proxy.controlplane.replica_api import RETRYABLE, LoadOutcome, ReplicaApi, adapters, load_outcome
from proxy.controlplane.retiring import Retiring
from proxy.errors import ApiError
from proxy.fleet.policies import Policy, PolicyState, slot_to_take
from proxy.fleet.pool import Fleet
from proxy.fleet.replica import Replica, ReplicaState
from proxy.metrics import Metrics
from proxy.settings import ControlSettings

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.1
"""First pause before a late replica is asked again; doubled up to PROXY_LORA_RETRY_S. A mount that lags by a moment
then costs a moment, and one that lags for long is not hammered."""


@dataclass
class _Journey:
    """One policy on its way to the fleet."""

    policy: Policy
    deadline: float
    lives: dict[int, int]
    """The incarnation of every replica at the start, by its index."""
    given_up: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when one replica has failed for good: the others need not try any more."""


@dataclass(frozen=True)
class Asked:
    """What became of one load call."""

    outcome: LoadOutcome
    message: str
    status: int | None


class Loading:
    """Carries out load requests."""

    def __init__(
        self,
        fleet: Fleet,
        apis: dict[int, ReplicaApi],
        retiring: Retiring,
        settings: ControlSettings,
        metrics: Metrics,
    ) -> None:
        self._fleet = fleet
        self._apis = apis
        self._retiring = retiring
        self._settings = settings
        self._metrics = metrics
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def load(self, request: LoadRequest) -> LoadReport:
        """Load a policy on every ready replica and make it visible.

        Announcing what is live already, with the same path and content, answers at once. Raises ApiError, after the
        rollback, if it did not reach every replica.
        """
        if (refusal := refuse_early(request, base_models=self._fleet.base_models)) is not None:
            raise refusal
        lock = self._locks.setdefault(request.lora_name, asyncio.Lock())
        async with lock:
            digest = await asyncio.to_thread(announced_digest, request)
            known = self._fleet.policies.get(request.lora_name)
            if known is not None and known.state is PolicyState.LIVE:
                return same_or_refuse(request, known, digest)
            return await self._carry(request, digest)

    async def _carry(self, request: LoadRequest, digest: str | None) -> LoadReport:
        fleet, started = self._fleet, self._fleet.clock()
        deadline = started + self._settings.lora_load_timeout_s
        if (refusal := refuse_unable(fleet)) is not None:
            raise refusal
        await self._retiring.settled(request.lora_name)
        await self._find_slot(request.lora_name, deadline)
        policy = Policy(
            name=request.lora_name,
            path=request.lora_path,
            version=request.policy.version if request.policy else version_of(request.lora_name),
            step=request.policy.step if request.policy else None,
            digest=digest,
            announced_at=started,
            last_named_at=started,
        )
        fleet.add_policy(policy)
        journey = _Journey(policy, deadline, lives={replica.index: replica.incarnation for replica in fleet.replicas})
        try:
            results = await self._each(fleet.ready, lambda replica: self._load_on(replica, journey))
            results = await self._verified(results, journey)
        except BaseException as error:
            # Cancelled (the proxy stops) or broken: nothing may stay half done or count as loading for ever.
            fleet.set_policy_state(policy, PolicyState.FAILED, f"interrupted: {type(error).__name__}")
            raise
        arrived = [r for r in fleet.replicas if r.url in _urls(results, "loaded") and r.state is not ReplicaState.DOWN]
        if arrived and not _urls(results, "failed"):
            fleet.commit(policy, arrived)
        else:
            results = await self._rolled_back(results, policy)
        report = LoadReport(
            policy=policy.name,
            version=policy.version,
            status="live" if policy.state is PolicyState.LIVE else "failed",
            seconds=round(fleet.clock() - started, 4),
            replicas=tuple(results),
            warnings=tuple(f"{r.url}: {lack.message}" for r in arrived if r.facts for lack in r.facts.lacks),
        )
        self._metrics.load(report.seconds, report.status)
        if report.status == "failed":
            raise _load_failed(report)
        logger.info("policy %s is live on %d replicas after %.3f s", policy.name, len(arrived), report.seconds)
        return report

    async def _find_slot(self, name: str, deadline: float) -> None:
        """Wait until fewer policies are registered than vLLM has slots, making room where nobody would miss it (P4)."""
        fleet, slots = self._fleet, self._fleet.slots()
        while slots is not None:
            occupying, leaving = list(fleet.occupying()), self._retiring.leaving()
            if len(occupying) + len(leaving) < slots:
                return
            victim = slot_to_take(occupying, now=fleet.clock(), idle_s=self._settings.policy_idle_s)
            if leaving:
                await self._retiring.settled(leaving[0])
            elif victim is not None:
                await self._retiring.finish(victim, f"its slot is needed for {name}")
            elif fleet.clock() >= deadline:
                raise no_slot(name, occupying, slots)
            else:
                await asyncio.sleep(FIRST_PAUSE_S)

    async def _each(
        self, replicas: list[Replica], act: Callable[[Replica], Coroutine[Any, Any, ReplicaLoad]]
    ) -> list[ReplicaLoad]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(act(replica)) for replica in replicas]
        return [task.result() for task in tasks]

    async def _load_on(self, replica: Replica, journey: _Journey) -> ReplicaLoad:
        """Ask one replica until it holds the policy, refuses it, leaves the fleet, or time is up."""
        started, attempts, pause = self._fleet.clock(), 1, FIRST_PAUSE_S
        result = await self.ask(replica, journey.policy, first=True)
        while result.outcome in RETRYABLE and not journey.given_up.is_set():
            if replica.state is ReplicaState.DOWN:
                seconds = self._fleet.clock() - started
                return _told(replica, "unknown", attempts, seconds, f"went down: {replica.reason}")
            if self._fleet.clock() + pause > journey.deadline:
                break
            await asyncio.sleep(pause)
            pause = min(pause * 2, self._settings.lora_retry_s)
            result = await self.ask(replica, journey.policy, first=False)
            attempts += 1
        seconds = self._fleet.clock() - started
        if result.outcome is LoadOutcome.LOADED:
            return _told(replica, "loaded", attempts, seconds, "")
        gave_up = journey.given_up.is_set() and result.outcome in RETRYABLE
        journey.given_up.set()
        message = f"another replica failed; last answer here: {result.message}" if gave_up else result.message
        return _told(replica, "failed", attempts, seconds, message)

    async def ask(self, replica: Replica, policy: Policy, *, first: bool) -> Asked:
        """Send one load call and note what the replica holds after it.

        "Already loaded" is success if an earlier call of ours may have done it (`first` is False) and the path agrees.
        """
        api = self._apis[replica.index]
        async with api.lifecycle:
            answer = await api.load(policy.name, policy.path)
            outcome = load_outcome(answer)
            if outcome is LoadOutcome.ALREADY:
                held = adapters(await api.models() or [])
                ours = not first and held.get(policy.name) == policy.path
                outcome = LoadOutcome.LOADED if ours else LoadOutcome.REFUSED
            if outcome is LoadOutcome.REFUSED and answer.failed_inside and (await api.health()).status != 200:
                outcome = LoadOutcome.UNKNOWN  # an engine that dies refuses everything; its replica is about to go
            if outcome is LoadOutcome.LOADED:
                replica.held[policy.name] = policy.path
            return Asked(outcome, answer.message, answer.status)

    async def _verified(self, results: list[ReplicaLoad], journey: _Journey) -> list[ReplicaLoad]:
        """Check that every replica that said "loaded" lists the policy with its path: a 200 alone proves little."""
        policy = journey.policy

        async def verify(replica: Replica) -> ReplicaLoad:
            result = next(result for result in results if result.replica == replica.url)
            if result.status != "loaded" or replica.state is ReplicaState.DOWN:
                return result
            api = self._apis[replica.index]
            async with api.lifecycle:
                models = await api.models()
            if models is None or adapters(models).get(policy.name) == policy.path:
                return result  # a replica that cannot be asked is the monitor's business, not this load's
            if replica.incarnation != journey.lives[replica.index]:
                return result.model_copy(update={"status": "unknown", "message": "restarted meanwhile"})
            return result.model_copy(update={"status": "failed", "message": "accepted it, then did not list it"})

        asked = {result.replica for result in results}
        return await self._each([r for r in self._fleet.replicas if r.url in asked], verify)

    async def _rolled_back(self, results: list[ReplicaLoad], policy: Policy) -> list[ReplicaLoad]:
        """Unload the policy wherever it arrived or may have arrived."""
        by_url = {result.replica: result for result in results}
        touched = [r for r in self._fleet.replicas if r.url in by_url]

        async def undo(replica: Replica) -> ReplicaLoad:
            before = by_url[replica.url]
            gone = await self._retiring.unload_on(replica, policy.name)
            if before.status == "loaded":
                status = "rolled_back" if gone else "unknown"
                return before.model_copy(update={"status": status})
            return before

        try:
            return await self._each(touched, undo)
        finally:
            # Only now: until it is gone from the replicas it takes one of vLLM's slots.
            self._fleet.set_policy_state(policy, PolicyState.FAILED, _why(results))


def _load_failed(report: LoadReport) -> ApiError:
    # Never 404 here: TRL takes it for "runtime LoRA is disabled". 503, which says "try again", when nobody refused it.
    refused = any(result.status == "failed" for result in report.replicas)
    return ApiError(
        500 if refused else 503,
        f"'{report.policy}' was not loaded: {_why(list(report.replicas))}. It was taken back from the other replicas.",
        reason="load_failed",
        retry_after_s=None if refused else 1,
        details=report.model_dump(),
    )


def _why(results: list[ReplicaLoad]) -> str:
    failed = [f"{r.replica} after {r.attempts} tries: {r.message}" for r in results if r.status == "failed"]
    left = [f"{r.replica} {r.message}" for r in results if r.status == "unknown"]
    return "; ".join(failed or ["no replica was left", *left])


def _told(replica: Replica, status: LoadStatus, attempts: int, seconds: float, message: str) -> ReplicaLoad:
    return ReplicaLoad(
        replica=replica.url, status=status, attempts=attempts, seconds=round(seconds, 4), message=message
    )


def _urls(results: list[ReplicaLoad], status: str) -> set[str]:
    return {result.replica for result in results if result.status == status}
