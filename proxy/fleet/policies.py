"""One policy as the proxy knows it, and the rule that says whose slot a new one may take."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class PolicyState(StrEnum):
    """Where a policy stands, from announcement to oblivion."""

    LOADING = "loading"
    """Announced, on its way to the replicas. Rollouts that name it wait."""
    LIVE = "live"
    """Every ready replica holds it. Rollouts that name it are served."""
    RETIRING = "retiring"
    """Its unload was asked for and waits for its rollouts. Those that name it are still served."""
    RETIRED = "retired"
    """Unloaded everywhere. Rollouts that name it get 404."""
    FAILED = "failed"
    """Did not reach every replica and was rolled back. Rollouts that name it get 404."""


OCCUPYING = frozenset({PolicyState.LOADING, PolicyState.LIVE, PolicyState.RETIRING})
"""The states in which a policy takes one of vLLM's slots."""

SERVED = frozenset({PolicyState.LIVE, PolicyState.RETIRING})
"""The states in which rollouts that name the policy are served."""


@dataclass
class Policy:
    """The mutable record of one policy. `name` is what clients and replicas call it."""

    name: str
    path: str
    version: int | None
    step: int | None
    digest: str | None
    """None when the proxy cannot read the files and nobody announced it."""
    announced_at: float
    """Seconds on the fleet's clock."""
    state: PolicyState = PolicyState.LOADING
    reason: str = ""
    """Why it is in this state, where the state alone does not say."""
    adopted: bool = False
    """Found on a replica, not announced to this process."""
    last_named_at: float = 0.0
    """When a rollout last named it; the announcement counts as well."""
    leases: int = 0
    """Rollouts in flight."""

    def __repr__(self) -> str:
        return f"<Policy {self.name} {self.state} leases={self.leases}>"


def slot_to_take(policies: Iterable[Policy], *, now: float, idle_s: float) -> Policy | None:
    """Return the policy that must make room for a new one, or None when every slot is in real use.

    Three cases, in this order:
    1. a retiring policy goes first, the oldest one, even with rollouts in flight: vLLM lets these finish;
    2. else an abandoned one: live, without a rollout, and named by nobody for `idle_s` seconds (an adopted policy that
       nobody has named counts as abandoned from the start), the one that was named longest ago;
    3. never the newest live policy, since a trainer may be between two steps.
    """
    occupying = list(policies)
    retiring = [policy for policy in occupying if policy.state is PolicyState.RETIRING]
    if retiring:
        return min(retiring, key=lambda policy: policy.announced_at)
    live = sorted((p for p in occupying if p.state is PolicyState.LIVE), key=lambda p: (p.announced_at, p.version or 0))
    abandoned = [policy for policy in live[:-1] if _is_abandoned(policy, now=now, idle_s=idle_s)]
    return min(abandoned, key=lambda p: (p.last_named_at, p.version or 0)) if abandoned else None


def _is_abandoned(policy: Policy, *, now: float, idle_s: float) -> bool:
    never_named = policy.adopted and not policy.last_named_at
    return policy.leases == 0 and (never_named or now - policy.last_named_at >= idle_s)
