"""The KV cache as far as it shows: which whole blocks of a prompt need no computing, least recently used out first.

A block's key chains over the blocks before it and starts from (adapter name, adapter path, cache_salt), as in vLLM: the
weights are NOT part of it. Who puts other weights under the same name and path therefore hits stale blocks; each block
remembers the weights that computed it, so that the answer can show it.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash


@dataclass(frozen=True)
class Hit:
    """What a lookup found."""

    tokens: int
    """Leading tokens of the prompt that need no computing."""
    weights: str | None
    """The weights that computed them, or None if there are none."""


class PrefixCache:
    """A bounded set of block keys."""

    def __init__(self, *, blocks: int, block_size: int) -> None:
        self.blocks = blocks
        self.block_size = block_size
        self._cached: OrderedDict[int, str] = OrderedDict()

    def __repr__(self) -> str:
        return f"PrefixCache({len(self._cached)}/{self.blocks} blocks of {self.block_size})"

    def __len__(self) -> int:
        return len(self._cached)

    def lookup(self, keys: Sequence[int], *, prompt_tokens: int) -> Hit:
        """Return the longest cached run from the start, never the whole prompt: its last token is always computed."""
        usable = (prompt_tokens - 1) // self.block_size
        found = 0
        while found < min(usable, len(keys)) and keys[found] in self._cached:
            found += 1
        self._touch(keys[:found])
        return Hit(tokens=found * self.block_size, weights=self._cached[keys[0]] if found else None)

    def store(self, keys: Sequence[int], *, weights: str) -> None:
        """Remember blocks that `weights` have computed; blocks that are there already keep their older weights."""
        for key in keys:
            self._cached.setdefault(key, weights)
        self._touch(keys)
        while len(self._cached) > self.blocks:
            self._cached.popitem(last=False)

    def _touch(self, keys: Sequence[int]) -> None:
        # The tail goes first, because a chain without its head is of no use to anyone.
        for key in reversed(keys):
            self._cached.move_to_end(key)

    def clear(self) -> None:
        """Forget every block."""
        self._cached.clear()


def block_keys(tokens: Sequence[int], *, block_size: int, scope: str) -> list[int]:
    """Return the chained key of every whole block of `tokens`. `scope` is all else that the cache is keyed by."""
    parent = xxhash.xxh3_64_intdigest(scope.encode())
    whole = len(tokens) // block_size * block_size
    packed = array("q", tokens[:whole]).tobytes()
    stride = 8 * block_size
    keys = []
    for start in range(0, len(packed), stride):
        parent = xxhash.xxh3_64_intdigest(packed[start : start + stride], seed=parent)
        keys.append(parent)
    return keys
