"""Which replica has seen which prefix: one table per policy, so that a retired policy is forgotten whole.

A replica is a bit in a mask. Each piece also remembers what followed it, since a piece that two different pieces have
followed belongs to a template that all prompts share, and such a piece attracts nobody.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

_MANY = -1
_NONE = 0


@dataclass
class _Table:
    masks: dict[int, int] = field(default_factory=dict)
    """Piece -> bit mask of the replicas that have seen it. Old pieces come first."""
    successors: dict[int, int] = field(default_factory=dict)
    """Piece -> the piece that followed it, _NONE so far, or _MANY."""

    def common_pieces(self, pieces: Sequence[int], everyone: int) -> int:
        """Return how many leading pieces are common. A chain is shared whole, so all before a common piece are."""
        common = 0
        for position, piece in enumerate(pieces):
            mask = self.masks.get(piece)
            if mask is None:
                break
            if mask & everyone == everyone or self.successors.get(piece) == _MANY:
                common = position + 1
        return common


class PrefixIndex:
    """Remembers at most `limit` pieces over all policies and forgets the oldest of the largest table beyond it."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._tables: dict[str, _Table] = {}
        self._tracked = 0

    def __len__(self) -> int:
        return self._tracked

    def matched(self, policy: str, pieces: Sequence[int], replicas: Iterable[int]) -> dict[int, int]:
        """Return for each of `replicas` how many leading pieces it has seen beyond the common ones.

        A piece is common when every one of `replicas` has seen it, or two different pieces have followed it.
        """
        found = dict.fromkeys(replicas, 0)
        table = self._tables.get(policy)
        if table is None or not found:
            return found
        everyone = sum(1 << replica for replica in found)
        chasing = everyone
        for piece in pieces[table.common_pieces(pieces, everyone) :]:
            chasing &= table.masks.get(piece, 0)
            if not chasing:
                break
            for replica in found:
                found[replica] += chasing >> replica & 1
        return found

    def record(self, policy: str, pieces: Sequence[int], replica: int) -> None:
        """Note that `replica` is about to see `pieces`."""
        table = self._tables.setdefault(policy, _Table())
        before = len(table.masks)
        bit = 1 << replica
        for piece, following in zip(pieces, [*pieces[1:], _NONE], strict=True):
            table.masks[piece] = table.masks.get(piece, 0) | bit
            known = table.successors.get(piece, _NONE)
            if following not in (_NONE, known):
                table.successors[piece] = following if known == _NONE else _MANY
        self._tracked += len(table.masks) - before
        while self._tracked > self._limit:
            self._shrink()

    def keep_policies(self, names: set[str]) -> None:
        """Forget every policy that is not among `names`."""
        for name in [name for name in self._tables if name not in names]:
            self._tracked -= len(self._tables.pop(name).masks)

    def forget_replica(self, replica: int) -> None:
        """Forget all that `replica` has seen: it restarted."""
        for table in self._tables.values():
            before = len(table.masks)
            kept = {piece: mask & ~(1 << replica) for piece, mask in table.masks.items()}
            table.masks = {piece: mask for piece, mask in kept.items() if mask}
            table.successors = {p: after for p, after in table.successors.items() if p in table.masks}
            self._tracked -= before - len(table.masks)

    def _shrink(self) -> None:
        """Forget the older half of the largest table."""
        table = max(self._tables.values(), key=lambda table: len(table.masks))
        for piece in list(table.masks)[: len(table.masks) // 2 + 1]:
            del table.masks[piece]
            table.successors.pop(piece, None)
            self._tracked -= 1
