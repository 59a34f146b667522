"""The fleet: all replicas, all policies, the leases between them, and the changes that concern several of them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager

import msgspec

from proxy.fleet import names
from proxy.fleet.events import EventLog, Level
from proxy.fleet.pause import Pause
from proxy.fleet.policies import OCCUPYING, SERVED, WANTED, Policy, PolicyState
from proxy.fleet.replica import Facts, Replica, ReplicaState
from proxy.fleet.weights import UPDATING, BaseWeights, Member, Update, newest_version, policy_in

KEPT_RECORDS = 256
"""Retired and failed policies remembered, newest last: enough to answer a late question, bounded for long runs."""

NO_REPLICAS = "the fleet has no replica: none was listed, found or added, or all have left"

Address = tuple[str, int]
"""Host and port of a client."""


class Candidate(msgspec.Struct, frozen=True):
    """A replica that may serve one rollout, as `routing` sees it."""

    index: int
    inflight: int
    load: int = 0
    """What those in flight cost, in tokens as `routing` counts them."""


class Lease:
    """One rollout in flight, holding a replica and a policy. Give it back once, when the body has ended (P7)."""

    __slots__ = ("_held", "client", "load", "policy", "replica", "weights")

    def __init__(self, replica: Replica, policy: Policy | None, *, load: int, client: Address | None) -> None:
        self.replica = replica
        self.policy = policy
        self.load = load
        self.client = client
        self.weights = replica.weights
        """The label of the base weights with which it began."""
        self._held = True
        replica.inflight += 1
        replica.load += load
        if policy is not None:
            policy.leased.add(self)

    def release(self, changed: Callable[[], None]) -> None:
        """Give the lease back. A second call does nothing."""
        if not self._held:
            return
        self._held = False
        replica, policy = self.replica, self.policy
        replica.inflight -= 1
        replica.load -= self.load
        if policy is not None:
            policy.leased.discard(self)
            if not policy.leased:
                policy.leased.clear()  # an empty set keeps its table: half a MB after 5,000 leases, in each kept record
                if policy.state is not PolicyState.LIVE:
                    changed()
        if replica.inflight == 0 and replica.state in (ReplicaState.DRAINING, ReplicaState.QUARANTINED):
            changed()

    def __repr__(self) -> str:
        return f"<Lease replica={self.replica.index} policy={self.policy and self.policy.name} held={self._held}>"


class Fleet:
    """Replicas and policies. Not safe across threads: everything happens on one event loop.

    `clock` gives seconds and never goes back (time.monotonic), `wall_clock` seconds since 1970.
    """

    def __init__(
        self, urls: tuple[str, ...], *, clock: Callable[[], float], wall_clock: Callable[[], float] = time.time
    ) -> None:
        self.clock = clock
        self.wall_clock = wall_clock
        self.events = EventLog(wall_clock)
        self.started_at = clock()
        self.replicas: list[Replica] = []
        self.policies: dict[str, Policy] = {}
        """By upstream name, those that have ended among them."""
        self.named: dict[str, Policy] = {}
        """What each of the clients' names, or aliases, means now."""
        self.newest: dict[str | None, Policy] = {}
        """By run (None: of those that name none), the policy that was the last to become live."""
        self.pause: Pause | None = None
        """What a client has asked for and nobody has resumed."""
        self.weights = BaseWeights()
        """Which base weights every replica must have."""
        self.client_aborted_at = -math.inf
        """When a client last asked for rollouts to be aborted, on the clock; those begun before may end as aborted."""
        self.stopping = False
        """Whether the proxy is about to end."""
        self.discovering = False
        """Whether replicas are looked for and the first look has not ended yet, or has found none in an empty fleet."""
        self.generation = 0
        """The highest that any name has had."""
        self._by_index: dict[int, Replica] = {}
        self._serial = 0
        self._listeners: list[Callable[[], None]] = []
        for url in urls:
            self.add_replica(url)

    def on_change(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` after every change of a state, and when the last lease of what is leaving comes back.

        Returns a function that ends that.
        """
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def changed(self) -> None:
        """Tell the listeners that something they may wait for has happened."""
        for listener in tuple(self._listeners):
            listener()

    def note(
        self,
        kind: str,
        message: str,
        *,
        level: Level = "info",
        replica: Replica | None = None,
        policy: Policy | None = None,
        seconds: float | None = None,
    ) -> None:
        """Note an event (see `events`)."""
        self.events.add(
            kind,
            message,
            level=level,
            replica=replica.url if replica else None,
            policy=policy.name if policy else None,
            version=policy.version if policy else None,
            seconds=seconds,
        )

    # What rollouts ask

    @property
    def base_models(self) -> tuple[str, ...]:
        """The names of the base model, as the first replica that was asked gives them."""
        for replica in self.replicas:
            if replica.facts is not None:
                return replica.facts.model_names
        return ()

    @property
    def is_looking(self) -> bool:
        """Whether a replica has not told yet, since the start, what it holds: names that nobody knows may turn up."""
        return self.discovering or any(
            not r.surveyed and (r.state is ReplicaState.JOINING or (r.state is ReplicaState.DOWN and r.life == 0))
            for r in self.replicas
        )

    def served_policy(self, name: str) -> Policy | None:
        """Return the policy that a client's `name` means if rollouts of it are served now."""
        policy = self.named.get(name)
        return policy if policy is not None and policy.state in SERVED else None

    def staleness(self, policy: Policy | None) -> int | None:
        """Return by how many versions the newest policy of its run is ahead of `policy`; None: it has no version."""
        if policy is None or policy.version is None or (newest := self.newest.get(policy.run)) is None:
            return None
        return max(newest.version - policy.version, 0) if newest.version is not None else None

    def candidates(self, policy: Policy | None, *, excluding: Set[int] = frozenset()) -> list[Candidate]:
        """Return the ready replicas that hold `policy` (None: the base model), but for those in `excluding`."""
        return [
            Candidate(replica.index, replica.inflight, replica.load)
            for replica in self.replicas
            if replica.state is ReplicaState.READY
            and not replica.found_paused
            and replica.index not in excluding
            and (policy is None or replica.held.get(policy.upstream) == policy.path)
        ]

    def lease(self, index: int, policy: Policy | None, *, load: int = 0, client: Address | None = None) -> Lease:
        """Take a lease on a replica and a policy for a rollout that costs `load` and came from `client`."""
        replica = self._by_index[index]
        replica.routed += 1
        if policy is not None:
            policy.last_named_at = self.clock()
        return Lease(replica, policy, load=load, client=client)

    def release(self, lease: Lease) -> None:
        """Give a lease back; safe to call twice."""
        lease.release(self.changed)

    def client_aborted_since(self, when: float) -> bool:
        """Return whether a client has asked for aborts since then, so that what is cut short is so on purpose."""
        return self.client_aborted_at >= when

    @contextmanager
    def client_aborting(self) -> Iterator[None]:
        """While this lasts, and for rollouts begun before its end, an aborted answer is what a client asked for."""
        self.client_aborted_at = math.inf
        try:
            yield
        finally:
            self.client_aborted_at = self.clock()

    def suspect(self, replica: Replica, reason: str) -> None:
        """Note that a rollout found a ready replica unfit: it joins again before its next rollout."""
        if replica.is_ready:
            self.set_state(replica, ReplicaState.JOINING, reason)

    def block(self, policy: Policy, reason: str) -> None:
        """Give a policy no new rollouts: those it had have killed engines, and must not kill the fleet."""
        if not policy.blocked and policy.state in SERVED:
            policy.blocked = reason
            self.note("policy.blocked", f"gets no new rollouts: {reason}", level="error", policy=policy)
            self.changed()

    # Replicas

    def add_replica(self, url: str) -> Replica:
        """Take a replica in, under the lowest free index. It gets nothing before it has joined."""
        index = next(index for index in range(len(self._by_index) + 1) if index not in self._by_index)
        self._serial += 1
        replica = Replica(index, url, self._serial, since=self.wall_clock())
        self._by_index[index] = replica
        self.replicas.append(replica)
        self.changed()
        return replica

    def remove_replica(self, replica: Replica) -> None:
        """Forget a replica."""
        self.replicas.remove(replica)
        del self._by_index[replica.index]
        self.note("replica.removed", "removed", replica=replica)
        self.changed()

    @property
    def inflight(self) -> int:
        """Rollouts in flight on all replicas."""
        return sum(replica.inflight for replica in self.replicas)

    @property
    def ready(self) -> list[Replica]:
        """The replicas that hold all that the fleet serves."""
        return [replica for replica in self.replicas if replica.is_ready]

    def not_ready(self) -> str:
        """Return the replicas that get no rollouts, each with its state and reason."""
        if not self.replicas:
            return NO_REPLICAS
        waiting = [f"{r.url} is {r.state} ({r.reason})" for r in self.replicas if not r.is_ready]
        paused = [f"{r.url} is paused by someone else, POST /resume" for r in self.ready if r.found_paused]
        return "; ".join(waiting + paused)

    @property
    def up(self) -> list[Replica]:
        """The replicas that answer."""
        return [replica for replica in self.replicas if replica.is_up]

    def set_state(self, replica: Replica, state: ReplicaState, reason: str = "") -> None:
        """Move a replica to another state. What was known of it ends when it goes down, but not what it may still do:
        one that has only been away can carry out what it was asked before."""
        if (replica.state, replica.reason) == (state, reason):
            return
        before, replica.state, replica.reason = replica.state, state, reason
        lasted_s = None
        if before is not state:
            now = self.wall_clock()
            lasted_s, replica.since = now - replica.since, now
        if state is ReplicaState.DOWN:
            replica.life += 1
            replica.held, replica.held_since, replica.trials, replica.unload_at = {}, {}, {}, {}
            self.set_paused(replica, False)
            replica.found_paused = False
            replica.weights = None
        if state is ReplicaState.READY:
            replica.joins += 1
        bad = state in (ReplicaState.DOWN, ReplicaState.QUARANTINED)
        why = f" ({reason})" if reason else ""
        level: Level = "warning" if bad else "info"
        moved = f"{before} -> {state}" if before is not state else f"still {state}"
        self.note(f"replica.{state}", f"{moved}{why}", level=level, replica=replica, seconds=lasted_s)
        self.changed()

    def set_paused(self, replica: Replica, paused: bool) -> None:
        """Note whether a replica's engine is paused, and for how long it was."""
        now = self.clock()
        if replica.paused_since is not None:
            replica.paused_s += now - replica.paused_since
        replica.paused_since = now if paused else None

    def admit(self, replica: Replica, facts: Facts) -> list[Policy]:
        """Make a joining replica ready if it holds what the fleet wants; return what it lacks (nothing: it is ready).

        One synchronous step, so that no policy can come in between the comparison and the change (P3).
        """
        replica.facts = facts
        missing = [policy for policy in self.required() if not replica.has_proven(policy)]
        if not missing and replica.state is ReplicaState.JOINING and self.weights.misfit(replica) is None:
            self.set_state(replica, ReplicaState.READY)
        return missing

    @property
    def stands_still(self) -> bool:
        """Whether the replicas are really paused, because a client or a change of base weights wants that."""
        return self.pause is not None and self.pause.real

    def cache_was_reset(self, replica: Replica) -> None:
        """Note that a replica has emptied its prefix cache."""
        replica.cache_resets += 1
        self.changed()

    def health(self, *, min_ready: int, start_wait_s: float) -> tuple[bool, str]:
        """Return whether clients may start, and which replicas are not ready, each with its reason.

        One that only its base weights keep out counts as ready: nobody but the trainer can mend that.
        """
        if self.stopping:
            return False, "the proxy is stopping"
        usable = self.usable
        behind = [f"{r.url} is {r.state}: {r.reason}" for r in self.replicas if r not in usable]
        if not self.replicas:
            behind = [NO_REPLICAS]
        settled = (
            not behind
            or self.clock() - self.started_at >= start_wait_s
            or any(policy.adopted for policy in self.policies.values())
        ) and not any(policy.adopted and policy.state is PolicyState.LOADING for policy in self.policies.values())
        return (len(usable) >= min_ready and settled), "; ".join(behind)

    # Base weights

    @property
    def usable(self) -> list[Replica]:
        """The replicas that are ready, or that only their base weights keep from it."""
        return [replica for replica in self.replicas if replica.is_ready or self.is_outdated(replica)]

    def is_outdated(self, replica: Replica) -> bool:
        """Whether a replica stands apart because of its base weights, or waits for the end of their update."""
        if replica.state is not ReplicaState.QUARANTINED:
            return False
        update = self.weights.update
        return self.weights.misfit(replica) is not None or (update is not None and update.has(replica))

    def saw_weights(self, replica: Replica, label: str | None) -> None:
        """Note the label of a replica's base weights; a higher number than the fleet's is the fleet's from now on."""
        replica.weights = label
        newest = newest_version(self.weights.version, label)
        if self.weights.update is None and newest != self.weights.version:
            self.want_weights(newest)
        self._quarantine_misfits()

    def want_weights(self, version: str | None, *, checkpoint: str | None = None, beside: str | None = None) -> None:
        """Serve this version of the base weights from now on, and nothing from replicas that have another one.

        `checkpoint`: the directory that has it. `beside`: the label of those who may serve on until they have it.
        """
        weights = self.weights
        if version != weights.version:
            self.note("weights.version", f"the base weights that are served: {version}")
        elif checkpoint is None:
            checkpoint = weights.checkpoint
        weights.version, weights.checkpoint, weights.before = version, checkpoint, beside
        self._quarantine_misfits()

    def checkpoints(self) -> list[str]:
        """Return the policies whose checkpoints replicas have, or may be told to read."""
        labels = {self.weights.version, self.weights.before, *(replica.weights for replica in self.replicas)}
        return sorted({policy_in(label) for label in labels} - {""})

    def take_out(self, replica: Replica) -> None:
        """Give a replica no new rollouts: its base weights are about to be reloaded."""
        self.weights.reloading.add(replica)
        self._quarantine_misfits()

    def take_back(self, replica: Replica, label: str | None) -> None:
        """Note what a replica has after its reload, and let it join if that is what it should have.

        Within an update it waits for the update's end.
        """
        self.weights.reloading.discard(replica)
        replica.weights = label
        if replica.state is not ReplicaState.QUARANTINED or self.weights.update is not None:
            return
        misfit = self.weights.misfit(replica)
        state = ReplicaState.QUARANTINED if misfit else ReplicaState.JOINING
        self.set_state(replica, state, misfit or "its base weights have been reloaded")

    def begin_update(self, members: tuple[Member, ...]) -> None:
        """Let base weights change on these replicas. The others serve nothing until they have the new version."""
        self.weights.update = Update(members)
        self.note("weights.updating", f"base weights are being updated on {len(members)} replicas")
        self._quarantine_misfits()

    def end_update(self, version: str | None, *, checkpoint: str | None = None) -> None:
        """Serve what the update's members have, labelled `version`; what was served before, if that has not changed."""
        update, self.weights.update = self.weights.update, None
        self.want_weights(version, checkpoint=checkpoint)
        for member in update.members if update else ():
            replica = member.replica
            if member.is_there and replica.state is ReplicaState.QUARANTINED and not self.weights.misfit(replica):
                self.set_state(replica, ReplicaState.JOINING, "it has the fleet's base weights")

    def fail_update(self, why: str) -> None:
        """Serve nothing from the members of the update: nobody knows what their base weights are."""
        update, self.weights.update = self.weights.update, None
        self.note("weights.failed", f"the update of the base weights failed: {why}", level="error")
        for member in update.members if update else ():
            if member.is_there:
                member.replica.weights = UPDATING
        self._quarantine_misfits()

    def is_torn(self, replica: Replica) -> bool:
        """Whether a replica's base weights are no version at all, so that nothing it answers may be delivered."""
        update = self.weights.update
        return replica.weights == UPDATING and not (update is not None and update.has(replica))

    def _quarantine_misfits(self) -> None:
        for replica in self.replicas:
            if replica.state in (ReplicaState.JOINING, ReplicaState.READY) and (why := self.weights.misfit(replica)):
                self.set_state(replica, ReplicaState.QUARANTINED, why)

    # Policies

    def occupying(self) -> list[Policy]:
        """Return the policies that take a slot by what is wanted."""
        return [policy for policy in self.policies.values() if policy.state in OCCUPYING]

    def leaving(self) -> list[Policy]:
        """Return the policies that have ended, but that a replica may hold still: they take a slot as well."""
        held = {upstream for replica in self.up for upstream in (*replica.held, *replica.unsure)}
        return [
            policy for policy in self.policies.values() if policy.state not in OCCUPYING and policy.upstream in held
        ]

    def live(self) -> list[Policy]:
        """Return the policies that every ready replica must hold, oldest first."""
        return [policy for policy in self.policies.values() if policy.state is PolicyState.LIVE]

    def required(self) -> list[Policy]:
        """Return the policies that a replica must hold to become ready: all live and loading ones, but for blocked."""
        return [policy for policy in self.policies.values() if policy.state in WANTED and not policy.blocked]

    def slots(self) -> int | None:
        """Return the smallest max_loras of the replicas that said theirs, or None if none did."""
        known = [r.facts.max_loras for r in self.replicas if r.facts and r.facts.max_loras is not None]
        return min(known, default=None)

    def new_upstream(self, name: str) -> str:
        """Return a name for replicas that nobody has used before."""
        self.generation = names.next_generation(self.wall_clock(), self.generation)
        return names.upstream_name(name, self.generation)

    def add_policy(self, policy: Policy) -> None:
        """Take a new record in; unless it has ended, its name means this policy from now on.

        The oldest ended records that no replica holds are forgotten.
        """
        policy.since = self.wall_clock()
        self.policies.pop(policy.upstream, None)
        self.policies[policy.upstream] = policy
        if policy.state in OCCUPYING:
            self.named[policy.name] = policy
        self.generation = max(self.generation, names.decode(policy.upstream)[1] or 0)
        leaving = {id(policy) for policy in self.leaving()}
        ended = [p for p in self.policies.values() if p.state not in OCCUPYING and id(p) not in leaving]
        for old in ended[: max(0, len(ended) - KEPT_RECORDS)]:
            del self.policies[old.upstream]
            for replica in self.replicas:
                replica.trials.pop(old.upstream, None)
            self.named = {name: known for name, known in self.named.items() if known is not old}
            self.newest = {run: known for run, known in self.newest.items() if known is not old}
        self.changed()

    def set_policy_state(self, policy: Policy, state: PolicyState, reason: str = "") -> None:
        """Move a policy to another state."""
        before, policy.state, policy.reason, policy.since = policy.state, state, reason, self.wall_clock()
        why = f" ({reason})" if reason else ""
        level: Level = "warning" if state is PolicyState.FAILED else "info"
        took_s = self.clock() - policy.announced_at if before is PolicyState.LOADING else None
        self.note(f"policy.{state}", f"{before} -> {state}{why}", level=level, policy=policy, seconds=took_s)
        self.changed()

    def commit(self, policy: Policy) -> None:
        """Make a policy visible: one synchronous step over the replicas that are ready now (P2).

        One that does not hold it joins again first (P3).
        """
        for replica in self.ready:
            if not replica.has_proven(policy):
                self.set_state(replica, ReplicaState.JOINING, f"lacks {policy.name}, which is live on the others")
        policy.scout = None  # those that join later need not wait for it
        if policy.alias:
            self._point(policy.alias, policy)
        newest = self.newest.get(policy.run)
        if newest is None or policy.newness >= newest.newness:
            self.newest[policy.run] = policy
        self.set_policy_state(policy, PolicyState.LIVE)

    def name_also(self, policy: Policy, alias: str) -> None:
        """Let `alias` mean `policy` as well: at once if it is live, else from its commit on."""
        policy.alias = alias
        if policy.state is PolicyState.LIVE:
            self._point(alias, policy)

    def _point(self, alias: str, policy: Policy) -> None:
        """Let `alias` mean `policy`, unless a newer one has it: after a restart they are found in any order."""
        known = self.named.get(alias)
        if known is None or known.state not in OCCUPYING or policy.newness >= known.newness:
            self.named[alias] = policy

    def retire(self, policy: Policy, reason: str, *, deadline: float) -> None:
        """Promise to unload `policy`: its rollouts are served until its unload is sent, at the latest at `deadline`.

        One that is still loading fails instead. Safe to call twice.
        """
        if policy.state is PolicyState.LOADING:
            self.set_policy_state(policy, PolicyState.FAILED, reason)
        elif policy.state is PolicyState.LIVE:
            policy.deadline = deadline
            self.set_policy_state(policy, PolicyState.RETIRING, reason)

    def hurry(self, policy: Policy, reason: str) -> None:
        """Unload `policy` as soon as possible, with rollouts in flight if need be: vLLM lets these finish."""
        self.retire(policy, reason, deadline=-math.inf)
        policy.deadline = -math.inf
        self.changed()

    def __repr__(self) -> str:
        return f"<Fleet ready={len(self.ready)}/{len(self.replicas)} live={len(self.live())} inflight={self.inflight}>"
