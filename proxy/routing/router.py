"""Puts the pieces together: the prefix index, the rule, and the counts of where rollouts went."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from proxy.fleet.pool import Candidate, Fleet
from proxy.routing.choose import Choice, Route, choose
from proxy.routing.prefix_index import PrefixIndex
from proxy.routing.request_key import RequestKey


class Router:
    """Chooses a replica for each rollout and remembers the choice at once, so that a burst stays together."""

    def __init__(self, *, max_tracked_blocks: int) -> None:
        self.index = PrefixIndex(max_tracked_blocks)
        self.counts: Counter[Route] = Counter()
        self._turn = 0
        self._incarnations: dict[int, int] = {}

    def choose(self, key: RequestKey, candidates: Sequence[Candidate], *, retried: bool = False) -> Choice:
        """Pick one of `candidates` (at least one). `retried` marks a rollout that another replica has failed."""
        matched = self.index.matched(key.model, key.pieces, [candidate.index for candidate in candidates])
        choice = choose(candidates, matched, turn=self._turn)
        if choice.route is not Route.AFFINITY:
            self._turn += 1  # not at every rollout: groups of eight would then find two idle replicas in the same order
        if retried:
            choice = Choice(choice.replica, Route.RETRIED)
        if key.pieces:
            self.counts[choice.route] += 1
            self.index.record(key.model, key.pieces, choice.replica)
        return choice

    def follow(self, fleet: Fleet) -> None:
        """Forget what the fleet no longer has: ended policies, and what a replica had seen before it joined again."""
        self.index.keep_policies({policy.name for policy in fleet.occupying()} | set(fleet.base_models))
        for replica in fleet.replicas:
            if self._incarnations.setdefault(replica.index, replica.incarnation) != replica.incarnation:
                self._incarnations[replica.index] = replica.incarnation
                self.index.forget_replica(replica.index)
