"""The routing rules: filter, score, pick. The filter is the fleet's (`Fleet.candidates`); this scores and picks.

The default goes by cost, in tokens of delay summed over rollouts. Two things cost:
1. Computing a prompt again holds up everybody on that replica: the tokens that it has not seen, times the rollouts
   there. Those of the emptiest one count for all, so that a longer match is never dearer.
2. Joining a fuller replica slows the rollout itself down, by as much as that replica has more to do than the emptiest.
   Not for ever: the next groups go to the emptiest one and make the difference good, the smaller it is the sooner. So
   the wait grows with the square of the difference, in parts of what the whole fleet has to do; but not while the
   next group does not come, because this one is larger than groups are. And not at all while the batch is small, since
   decoding is bound by memory then.
Affinity thus yields exactly when the prompt that it saves is worth less than the wait.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum

import msgspec

from proxy.fleet.pool import Candidate
from proxy.routing.load import FREE_BATCH
from proxy.routing.prefix_index import Match


class Route(StrEnum):
    """Why a rollout went where it went; the value of the X-Proxy-Route header."""

    AFFINITY = "affinity"
    """To a replica that has seen most of its prompt."""
    SPILLED = "spilled"
    """Elsewhere, since the wait there would have cost more than the prompt."""
    UNMATCHED = "unmatched"
    """No replica has seen its prompt, so to the one with the least to do."""
    RETRIED = "retried"
    """To another replica, after one had failed it."""


class Choice(msgspec.Struct, frozen=True):
    """A replica and the reason."""

    replica: int
    route: Route
    load: int = 0
    """What the rollout costs there, for its lease."""
    prefill: int = 0
    """Tokens of its prompt that the replica is expected to compute."""


class Demand(msgspec.Struct, frozen=True):
    """What a rollout asks for. `match` knows every candidate."""

    prompt_tokens: int
    piece_tokens: float
    answer_load: int
    """Load of one answer, as expected."""
    answers: int
    match: Match
    outgrown: bool = False
    """Whether its group has more rollouts than load was kept free for."""
    session: int = 0
    """Bit mask of the replicas that have served its session."""

    def prefill(self, replica: int) -> int:
        """Return the prompt tokens that a replica would have to compute."""
        return max(self.prompt_tokens - int(self.match.seen.get(replica, 0) * self.piece_tokens), 0)


Rule = Callable[[Sequence[Candidate], Demand, int], Candidate]
"""Picks one of at least one candidates. The last argument is a growing number: equal ones take turns by it."""


def choose(rule: Rule, candidates: Sequence[Candidate], demand: Demand, *, turn: int) -> Choice:
    """Pick one of `candidates` (at least one) by `rule`, and say why it was that one."""
    picked = rule(candidates, demand, turn).index
    seen = demand.match.seen
    if not (demand.match.attracts and (most := max(seen.values()))):
        route = Route.UNMATCHED
    else:
        route = Route.AFFINITY if seen[picked] == most else Route.SPILLED
    prefill = demand.prefill(picked)
    return Choice(picked, route, prefill + demand.answer_load * demand.answers, prefill)


def by_cost(candidates: Sequence[Candidate], demand: Demand, turn: int) -> Candidate:
    """Pick the cheapest: see above."""
    loads = [candidate.load for candidate in candidates]
    least = min(loads)
    if not (demand.match.attracts and any(demand.match.seen.values())):
        return _least_to_do(candidates, demand, turn, least)
    free = max(least, FREE_BATCH * demand.answer_load)
    total = sum(loads)
    held_up = 1 + min([candidate.inflight for candidate in candidates])
    costs = []
    for candidate in candidates:
        load = candidate.load
        delay: float = demand.prefill(candidate.index) * held_up
        if load > free:
            delay += load - free if demand.outgrown else (load - free) ** 2 / (2 * total)
        costs.append((delay, not demand.session >> candidate.index & 1, load))
    return candidates[costs.index(min(costs))]


def _least_to_do(candidates: Sequence[Candidate], demand: Demand, turn: int, least: int) -> Candidate:
    if demand.session:
        near = least + demand.answer_load
        served = [c for c in candidates if demand.session >> c.index & 1 and c.load <= near]
        if served:
            return min(served, key=lambda candidate: candidate.load)
    idle = [candidate for candidate in candidates if candidate.load == least]
    return idle[turn % len(idle)]


def round_robin(candidates: Sequence[Candidate], demand: Demand, turn: int) -> Candidate:
    """Pick the next one."""
    return candidates[turn % len(candidates)]


def least_loaded(candidates: Sequence[Candidate], demand: Demand, turn: int) -> Candidate:
    """Pick the one with the fewest rollouts."""
    least = min(candidate.inflight for candidate in candidates)
    idle = [candidate for candidate in candidates if candidate.inflight == least]
    return idle[turn % len(idle)]


RULES: Mapping[str, Rule] = {"cost": by_cost, "round_robin": round_robin, "least_loaded": least_loaded}
"""By the value of PROXY_ROUTING."""
