"""What must be done to a replica so that it holds what the fleet serves. A pure function that returns actions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from proxy.fleet.policies import Policy, PolicyState


@dataclass(frozen=True)
class Load:
    """Load this policy on the replica."""

    policy: Policy


@dataclass(frozen=True)
class Unload:
    """Take this name away from the replica."""

    name: str


@dataclass(frozen=True)
class Adopt:
    """The replica holds something nobody announced to this process: take it into the fleet (P10)."""

    name: str
    path: str


Action = Load | Unload | Adopt


def plan(policies: Mapping[str, Policy], held: Mapping[str, str]) -> list[Action]:
    """Compare the fleet's `policies` (by name) with what one replica holds (name -> path).

    Three cases for what it holds: known and served, from the same path (nothing to do); known otherwise, so a remnant
    (unload it); unknown (adopt it). Then every live policy that it lacks is loaded. Policies that are loading or
    retiring are left to those who load and retire them.
    """
    actions: list[Action] = []
    for name, path in held.items():
        if name not in policies:
            actions.append(Adopt(name, path))
        elif is_remnant(policies[name], path):
            actions.append(Unload(name))
    actions += [Load(policy) for policy in live_missing(policies.values(), held)]
    return actions


def is_remnant(known: Policy | None, path: str | None) -> bool:
    """Return whether a replica should not hold the name of `known` from `path`: it has ended, or lives elsewhere."""
    if known is None or path is None or known.state in (PolicyState.LOADING, PolicyState.RETIRING):
        return False
    return not (known.state is PolicyState.LIVE and known.path == path)


def live_missing(policies: Iterable[Policy], held: Mapping[str, str]) -> list[Policy]:
    """Return the live policies that a replica which holds `held` lacks, oldest first."""
    return [policy for policy in policies if policy.state is PolicyState.LIVE and held.get(policy.name) != policy.path]
