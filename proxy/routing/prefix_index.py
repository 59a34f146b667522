"""Which replica has seen which prefix: one table per policy, so that a retired policy is forgotten whole.

A replica is a bit in a mask. Hashes are chained, so who holds a piece holds all pieces before it, and the longest match
is found by binary search. One more bit says that a prompt has ended at a piece or before it. It tells two ways of
leaving a known chain apart: a prompt that branches off where none had ended shares only a template with what was there,
and a template attracts nobody; one that branches off behind such an end is a later turn of what was there.

Pieces live in two generations. New and used ones are in the young one; when that is full, or a replica's KV cache has
been filled half over, it becomes the old one and the former old one is dropped. So a piece is remembered for one to two
halves after its last use, and a chain that is already young costs nothing to record again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

_ENDED = 1
"""A prompt ended here or before. The bits of replicas are above it."""

_ANY = -1


@dataclass
class _Table:
    young: dict[int, int] = field(default_factory=dict)
    """Piece -> its bits. All pieces of a chain before a young one are young."""
    old: dict[int, int] = field(default_factory=dict)

    def bits(self, piece: int) -> int:
        return self.young.get(piece, 0) | self.old.get(piece, 0)

    def longest(self, pieces: Sequence[int], bits: int, *, upto: int) -> int:
        """Return how many of the first `upto` pieces have any of `bits`."""
        young, old = self.young.get, self.old.get
        if not upto or not (young(pieces[0], 0) | old(pieces[0], 0)) & bits:
            return 0  # most replicas, of most prompts without a common template
        low = 1
        while low < upto:
            middle = (low + upto + 1) >> 1
            piece = pieces[middle - 1]
            if (young(piece, 0) | old(piece, 0)) & bits:
                low = middle
            else:
                upto = middle - 1
        return low


class Match(msgspec.Struct, frozen=True):
    """What is known of a prompt."""

    seen: Mapping[int, int]
    """Replica -> how many leading pieces it has seen."""
    attracts: bool
    """Whether this is a known prompt or a later turn of one, and not just its template."""


class PrefixIndex:
    """Remembers at most `limit` pieces over all policies, the most recently used ones."""

    def __init__(self, limit: int) -> None:
        self._half = max(limit // 2, 1)
        self._tables: dict[str, _Table] = {}
        self._young = 0
        self._old = 0

    def __len__(self) -> int:
        return self._young + self._old

    def __repr__(self) -> str:
        return f"<PrefixIndex policies={len(self._tables)} young={self._young} old={self._old}>"

    def match(self, policy: str, pieces: Sequence[int], replicas: Iterable[int]) -> Match:
        """Find out how much of a prompt each of `replicas` has seen."""
        found = dict.fromkeys(replicas, 0)
        table = self._tables.get(policy)
        if table is None or not pieces:
            return Match(found, False)
        whole = len(pieces)
        upto = whole if table.bits(pieces[-1]) else table.longest(pieces, _ANY, upto=whole - 1)
        attracts = upto == whole or bool(upto and table.bits(pieces[upto - 1]) & _ENDED)
        wanted = 0
        for replica in found:
            wanted |= 2 << replica
        while upto:
            owners = table.bits(pieces[upto - 1]) & wanted
            for replica in found:
                if owners & (2 << replica):
                    found[replica] = upto
            wanted ^= owners
            upto = table.longest(pieces, wanted, upto=upto - 1) if wanted else 0
        return Match(found, attracts)

    def owners(self, policy: str, piece: int) -> int:
        """Return the bit mask of the replicas that have seen one piece."""
        table = self._tables.get(policy)
        return table.bits(piece) >> 1 if table else 0

    def record(self, policy: str, pieces: Sequence[int], replica: int) -> None:
        """Note that `replica` is about to see `pieces`."""
        bit = 2 << replica
        table = self._tables.get(policy)
        if not pieces or (table and table.young.get(pieces[-1], 0) & bit):
            return
        pieces = pieces[: self._half]
        if self._young + len(pieces) > self._half:
            self.age()
        table = self._tables.setdefault(policy, _Table())
        before = len(table.young)
        _insert(table, pieces, bit)
        self._young += len(table.young) - before

    def age(self) -> None:
        """Forget what has not been used since the last call but one."""
        for name, table in list(self._tables.items()):
            table.young, table.old = {}, table.young
            if not table.old:
                del self._tables[name]
        self._young, self._old = 0, self._young

    def keep_policies(self, names: set[str]) -> None:
        """Forget every policy that is not among `names`."""
        for name in [name for name in self._tables if name not in names]:
            del self._tables[name]
        self._count()

    def forget_replica(self, replica: int) -> None:
        """Forget all that `replica` has seen: it restarted, or its cache was emptied."""
        kept = ~(2 << replica)
        for table in self._tables.values():
            table.young = {piece: left for piece, bits in table.young.items() if (left := bits & kept) > _ENDED}
            table.old = {piece: left for piece, bits in table.old.items() if (left := bits & kept) > _ENDED}
        self._count()

    def _count(self) -> None:
        self._young = sum(len(table.young) for table in self._tables.values())
        self._old = sum(len(table.old) for table in self._tables.values())


def _insert(table: _Table, pieces: Sequence[int], bit: int) -> None:
    """Make `pieces` young, with `bit`. Three kinds, in this order along the chain: young ones, old ones, new ones."""
    young, old = table.young, table.old
    count = len(pieces)
    place = 0
    ended = 0
    while place < count and (bits := young.get(pieces[place], 0)):
        young[pieces[place]] = bits | bit
        ended = bits & _ENDED
        place += 1
    # The bits of other replicas stay behind: that this one used a piece says nothing about them.
    while place < count and (bits := old.get(pieces[place], 0)):
        ended = bits & _ENDED
        young[pieces[place]] = bit | ended
        place += 1
    young.update(dict.fromkeys(pieces[place:], bit | ended))
    for piece in pieces[-2:]:  # the last but one is the last that a later turn can share
        young[piece] |= _ENDED
