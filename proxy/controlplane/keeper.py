"""Keep one replica in line with what the fleet wants: look what it holds, plan, do the first thing, look again.

All calls that change what a replica holds are made here, one after the other; keepers of different replicas work at
the same time. A keeper decides nothing about the fleet: it writes down what its replica holds and has answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from proxy.artifacts.manifest import read_manifest
from proxy.contract import version_of
from proxy.controlplane.announcing import refuse_path
from proxy.controlplane.answer import Answer
from proxy.controlplane.changes import woken
from proxy.controlplane.label import label_told
from proxy.controlplane.looking import look
from proxy.controlplane.pausing import Pausing
from proxy.controlplane.plan import Adopt, Load, Unload, Verify, is_superseded, plan
from proxy.controlplane.replica_api import RETRYABLE, LoadOutcome, ReplicaApi, adapters, load_outcome
from proxy.controlplane.verify import read_proof
from proxy.errors import ArtifactError
from proxy.fleet import names
from proxy.fleet.policies import Policy, PolicyState
from proxy.fleet.pool import Fleet
from proxy.fleet.replica import Facts, Replica, ReplicaState, Trial
from proxy.settings import ControlSettings

FIRST_PAUSE_S = 0.1
"""First pause before a late replica is asked again; doubled up to PROXY_LORA_RETRY_S. A mount that lags by a moment
then costs a moment, and one that lags for long is not hammered."""

REPAIR_EVERY_S = 60.0
"""A policy that somebody else unloads again and again is loaded again so often at most: two who manage one fleet would
otherwise keep each other busy."""

Answered = TypeVar("Answered")


def next_pause_s(pause_s: float, settings: ControlSettings) -> float:
    """Return the pause before files are looked for again after one of `pause_s` (0: the first)."""
    return min(max(2 * pause_s, FIRST_PAUSE_S), max(settings.lora_retry_s, FIRST_PAUSE_S))


class Keeper:
    """Looks after one replica. `background` outlives it and owns probes that take long."""

    def __init__(
        self,
        fleet: Fleet,
        replica: Replica,
        api: ReplicaApi,
        pausing: Pausing,
        settings: ControlSettings,
        background: asyncio.TaskGroup,
    ) -> None:
        self._fleet = fleet
        self._replica = replica
        self._api = api
        self._pausing = pausing
        self._settings = settings
        self._background = background
        self._wake = asyncio.Event()
        self._asking: asyncio.Task[Any] | None = None
        self._life = replica.life
        self._facts: Facts | None = None
        self._looked_at = -settings.probe_s
        self._looked_in: tuple[ReplicaState, float] | None = None
        """The state, and since when, in which it was looked at last."""
        self._repaired_at: dict[str, float] = {}

    async def run(self) -> None:
        """Keep the replica for ever. Cancel it to let go."""
        remove = self._fleet.on_change(self._fleet_changed)
        try:
            while True:
                self._wake.clear()
                wait_s = await self._step()
                if wait_s > 0:
                    await woken(self._wake, within_s=wait_s)
        finally:
            remove()

    def _fleet_changed(self) -> None:
        self._wake.set()
        if self._replica.life != self._life:  # it went down: what it was asked will not be answered any more
            self._life = self._replica.life
            if self._asking is not None:
                self._asking.cancel()

    async def _step(self) -> float:
        """Do the next thing. Return how many seconds there is nothing more to do, unless something changes."""
        fleet, replica = self._fleet, self._replica
        if replica.state not in (ReplicaState.JOINING, ReplicaState.READY):
            return self._settings.probe_s
        look_at = self._looked_at + self._settings.probe_s
        if self._looked_in != (replica.state, replica.since) or fleet.clock() >= look_at:
            return 0 if await self._look() else self._settings.probe_s / 4
        now = fleet.clock()
        todo = plan(fleet.policies, replica, slots=replica.facts.max_loras if replica.facts else None, now=now)
        if not replica.surveyed and not any(isinstance(action, Adopt) for action in todo.actions):
            replica.surveyed = True
            fleet.changed()
        if todo.actions:
            await self._act(todo.actions[0])
            return 0
        if replica.state is ReplicaState.JOINING and self._facts is not None:
            await self._join(self._facts)
        return max(min(look_at, todo.look_again_at) - fleet.clock(), 0.001)

    async def _ask(self, call: Coroutine[Any, Any, Answered]) -> Answered | None:
        """Return what a call gives, or None if the replica went down first: what it said in that life is void."""
        life = self._replica.life
        self._asking = asyncio.get_running_loop().create_task(call)  # awaited right here
        try:
            answer = await self._asking
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._replica.life == life or (task is not None and task.cancelling()):
                self._asking.cancel()
                raise
            return None
        finally:
            self._asking = None
        return answer if self._replica.life == life else None

    # Look

    async def _look(self) -> bool:
        """Read what the replica holds; while it joins, also what it is and whether its engine works.

        Return whether it has answered all that.
        """
        fleet, replica = self._fleet, self._replica
        looked_in = (replica.state, replica.since)
        models = await self._ask(self._api.models())
        if models is None:
            return self._not_yet(self._api.no_models)
        held = adapters(models)
        lost = [p for p in fleet.required() if p.state is PolicyState.LIVE and held.get(p.upstream) != p.path]
        if lost and replica.is_ready:  # whether it has restarted is asked in the next look
            fleet.set_state(replica, ReplicaState.JOINING, f"it has lost {', '.join(policy.name for policy in lost)}")
            self._looked_in = None
            return True
        if replica.state is ReplicaState.JOINING:
            calls = self._pausing.calls_so_far
            paused = await self._ask(self._api.is_paused())
            facts = await self._ask(self._api.facts(models)) if paused is not None else None
            if paused is None or facts is None:
                return self._not_yet("its engine does not answer")
            label = await self._ask(label_told(fleet, replica, self._api))
            fleet.saw_weights(replica, replica.weights if label is None else label)
            self._pausing.observed(replica, paused, calls=calls)
            self._note_lacks(facts)
            if _is_same_server(replica.facts, facts):
                for policy in filter(replica.holds, lost):
                    self._vanished(policy)
            self._facts = replica.facts = facts
        news = replica.saw(held, fleet.wall_clock())
        self._looked_at, self._looked_in = fleet.clock(), looked_in
        if news:
            fleet.changed()
        return True

    def _not_yet(self, why: str) -> bool:
        if self._replica.state is ReplicaState.JOINING:
            self._facts = None
            self._fleet.set_state(self._replica, ReplicaState.JOINING, why)
        return False

    def _note_lacks(self, facts: Facts) -> None:
        before = self._replica.facts.lacks if self._replica.facts else ()
        for lack in facts.lacks:
            if lack not in before:
                self._fleet.note("replica.lacks", lack.message, level="warning", replica=self._replica)

    async def _has_restarted(self, models: list[dict[str, Any]]) -> bool | None:
        """Return whether it is another server than the one that joined; None if it does not say.

        `models`: what it has just listed.
        """
        known = self._replica.facts
        facts = await self._ask(self._api.facts(models))
        if facts is None or facts.instance_id is None or known is None or known.instance_id is None:
            return None
        return not _is_same_server(known, facts)

    def _vanished(self, policy: Policy) -> None:
        now = self._fleet.clock()
        again_at = self._repaired_at.get(policy.upstream, -REPAIR_EVERY_S) + REPAIR_EVERY_S
        trial = self._replica.trials.setdefault(policy.upstream, Trial(now))
        trial.retry_at = max(now, again_at)
        self._repaired_at[policy.upstream] = trial.retry_at
        self._fleet.note(
            "policy.vanished",
            f"{self._replica.url} does not hold it any more although it has not restarted: somebody else has unloaded "
            f"it. It is loaded again in {max(again_at - now, 0):.0f} s",
            level="error",
            replica=self._replica,
            policy=policy,
        )

    # Act

    async def _act(self, action: Adopt | Unload | Verify | Load) -> None:
        match action:
            case Adopt(upstream, path):
                await self._adopt(upstream, path)
            case Unload(upstream):
                await self._unload(upstream)
            case Verify(policy):
                await self._verify(policy)
            case Load(policy):
                await self._load(policy)
        self._fleet.changed()

    async def _adopt(self, upstream: str, path: str) -> None:
        fleet = self._fleet
        name, _ = names.decode(upstream)
        policy = Policy(
            name=name,
            upstream=upstream,
            path=path,
            version=version_of(name),
            step=None,
            digest=None,
            announced_at=fleet.clock(),
            adopted=True,
            deadline=fleet.clock() + self._settings.lora_load_timeout_s,
        )
        kept_out = None
        with suppress(TimeoutError):  # its mount hangs; then its name tells its version
            kept_out = await look(self._settings.call_timeout_s, _kept_out, path, self._settings.adapter_roots)
            if kept_out is None:
                await look(self._settings.call_timeout_s, _recognise, policy)
        # Only now, since other keepers find things meanwhile: this policy, and other generations of its name.
        if upstream in fleet.policies:
            return
        if kept_out is not None:
            policy.state, policy.reason = PolicyState.RETIRED, kept_out
            fleet.note("policy.kept_out", kept_out, level="error", policy=policy, replica=self._replica)
            fleet.add_policy(policy)
            return
        known = fleet.named.get(name)
        if is_superseded(upstream, known):
            policy.state, policy.reason = PolicyState.RETIRED, "an older generation of its name"
            fleet.add_policy(policy)
            return
        if known is not None:
            fleet.hurry(known, "a newer generation of its name was found")
        fleet.note("policy.adopted", f"found on {self._replica.url}, from {path}", policy=policy, replica=self._replica)
        fleet.add_policy(policy)

    async def _unload(self, upstream: str) -> None:
        replica = self._replica
        replica.unsure.add(upstream)
        answer = await self._ask(self._api.unload(upstream))
        if answer is None:
            return
        if answer.status in (200, 404):
            replica.unsure.discard(upstream)
            replica.held.pop(upstream, None)
            replica.unload_at.pop(upstream, None)
            return
        replica.unload_at[upstream] = self._fleet.clock() + self._settings.lora_retry_s
        policy = self._fleet.policies.get(upstream)
        said = f"did not unload it: {answer.status or 'no answer'} {answer.message}; asked again"
        self._fleet.note("policy.not_unloaded", said, level="warning", replica=replica, policy=policy)

    async def _load(self, policy: Policy) -> None:
        replica, clock = self._replica, self._fleet.clock
        trial = replica.trials.setdefault(policy.upstream, Trial(clock()))
        trial.tries += 1
        trial.final = trial.proven = False
        replica.unsure.add(policy.upstream)
        answer = await self._ask(self._api.load(policy.upstream, policy.path))
        if answer is None:
            return
        outcome = await self._outcome(answer, policy)
        if outcome is not LoadOutcome.UNKNOWN:
            replica.unsure.discard(policy.upstream)
        trial.outcome, trial.message = outcome, answer.message if outcome is not LoadOutcome.LOADED else ""
        trial.load_s = clock() - trial.started_at
        if outcome is LoadOutcome.LOADED:
            replica.held[policy.upstream] = policy.path
            replica.held_since.setdefault(policy.upstream, self._fleet.wall_clock())
            trial.proven = self._settings.verify == "off"
            trial.proven_at = clock()
            trial.retry_at = trial.pause_s = 0.0
            self._loaded(policy)
            return
        trial.final = outcome is LoadOutcome.REFUSED
        self._try_later(trial)
        if outcome in RETRYABLE:
            self._fleet.note(f"load.{outcome}", trial.message, replica=replica, policy=policy)
        if replica.state is ReplicaState.JOINING and policy.state is PolicyState.LIVE:
            self._fleet.set_state(replica, ReplicaState.JOINING, f"cannot load {policy.name}: {trial.message}")

    def _loaded(self, policy: Policy) -> None:
        if policy.blocked:
            policy.blocked = ""
            self._fleet.note("policy.unblocked", "it has been loaded again", replica=self._replica, policy=policy)

    async def _outcome(self, answer: Answer, policy: Policy) -> LoadOutcome:
        """Say what an answer to a load means, asking once more where the answer alone does not tell."""
        outcome = load_outcome(answer)
        if outcome is LoadOutcome.ALREADY:
            # An earlier call of ours that got no answer, or somebody else: what it lists decides.
            models = await self._ask(self._api.models())
            if models is None:
                return LoadOutcome.UNKNOWN
            self._replica.saw(adapters(models), self._fleet.wall_clock())
            return LoadOutcome.LOADED if self._replica.holds(policy) else LoadOutcome.UNKNOWN
        if outcome is LoadOutcome.REFUSED and answer.failed_inside:
            health = await self._ask(self._api.health())
            if health is None or health.status != 200:
                return LoadOutcome.UNKNOWN  # an engine that dies refuses everything; its replica is about to go
        return outcome

    def _try_later(self, trial: Trial) -> None:
        trial.pause_s = next_pause_s(trial.pause_s, self._settings)
        trial.retry_at = self._fleet.clock() + trial.pause_s

    async def _verify(self, policy: Policy) -> None:
        """Look whether the replica lists what it said it had loaded, and whether it answers with it."""
        replica, began = self._replica, self._fleet.clock()
        trial = replica.trials[policy.upstream]
        models = await self._ask(self._api.models())
        if models is None:
            self._try_later(trial)
            return
        replica.saw(adapters(models), self._fleet.wall_clock())
        if not replica.holds(policy):
            restarted = await self._has_restarted(models)
            if restarted is None:  # it does not say who it is: what else it has lost tells
                restarted = any(not replica.holds(other) for other in self._fleet.live() if other is not policy)
            if restarted:
                if replica.is_ready:
                    self._fleet.set_state(replica, ReplicaState.JOINING, f"it restarted while {policy.name} loaded")
                return
            trial.final, trial.message = True, "it accepted the adapter, then did not list it"
            return
        if policy.state is PolicyState.LOADING and self._settings.verify == "probe" and not replica.paused:
            await self._probe(policy, trial)
        trial.proven = not trial.final
        trial.proven_at = self._fleet.clock()
        trial.verify_s = trial.proven_at - began

    async def _probe(self, policy: Policy, trial: Trial) -> None:
        """Send one request, and wait PROXY_VERIFY_S for it; after that it goes on in the background."""
        life = self._replica.life
        probe = self._background.create_task(self._proved(policy, trial))
        await asyncio.wait([probe], timeout=self._settings.verify_s)
        if not probe.done() and self._replica.life == life:
            said = f"the probe has not been answered within {self._settings.verify_s:g} s; the load goes on"
            self._fleet.note("verify.slow", said, replica=self._replica, policy=policy)

    async def _proved(self, policy: Policy, trial: Trial) -> None:
        proof = read_proof(await self._api.prove(policy.upstream))
        trial.logprobs = proof.logprobs
        if proof.spoiled:
            trial.final, trial.message = True, f"its answers are not numbers: {proof.message}"
            if policy.state is not PolicyState.LOADING:
                self._fleet.note("policy.spoiled", trial.message, level="error", replica=self._replica, policy=policy)
        elif not proof.logprobs:
            self._fleet.note("verify.nothing", proof.message, replica=self._replica, policy=policy)

    # Join

    async def _join(self, facts: Facts) -> None:
        """Let the replica in if it holds everything, fits the fleet, and is paused if the others are."""
        fleet, replica = self._fleet, self._replica
        if (why := _misfit(facts, fleet, replica)) is not None:
            fleet.set_state(replica, ReplicaState.JOINING, why)
            return
        may_be_outdated = fleet.weights.version is None and fleet.is_looking
        if may_be_outdated and fleet.clock() < fleet.started_at + self._settings.call_timeout_s:
            fleet.set_state(replica, ReplicaState.JOINING, "waits until all have told which base weights they have")
            return
        if not await self._pausing.align(replica, self._api) or replica.state is not ReplicaState.JOINING:
            return
        if missing := fleet.admit(replica, facts):
            lacking = ", ".join(policy.name for policy in missing)
            if not replica.reason.startswith("cannot load"):
                fleet.set_state(replica, ReplicaState.JOINING, f"lacks {lacking}")


def _is_same_server(known: Facts | None, facts: Facts) -> bool:
    """Whether a replica is, for certain, the server that it was: it has not restarted."""
    return known is not None and facts.instance_id is not None and facts.instance_id == known.instance_id


def _misfit(facts: Facts, fleet: Fleet, replica: Replica) -> str | None:
    """Return why the replica must not serve beside the ones that are ready, or None."""
    first = next((r for r in fleet.ready if r is not replica and r.facts), None)
    if first is None or first.facts is None:
        return None
    ours = (sorted(first.facts.model_names), first.facts.dtype)
    theirs = (sorted(facts.model_names), facts.dtype)
    if ours[0] == theirs[0] and (ours[1] == theirs[1] or None in (ours[1], theirs[1])):
        return None
    return (
        f"it serves {', '.join(theirs[0])} in {theirs[1]}, but {first.url} serves {', '.join(ours[0])} in {ours[1]}: "
        "start it with the same --model, --served-model-name and --dtype, or remove it"
    )


def _kept_out(path: str, roots: tuple[str, ...]) -> str | None:
    """Return why what was found on one replica must not be brought to others, or None."""
    refused = refuse_path(PurePosixPath(path), roots=roots, param="its path") if roots else None
    return refused.message if refused else None


def _recognise(policy: Policy) -> None:
    """Fill in what the manifest of an adopted policy tells, if it can be read and is the policy's own."""
    try:
        manifest = read_manifest(Path(policy.path))
    except ArtifactError:
        return
    if manifest.name == policy.upstream:
        policy.run, policy.version, policy.step = manifest.run, manifest.version, manifest.step
        policy.digest, policy.alias, policy.managed = manifest.digest, manifest.alias, True
