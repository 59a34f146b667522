"""What a rollout will cost: how long answers of its policy are, and how many siblings of its group are still to come.

Load is counted in tokens of prompt to compute; a generated token weighs as much as several of them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgspec

DECODE_WEIGHT = 4
"""Prompt tokens computed in the time of one generated token in a full batch. Rough: only the balance hangs on it."""

FREE_BATCH = 32
"""Rollouts that a replica decodes together about as fast as one."""

_FIRST_GUESS = 512
"""Tokens of an answer, before any has been seen."""

_GUESS_WORTH = 32
"""Answers that a guess weighs as much as. Short answers come first, so that the first few mislead."""

_REMEMBERED = 512
"""Answers that the mean of a policy goes back to."""

_GROUP_GUESS = 8
"""Rollouts of one prompt, before any group has been seen: TRL's default."""

_GAP_GUESS = 64
"""Other rollouts that come between two of one group, before any have been seen: much, as groups may come mixed."""

_GAPS_REMEMBERED = 64
"""Gaps that their mean goes back to."""

_PATIENCE = 8
"""Mean gaps without a rollout after which a group counts as complete."""

_MOST_OPEN = 4096
"""Rollouts after which it does in any case, so that memory stays bounded whatever comes."""

_TAIL_BYTES = 4096
"""How much of an answer's end is searched for its usage."""

_TOKENS = re.compile(rb'"(prompt_tokens|completion_tokens|output_tokens|cached_tokens)"\s*:\s*(\d{1,15})\b')
"""More digits are no count of tokens, and no float either."""


class Usage(msgspec.Struct, frozen=True):
    """The tokens that an answer tells of; None where it does not. vLLM tells the cached ones if it is started so."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    """Those of the prompt that were in the prefix cache."""


def usage_of(answer: bytes) -> Usage:
    """Read the usage at the end of an answer, or in the last events of a stream."""
    start = answer.rfind(b'"usage"', max(len(answer) - _TAIL_BYTES, 0))
    if start < 0:
        return _UNTOLD
    found = {name: int(digits) for name, digits in _TOKENS.findall(answer, start)}
    generated = found.get(b"completion_tokens", found.get(b"output_tokens"))
    return Usage(found.get(b"prompt_tokens"), generated, found.get(b"cached_tokens"))


_UNTOLD = Usage()


class AnswerLengths:
    """The mean length of answers, by policy; a new policy starts with the mean of all."""

    def __init__(self) -> None:
        self._all = _Mean(_FIRST_GUESS)
        self._by_policy: dict[str, _Mean] = {}

    def expected(self, policy: str, max_tokens: int | None) -> float:
        """Return the tokens that one answer will have."""
        mean = self._by_policy.get(policy, self._all).value
        return mean if max_tokens is None else min(mean, max_tokens)

    def learn(self, policy: str, tokens: float) -> None:
        """Take in the length of one answer."""
        if policy not in self._by_policy:
            self._by_policy[policy] = _Mean(self._all.value)
        self._by_policy[policy].add(tokens)
        self._all.add(tokens)

    def keep_policies(self, names: set[str]) -> None:
        """Forget every policy that is not among `names`."""
        self._by_policy = {name: mean for name, mean in self._by_policy.items() if name in names}


class _Mean:
    def __init__(self, guess: float) -> None:
        self.value = guess
        self._weight = _GUESS_WORTH

    def add(self, value: float) -> None:
        self._weight = min(self._weight + 1, _REMEMBERED)
        self.value += (value - self.value) / self._weight


@dataclass(slots=True)
class Group:
    """A group of which more rollouts may come."""

    replica: int
    """Where the first one went."""
    share: int
    """Load kept free for each rollout that is still to come."""
    kept: int
    """Load kept free there for all of them."""
    seen: int = 0
    last_seen: int = 0

    @property
    def is_outgrown(self) -> bool:
        """Whether more rollouts have come than load was kept free for."""
        return not self.kept


class Groups:
    """Groups of which not all rollouts have come. Their replicas keep load free for the rest: a group weighs whole
    from its first rollout on, so that the next groups go elsewhere in whatever order rollouts arrive.
    """

    def __init__(self) -> None:
        self._open: dict[tuple[str, int], Group] = {}
        self._kept: dict[int, int] = {}
        self._size = float(_GROUP_GUESS)
        self._gap = float(_GAP_GUESS)
        self._now = 0

    def __repr__(self) -> str:
        return f"<Groups open={len(self._open)} size={self._size:.1f} kept={self._kept}>"

    def open(self, group: tuple[str, int]) -> Group | None:
        """Return `group` if it is open."""
        return self._open.get(group)

    def kept(self, replica: int) -> int:
        """Return the load that a replica keeps free for rollouts to come."""
        return self._kept.get(replica, 0)

    def saw(self, group: tuple[str, int], replica: int, *, share: int) -> None:
        """Note that one more rollout of `group` has come, which went to `replica`."""
        self._now += 1
        known = self._open.pop(group, None)
        if known is None:
            kept = int(share * (self._size - 1))
            known = Group(replica, share, kept)
            self._kept[replica] = self._kept.get(replica, 0) + kept
        else:
            self._give_back(known, min(known.share, known.kept))
            self._gap += (self._now - known.last_seen - self._gap) / _GAPS_REMEMBERED
        known.seen += 1
        known.last_seen = self._now
        self._open[group] = known  # at the end: the order is that of the last rollouts
        self._close_complete_ones()

    def _give_back(self, group: Group, load: int) -> None:
        group.kept -= load
        self._kept[group.replica] -= load

    def _close_complete_ones(self) -> None:
        while self._open:
            oldest = next(iter(self._open))
            group = self._open[oldest]
            if self._now - group.last_seen <= min(_PATIENCE * self._gap, _MOST_OPEN):
                return
            del self._open[oldest]
            self._give_back(group, group.kept)
            self._size += (group.seen - self._size) / _GROUP_GUESS
