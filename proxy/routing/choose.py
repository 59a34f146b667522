"""The routing rule: filter, score, pick. The filter is the fleet's (`Fleet.candidates`); this scores and picks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from proxy.fleet.pool import Candidate

SPILL_AHEAD = 8
"""Rollouts by which the replica with the prefix may be ahead of the least loaded one, as in the published setup."""


class Route(StrEnum):
    """Why a rollout went where it went; the value of the X-Proxy-Route header."""

    AFFINITY = "affinity"
    """To the replica that has seen most of its prompt."""
    SPILLED = "spilled"
    """That replica was too far ahead, so to the least loaded one."""
    UNMATCHED = "unmatched"
    """No replica has seen its prompt, so to the least loaded one."""
    RETRIED = "retried"
    """To another replica, after one had failed it."""


@dataclass(frozen=True)
class Choice:
    """A replica and the reason."""

    replica: int
    route: Route


def choose(candidates: Sequence[Candidate], matched: Mapping[int, int], *, turn: int) -> Choice:
    """Pick one of `candidates` (at least one) for a prompt of which each has seen `matched` pieces.

    `turn` is a growing number: replicas that are equally loaded take turns by it.
    """
    least = min(candidate.inflight for candidate in candidates)
    idle = [candidate for candidate in candidates if candidate.inflight == least]
    resting = idle[turn % len(idle)]
    best = max(candidates, key=lambda c: (matched.get(c.index, 0), -c.inflight))
    if not matched.get(best.index):
        return Choice(resting.index, Route.UNMATCHED)
    if best.inflight - least > SPILL_AHEAD:
        return Choice(resting.index, Route.SPILLED)
    return Choice(best.index, Route.AFFINITY)
