"""The fleet: all replicas, all policies, the leases between them, and frozen views of the whole."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager

import msgspec

from proxy.fleet.policies import OCCUPYING, SERVED, Policy, PolicyState
from proxy.fleet.replica import Facts, Replica, ReplicaState

logger = logging.getLogger(__name__)

KEPT_RECORDS = 256
"""Retired and failed policies remembered, newest last: enough to answer a late question, bounded for long runs."""


class Candidate(msgspec.Struct, frozen=True):
    """A replica that may serve one rollout, as `routing` sees it."""

    index: int
    inflight: int
    load: int = 0
    """What those in flight cost, in tokens as `routing` counts them."""


class Lease:
    """One rollout in flight, holding a replica and a policy. Give it back once, when the body has ended (P7)."""

    def __init__(self, replica: Replica, policy: Policy | None, *, load: int = 0) -> None:
        self.replica = replica
        self.policy = policy
        self.load = load
        self._held = True
        replica.inflight += 1
        replica.load += load
        if policy is not None:
            policy.leases += 1

    def release(self, changed: Callable[[], None]) -> None:
        """Give the lease back. A second call does nothing."""
        if not self._held:
            return
        self._held = False
        self.replica.inflight -= 1
        self.replica.load -= self.load
        if self.policy is not None:
            self.policy.leases -= 1
            if self.policy.leases == 0 and self.policy.state is PolicyState.RETIRING:
                changed()

    def __repr__(self) -> str:
        return f"<Lease replica={self.replica.index} policy={self.policy and self.policy.name} held={self._held}>"


class Fleet:
    """Replicas and policies. Not safe across threads: everything happens on one event loop.

    `clock` gives seconds and never goes back (time.monotonic).
    """

    def __init__(self, urls: tuple[str, ...], *, clock: Callable[[], float]) -> None:
        self.replicas = [Replica(index, url) for index, url in enumerate(urls)]
        self.policies: dict[str, Policy] = {}
        self.clock = clock
        self.started_at = clock()
        self.client_aborted_at = -math.inf
        """When a client last asked for rollouts to be aborted, on the clock; those begun before may end as aborted."""
        self._listeners: list[Callable[[], None]] = []

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener` after every change of a state, and when the last lease of a retiring policy comes back."""
        self._listeners.append(listener)

    def _changed(self) -> None:
        for listener in self._listeners:
            listener()

    # What rollouts ask

    @property
    def base_models(self) -> tuple[str, ...]:
        """The names of the base model, as the first replica that was asked gives them."""
        for replica in self.replicas:
            if replica.facts is not None:
                return replica.facts.model_names
        return ()

    def served_policy(self, model: str) -> Policy | None:
        """Return the policy that `model` names if rollouts of it are served now."""
        policy = self.policies.get(model)
        return policy if policy is not None and policy.state in SERVED else None

    def candidates(self, policy: Policy | None, *, excluding: Set[int] = frozenset()) -> tuple[Candidate, ...]:
        """Return the ready replicas that hold `policy` (None: the base model), but for those in `excluding`."""
        return tuple(
            Candidate(replica.index, replica.inflight, replica.load)
            for replica in self.replicas
            if replica.is_ready
            and replica.index not in excluding
            and (policy is None or replica.held.get(policy.name) == policy.path)
        )

    def lease(self, index: int, policy: Policy | None, *, load: int = 0) -> Lease:
        """Take a lease on a replica and a policy for a rollout that costs `load`."""
        replica = self.replicas[index]
        replica.routed += 1
        if policy is not None:
            policy.last_named_at = self.clock()
        return Lease(replica, policy, load=load)

    def release(self, lease: Lease) -> None:
        """Give a lease back; safe to call twice."""
        lease.release(self._changed)

    @contextmanager
    def client_aborting(self) -> Iterator[None]:
        """While this lasts, and for rollouts begun before its end, an aborted answer is what a client asked for."""
        self.client_aborted_at = math.inf
        try:
            yield
        finally:
            self.client_aborted_at = self.clock()

    def suspect(self, index: int, reason: str) -> None:
        """Note that a rollout found a ready replica unfit: it joins again before its next rollout."""
        replica = self.replicas[index]
        if replica.is_ready:
            self.set_state(replica, ReplicaState.JOINING, reason)

    # What the control plane does

    @property
    def inflight(self) -> int:
        """Rollouts in flight on all replicas."""
        return sum(replica.inflight for replica in self.replicas)

    @property
    def ready(self) -> list[Replica]:
        """The replicas that get rollouts."""
        return [replica for replica in self.replicas if replica.is_ready]

    def not_ready(self) -> str:
        """Return the replicas that get no rollouts, each with its state and reason."""
        return "; ".join(f"{r.url} is {r.state} ({r.reason})" for r in self.replicas if not r.is_ready)

    @property
    def up(self) -> list[Replica]:
        """The replicas that answer."""
        return [replica for replica in self.replicas if replica.state is not ReplicaState.DOWN]

    def occupying(self) -> Iterator[Policy]:
        """Yield the policies that take a slot."""
        return (policy for policy in self.policies.values() if policy.state in OCCUPYING)

    def live(self) -> list[Policy]:
        """Return the policies that every ready replica must hold, oldest first."""
        return [policy for policy in self.policies.values() if policy.state is PolicyState.LIVE]

    def slots(self) -> int | None:
        """Return the smallest max_loras of the replicas that said theirs, or None if none did."""
        known = [r.facts.max_loras for r in self.replicas if r.facts and r.facts.max_loras is not None]
        return min(known, default=None)

    def add_policy(self, policy: Policy) -> None:
        """Take a new record in, in place of an ended one of the same name, and forget the oldest ended records."""
        self.policies.pop(policy.name, None)
        self.policies[policy.name] = policy
        ended = [name for name, known in self.policies.items() if known.state not in OCCUPYING]
        for name in ended[: max(0, len(ended) - KEPT_RECORDS)]:
            del self.policies[name]
        self._changed()

    def set_policy_state(self, policy: Policy, state: PolicyState, reason: str = "") -> None:
        """Move a policy to another state."""
        logger.info("policy %s: %s -> %s%s", policy.name, policy.state, state, f" ({reason})" if reason else "")
        policy.state, policy.reason = state, reason
        self._changed()

    def commit(self, policy: Policy, holders: list[Replica]) -> None:
        """Make a policy visible: one synchronous step (P2).

        A replica that became ready while the policy travelled, and does not hold it, joins again first (P3).
        """
        for replica in self.ready:
            if replica not in holders:
                self.set_state(replica, ReplicaState.JOINING, f"lacks {policy.name}, which became live meanwhile")
        self.set_policy_state(policy, PolicyState.LIVE)

    def set_state(self, replica: Replica, state: ReplicaState, reason: str = "") -> None:
        """Move a replica to another state. Whatever was known of it ends when it goes down."""
        if (replica.state, replica.reason) == (state, reason):
            return
        level = logging.WARNING if state is ReplicaState.DOWN else logging.INFO
        why = f" ({reason})" if reason else ""
        logger.log(level, "replica %s: %s -> %s%s", replica.url, replica.state, state, why)
        replica.state, replica.reason = state, reason
        if state is ReplicaState.DOWN:
            replica.held = {}
        self._changed()

    def admit(self, replica: Replica, facts: Facts) -> list[Policy]:
        """Make a joining replica ready if it holds every live policy; return those that it lacks (none: it is ready).

        One synchronous step, so that no policy can become live between the comparison and the change.
        """
        missing = [policy for policy in self.live() if replica.held.get(policy.name) != policy.path]
        replica.facts = facts
        if not missing:
            replica.incarnation += 1
            self.set_state(replica, ReplicaState.READY)
        return missing

    def cache_was_reset(self, replica: Replica) -> None:
        """Note that a replica has emptied its prefix cache."""
        replica.cache_resets += 1
        self._changed()

    def health(self, *, min_ready: int, start_wait_s: float) -> tuple[bool, str]:
        """Return whether clients may start, and which replicas are not ready, each with its reason."""
        behind = [f"{r.url} is {r.state}: {r.reason}" for r in self.replicas if not r.is_ready]
        settled = (
            not behind
            or self.clock() - self.started_at >= start_wait_s
            or any(policy.adopted for policy in self.policies.values())
        )
        return (len(self.ready) >= min_ready and settled), "; ".join(behind)

    def __repr__(self) -> str:
        return f"<Fleet ready={len(self.ready)}/{len(self.replicas)} live={len(self.live())} inflight={self.inflight}>"
