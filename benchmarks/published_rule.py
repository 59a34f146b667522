"""The routing rule of the published setup, for comparison only.

A piece is common when every replica has served it or two different pieces have followed it, and common leading pieces
do not count. The replica with the most matched pieces gets the rollout unless it is more than 8 rollouts ahead of the
least loaded one. Here on pieces of text, as ours, and without forgetting.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from proxy.fleet.pool import Candidate
from proxy.routing.choose import Choice, Route
from proxy.routing.request_key import RequestKey

SPILL_AHEAD = 8


class PublishedRule:
    """Has the slice of the router's interface that a replay needs."""

    def __init__(self) -> None:
        self._servers: defaultdict[tuple[str, int], set[int]] = defaultdict(set)
        self._followers: defaultdict[tuple[str, int], set[int]] = defaultdict(set)
        self._turn = 0

    def choose(self, key: RequestKey, candidates: Sequence[Candidate]) -> Choice:
        """Pick a replica and remember it."""
        matched = self._matched(key, candidates)
        least = min(candidate.inflight for candidate in candidates)
        best = max(candidates, key=lambda candidate: (matched[candidate.index], -candidate.inflight))
        if matched[best.index] and best.inflight - least <= SPILL_AHEAD:
            choice = Choice(best.index, Route.AFFINITY)
        else:
            idle = [candidate for candidate in candidates if candidate.inflight == least]
            self._turn += 1
            route = Route.SPILLED if matched[best.index] else Route.UNMATCHED
            choice = Choice(idle[self._turn % len(idle)].index, route)
        for piece, following in zip(key.pieces, (*key.pieces[1:], None), strict=True):
            self._servers[key.model, piece].add(choice.replica)
            if following is not None:
                self._followers[key.model, piece].add(following)
        return choice

    def took(self, choice: Choice, tokens: float, seconds: float, *, beside: int) -> None:
        """Learn nothing: it does not look at times."""

    def finished(self, key: RequestKey, answer: bytes) -> None:
        """Learn nothing."""

    def _matched(self, key: RequestKey, candidates: Sequence[Candidate]) -> dict[int, int]:
        servers = [self._servers.get((key.model, piece), set()) for piece in key.pieces]
        common = 0
        for place, piece in enumerate(key.pieces):
            if not servers[place]:
                break
            if len(servers[place]) == len(candidates) or len(self._followers.get((key.model, piece), ())) > 1:
                common = place + 1
        matched = {}
        for candidate in candidates:
            seen = [candidate.index in each for each in servers[common:]]
            matched[candidate.index] = [*seen, False].index(False)
        return matched
