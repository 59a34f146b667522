"""What follows from a listing. Pure.

A replica that appears joins, and one that vanishes drains if it was discovery that added it. What people have done over
HTTP meanwhile stays: one that they removed is not added again while it is listed, one that they added is not removed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Set
from typing import NamedTuple


class Moves(NamedTuple):
    """What to do with the fleet, by URL."""

    add: tuple[str, ...]
    remove: tuple[str, ...]


def plan(listed: Collection[str], *, before: Set[str], present: Set[str], ours: Iterable[str]) -> Moves:
    """Compare a listing with the one before.

    `present`: the members of the fleet that are not leaving it. `ours`: those of them that discovery has added.
    """
    return Moves(
        add=tuple(url for url in listed if url not in before and url not in present),
        remove=tuple(url for url in ours if url not in listed),
    )
