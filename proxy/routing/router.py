"""Puts the pieces together: the prefix index, what rollouts cost, the rule, and the counts of where they went."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from msgspec import structs

from proxy.fleet.pool import Candidate, Fleet
from proxy.routing.choose import RULES, Choice, Demand, Route, choose
from proxy.routing.load import DECODE_WEIGHT, FREE_BATCH, AnswerLengths, Group, Groups, Usage, usage_of
from proxy.routing.pace import KNOWN_AFTER, Paces
from proxy.routing.prefix_index import Match, PrefixIndex
from proxy.routing.request_key import RequestKey

_NOTHING = Demand(0, 0.0, 0, 1, Match({}, attracts=False))
"""What a request without a prompt asks for."""


class Router:
    """Chooses a replica for each rollout and remembers the choice at once, so that a burst stays together.

    `routing` is one of the names in RULES.
    """

    def __init__(self, *, max_tracked_blocks: int, routing: str = "cost") -> None:
        self.index = PrefixIndex(max_tracked_blocks)
        self.counts: Counter[Route] = Counter()
        self.generated_tokens = 0
        """Of the answers that told how many they have."""
        self.prompt_tokens: Counter[int] = Counter()
        """Sent to each replica since its cache was empty; as all tokens here, counted from the length of the text."""
        self.cached_tokens: Counter[int] = Counter()
        """How many of these it is expected to have found in its cache."""
        self._rule = RULES[routing]
        self._rotates_always = routing == "round_robin"
        self.paces = Paces()
        self._lengths = AnswerLengths()
        self._groups = Groups()
        self._turn = 0
        self._lives: dict[int, object] = {}
        self._kv_tokens: dict[int, int] = {}
        self._written: dict[int, float] = {}
        """Tokens of KV that each replica has been given since the index last aged."""

    def __repr__(self) -> str:
        return f"<Router {dict(self.counts)} {self.index} {self._groups}>"

    def choose(self, key: RequestKey, candidates: Sequence[Candidate], *, retried: bool = False) -> Choice:
        """Pick one of `candidates` (at least one). `retried` marks a rollout that another replica has failed.

        The lease on it should hold the `load` of the choice.
        """
        if not key.pieces:
            self._turn += 1
            return choose(self._rule, candidates, _NOTHING, turn=self._turn)
        answer_tokens = self._lengths.expected(key.model, key.max_tokens)
        group = (key.model, key.pieces[-1])
        known = self._groups.open(group)
        demand = Demand(
            key.prompt_tokens,
            key.piece_tokens,
            int(answer_tokens * DECODE_WEIGHT),
            key.answers,
            self.index.match(key.model, key.pieces, [candidate.index for candidate in candidates]),
            known is not None and known.is_outgrown,
            self.index.owners(key.model, key.session) if key.session else 0,
        )
        expected = self._slow_ones_fuller(self._with_what_is_to_come(candidates, known), demand.answer_load)
        expected = self._unknown_ones_full(expected)
        choice = choose(self._rule, expected, demand, turn=self._turn)
        if self._rotates_always or choice.route is not Route.AFFINITY:
            self._turn += 1  # not at every rollout: groups of eight would then find two idle replicas in the same order
        if choice.route is Route.UNMATCHED or known is not None:
            self._groups.saw(group, choice.replica, share=demand.answer_load * demand.answers)
        self._remember(key, choice, demand, answer_tokens * key.answers)
        if retried:
            choice = structs.replace(choice, route=Route.RETRIED)
        self.counts[choice.route] += 1
        return choice

    def finished(self, key: RequestKey, answer: bytes) -> Usage:
        """Learn from an answer that has ended well, and return the tokens that it tells of.

        `answer` is its body, or the last events of a stream.
        """
        usage = usage_of(answer)
        if usage.completion_tokens is not None:
            self.generated_tokens += usage.completion_tokens
            self._lengths.learn(key.model, usage.completion_tokens / key.answers)
        return usage

    def took(self, choice: Choice, tokens: float, seconds: float, *, beside: int) -> None:
        """Learn how long an answer of so many tokens took, with so many rollouts in flight there at its end."""
        self.paces.learn(choice.replica, prefill=choice.prefill, tokens=tokens, seconds=seconds, beside=beside)

    def follow(self, fleet: Fleet) -> None:
        """Forget what the fleet no longer has: ended policies, and what was in a cache that has been emptied."""
        names = {policy.upstream for policy in fleet.occupying()} | set(fleet.base_models)
        self.index.keep_policies(names)
        self._lengths.keep_policies(names)
        for replica in fleet.replicas:
            facts = replica.facts
            if facts and facts.kv_cache_tokens:
                self._kv_tokens[replica.index] = facts.kv_cache_tokens
            # A replica that only had to join again still has its cache; one that does not say so may have restarted.
            life = (replica.serial, (facts and facts.instance_id) or replica.life, replica.cache_resets)
            if self._lives.setdefault(replica.index, life) != life:
                self._lives[replica.index] = life
                self.index.forget_replica(replica.index)
                self.paces.forget(replica.index)
                self.prompt_tokens[replica.index] = self.cached_tokens[replica.index] = 0

    def _with_what_is_to_come(self, candidates: Sequence[Candidate], group: Group | None) -> list[Candidate]:
        """Add to each load what a replica keeps free for others than `group`: what it keeps for that makes nobody wait.

        Of an idle fleet nothing counts, so that it takes turns: what was kept free for groups that ended early is void.
        """
        kept, fuller, is_idle = self._groups.kept, [], True
        for candidate in candidates:
            index, inflight = candidate.index, candidate.inflight
            is_idle = is_idle and not inflight
            load = candidate.load + kept(index)
            if group is not None and group.replica == index:
                load -= group.kept
            fuller.append(Candidate(index, inflight, load))
        return list(candidates) if is_idle else fuller

    def _slow_ones_fuller(self, candidates: list[Candidate], answer_load: int) -> list[Candidate]:
        """Count the load of slow replicas as what the fastest would have for as long; idle ones are slow as well.

        What others keep free makes nobody wait, so that it makes none of them fuller than a slow one.
        """
        if not self.paces.slow:
            return candidates
        kept = max(self._groups.kept(c.index) for c in candidates)
        return [
            c
            if (slowness := self.paces.slowness(c.index, inflight=c.inflight)) == 1
            else Candidate(c.index, c.inflight, int(max(c.load, FREE_BATCH * answer_load) * slowness) + kept)
            for c in candidates
        ]

    def _unknown_ones_full(self, candidates: list[Candidate]) -> list[Candidate]:
        """Let a replica have no more rollouts than the others while only their pace is known: it may be slow."""
        known = self.paces.known
        if not known or len(known) >= len(candidates):
            return candidates
        most = max((c.inflight for c in candidates if c.index in known), default=0)
        full = max(c.load for c in candidates) + 1
        return [
            c if c.index in known or c.inflight < max(KNOWN_AFTER, most) else Candidate(c.index, c.inflight, full)
            for c in candidates
        ]

    def _remember(self, key: RequestKey, choice: Choice, demand: Demand, answer_tokens: float) -> None:
        replica, prefill = choice.replica, choice.prefill
        self.index.record(key.model, key.pieces, replica)
        if key.session:
            self.index.record(key.model, (key.session,), replica)
        self.prompt_tokens[replica] += demand.prompt_tokens
        self.cached_tokens[replica] += demand.prompt_tokens - prefill
        written = self._written.get(replica, 0.0) + prefill + answer_tokens
        self._written[replica] = written
        if written > self._kv_tokens.get(replica, math.inf) / 2:
            self._written.clear()
            self.index.age()
