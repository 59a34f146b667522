"""What must be done so that the fleet becomes what is wanted. Pure functions: they look, and return data.

`plan` says what one replica needs. `decide` says what becomes of one policy. Load, unload, join, restart, rollback and
repair are all the same comparison of what is wanted with what is held.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

from proxy.fleet import names
from proxy.fleet.policies import OCCUPYING, WANTED, Policy, PolicyState
from proxy.fleet.replica import Replica, ReplicaState

ADOPTED_LATE_S = 5.0
"""An adopted policy that a replica does not see for so long is retired: nobody vouches for its files, and it must not
keep replicas out. A mount shows new files within about a second (docs/reliability.md, "What is known")."""

PROBE_NATS = 0.5
"""Mean difference of two replicas' log-probabilities for one prompt above which they do not serve the same weights.
Kernels and batch sizes move it by less than 0.1."""


NOT_IN_TIME = "it has not answered in time"
"""Said of a replica that had no words of its own until the deadline: its call, or the check after it, was under way."""


@dataclass(frozen=True)
class Adopt:
    """The replica holds something nobody announced to this process: take it into the fleet (P10)."""

    upstream: str
    path: str


@dataclass(frozen=True)
class Unload:
    """Take this name away from the replica."""

    upstream: str


@dataclass(frozen=True)
class Verify:
    """The replica has said that it holds this policy: look whether it does."""

    policy: Policy


@dataclass(frozen=True)
class Load:
    """Ask the replica for this policy, for the first time or again."""

    policy: Policy


Action = Adopt | Unload | Verify | Load


@dataclass(frozen=True)
class Plan:
    """What one replica needs now, in order, and when to look again if nothing changes (on the fleet's clock)."""

    actions: tuple[Action, ...]
    look_again_at: float = math.inf


def plan(policies: Mapping[str, Policy], replica: Replica, *, slots: int | None, now: float) -> Plan:
    """Compare the fleet's `policies` (by upstream name) with what one replica holds.

    First what must go, so that slots are free; then what is there and must be checked; then what is missing, oldest
    first, as far as there are slots. A policy whose scout is another replica waits for it. Nothing is done to a replica
    that is down, quarantined or being removed.
    """
    if replica.state not in (ReplicaState.JOINING, ReplicaState.READY):
        return Plan(())
    adopts = [Adopt(upstream, path) for upstream, path in replica.held.items() if upstream not in policies]
    maybe = {**replica.held, **dict.fromkeys(sorted(replica.unsure))}
    going = [upstream for upstream in maybe if _must_go(upstream, policies.get(upstream), replica)]
    unloads = [Unload(upstream) for upstream in going if replica.unload_at.get(upstream, 0.0) <= now]
    wanted = sorted((p for p in policies.values() if p.state in WANTED), key=lambda p: bool(p.blocked))
    checks = [Verify(p) for p in wanted if _to_check(p, replica) and replica.trials[p.upstream].retry_at <= now]
    missing = [p for p in wanted if _is_missing(p, replica)]
    free = math.inf if slots is None else slots - len(replica.held.keys() | replica.unsure)
    loads = [Load(p) for p in missing if _retry_at(p, replica) <= now]
    fitting = [load for load in loads if free > 0 or replica.may_hold(load.policy.upstream)]
    later = [
        *(at for upstream in going if (at := replica.unload_at.get(upstream, 0.0)) > now),
        *(at for p in wanted if _to_check(p, replica) and (at := replica.trials[p.upstream].retry_at) > now),
        *(at for p in missing if (at := _retry_at(p, replica)) > now),
    ]
    return Plan((*unloads, *adopts, *checks, *fitting[:1]), min(later, default=math.inf))


def _must_go(upstream: str, known: Policy | None, replica: Replica) -> bool:
    """Whether the replica should not hold this: it has ended, or is wanted from another path."""
    if known is None:
        return upstream not in replica.held  # what is there is adopted; what may be there still has been forgotten
    from_elsewhere = known.upstream in replica.held and not replica.holds(known)
    return known.state not in OCCUPYING or (known.state in WANTED and from_elsewhere)


def _to_check(policy: Policy, replica: Replica) -> bool:
    trial = replica.trials.get(policy.upstream)
    return trial is not None and not trial.proven and not trial.final and replica.holds(policy)


def _is_missing(policy: Policy, replica: Replica) -> bool:
    """Whether the replica is to be asked for the policy, sooner or later."""
    if replica.holds(policy) and policy.upstream not in replica.unsure:
        return False
    trial = replica.trials.get(policy.upstream)
    refused = trial is not None and trial.final and policy.state is PolicyState.LOADING
    return not refused and policy.scout in (None, replica.index)


def _retry_at(policy: Policy, replica: Replica) -> float:
    trial = replica.trials.get(policy.upstream)
    return trial.retry_at if trial else 0.0


class Fate(Enum):
    """What becomes of a policy that loads."""

    WAIT = "wait"
    COMMIT = "commit"
    FAIL = "fail"


@dataclass(frozen=True)
class Decision:
    """What becomes of a policy that loads, and why."""

    fate: Fate
    why: str = ""


def decide(policy: Policy, replicas: Iterable[Replica], *, quorum: int | None, now: float) -> Decision:
    """Say whether a policy that loads is complete, lost, or on its way still.

    All replicas that are ready now count: one that has died or restarted meanwhile has left, one that has become ready
    meanwhile is asked as well. The load fails when one of them refuses the policy, when none is left, or at the
    deadline. With a `quorum` it is enough that so many hold the policy and the others have all said that it is late.

    While no replica is ready yet, what is found on one that joins is live at once (P10).
    """
    everyone = [replica for replica in replicas if replica.is_up]
    asked = [replica for replica in everyone if replica.is_ready]
    holders = [replica for replica in asked if replica.has_proven(policy)]
    if not asked and policy.adopted and any(replica.holds(policy) for replica in everyone):
        return Decision(Fate.COMMIT)
    if not asked:
        return Decision(Fate.FAIL, "no replica was left")
    if len(holders) == len(asked):
        return Decision(Fate.COMMIT)
    refused = [r for r in asked if (trial := r.trials.get(policy.upstream)) and trial.final]
    if refused:
        return Decision(Fate.FAIL, _said(refused, policy))
    behind = [replica for replica in asked if replica not in holders]
    if quorum is not None and len(holders) >= quorum and all(_is_late(replica, policy) for replica in behind):
        return Decision(Fate.COMMIT)
    if now >= policy.deadline:
        return Decision(Fate.FAIL, _said(behind, policy))
    return Decision(Fate.WAIT)


def _is_late(replica: Replica, policy: Policy) -> bool:
    trial = replica.trials.get(policy.upstream)
    return trial is not None and trial.outcome in ("late", "torn")


def _said(replicas: Sequence[Replica], policy: Policy) -> str:
    """Return what these replicas have answered last."""
    said = []
    for replica in replicas:
        trial = replica.trials.get(policy.upstream)
        tries, message = (trial.tries, trial.message or NOT_IN_TIME) if trial else (0, "it was not asked in time")
        said.append(f"{replica.url} after {tries} tries: {message}")
    return "; ".join(said)


def no_longer_loads(policy: Policy, replicas: Iterable[Replica], *, now: float) -> str | None:
    """Return why an adopted policy is to be retired, or None: a replica refuses it, or has not seen it for a while."""
    if not policy.adopted:
        return None
    for replica in replicas:
        trial = replica.trials.get(policy.upstream)
        if trial is None or replica.holds(policy) or not replica.is_up:
            continue
        if trial.final or (trial.outcome in ("late", "torn") and now - trial.started_at >= ADOPTED_LATE_S):
            return f"adopted, but {replica.url} cannot load it: {trial.message}"
    return None


def surplus(policies: Iterable[Policy], *, slots: int | None) -> list[Policy]:
    """Return the adopted policies that do not fit into the slots, the lowest versions first (P10)."""
    occupying = [policy for policy in policies if policy.state in OCCUPYING]
    excess = 0 if slots is None else len(occupying) - slots
    adopted = [policy for policy in occupying if policy.adopted and policy.state is not PolicyState.RETIRING]
    adopted.sort(key=lambda policy: policy.age_key)
    return adopted[: max(excess, 0)]


def is_superseded(upstream: str, known: Policy | None) -> bool:
    """Whether `upstream` is an older generation of a name that has, or had, a newer one (P1).

    Once the newer one has ended the name means nothing: to serve the older one then would be to serve other weights.
    """
    if known is None:
        return False
    _, generation = names.decode(upstream)
    _, newest = names.decode(known.upstream)
    return (generation or 0) < (newest or 0)


def disagreement(policy: Policy, replicas: Iterable[Replica]) -> str | None:
    """Return which two replicas differ on the probe's prompt by more than PROBE_NATS, or None."""
    told = [(r, t.logprobs) for r in replicas if (t := r.trials.get(policy.upstream)) and t.logprobs]
    said = (differ(first.url, ours, second.url, theirs) for (first, ours), (second, theirs) in pairwise(told))
    return next(filter(None, said), None)


def differ(first: str, ours: Sequence[float], second: str, theirs: Sequence[float]) -> str | None:
    """Return how far two servers are apart in what a probe told of them, or None if they serve the same weights."""
    if len(ours) != len(theirs):
        return f"{first} and {second} read the same prompt as {len(ours)} and {len(theirs)} tokens"
    mean = sum(abs(a - b) for a, b in zip(ours, theirs, strict=True)) / max(len(ours), 1)
    return f"{first} and {second} differ by {mean:.2f} nats a token on the same prompt" if mean > PROBE_NATS else None
