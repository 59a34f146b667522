"""One policy as the proxy knows it, and the rule that says whose slot a new one may take."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proxy.fleet.pool import Lease


class PolicyState(StrEnum):
    """Where a policy stands, from announcement to oblivion."""

    LOADING = "loading"
    """Announced, on its way to the replicas. Rollouts that name it wait."""
    LIVE = "live"
    """Every ready replica holds it. Rollouts that name it are served."""
    RETIRING = "retiring"
    """Its unload was asked for and waits for its rollouts. Those that name it are still served."""
    RETIRED = "retired"
    """Its unload has been sent, or is about to be. Rollouts that name it get 404."""
    FAILED = "failed"
    """Did not reach every replica and is taken back. Rollouts that name it get 404."""


OCCUPYING = frozenset({PolicyState.LOADING, PolicyState.LIVE, PolicyState.RETIRING})
"""The states in which a policy takes one of vLLM's slots."""

SERVED = frozenset({PolicyState.LIVE, PolicyState.RETIRING})
"""The states in which rollouts that name the policy are served."""

WANTED = frozenset({PolicyState.LOADING, PolicyState.LIVE})
"""The states in which a replica that lacks the policy loads it."""


@dataclass(eq=False)
class Policy:
    """The mutable record of one policy."""

    name: str
    """What clients call it."""
    upstream: str
    """What replicas call it (see `names`). No two policies ever share it."""
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
    since: float = 0.0
    """When it came into this state, seconds since 1970."""
    run: str | None = None
    """The training run, where an announcement or a manifest names it."""
    managed: bool = False
    """Announced with run, version and digest, so that its name means the same bytes for ever."""
    alias: str | None = None
    """Another name of the client's that means this policy once it is live."""
    adopted: bool = False
    """Found on a replica, not announced to this process."""
    deadline: float = math.inf
    """By when it must be everywhere while it loads, and by when its rollouts must have ended while it retires."""
    scout: int | None = None
    """While the proxy cannot check its files: the replica that loads and proves it before the others are told."""
    callers: int = 0
    """Connected clients that wait for it to load."""
    blocked: str = ""
    """Why it takes no new rollouts, although it is live: it has killed two engines. Empty: it takes them."""
    suspected_until: float = -math.inf
    """An engine has just died under a rollout of it: until then, on the fleet's clock, new ones wait for the outcome of
    the second try."""
    second_try: int | None = None
    """The one other replica that rollouts go to whose engine has died under them: if they killed it, no more than one
    further engine follows, however many they are."""
    last_named_at: float = 0.0
    """When a rollout last named it; the announcement counts as well."""
    leased: set[Lease] = field(default_factory=set)
    """The rollouts in flight."""
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds that each phase of its load took."""

    @property
    def leases(self) -> int:
        """Rollouts in flight."""
        return len(self.leased)

    @property
    def newness(self) -> tuple[bool, float]:
        """Sorts live policies by how new they are: what was adopted by its version, what was announced after these."""
        return (False, self.version or 0) if self.adopted else (True, self.announced_at)

    @property
    def age_key(self) -> tuple[float, int]:
        """Sorts policies from the oldest to the newest: those adopted together by their version."""
        return (self.announced_at, self.version or 0)

    def __repr__(self) -> str:
        return f"<Policy {self.upstream} {self.state} leases={self.leases}>"


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
    live = sorted((p for p in occupying if p.state is PolicyState.LIVE), key=lambda p: p.age_key)
    abandoned = [policy for policy in live[:-1] if _is_abandoned(policy, now=now, idle_s=idle_s)]
    return min(abandoned, key=lambda p: (p.last_named_at, p.version or 0)) if abandoned else None


def _is_abandoned(policy: Policy, *, now: float, idle_s: float) -> bool:
    never_named = policy.adopted and not policy.last_named_at
    return policy.leases == 0 and (never_named or now - policy.last_named_at >= idle_s)
