"""Which adapters a replica has: those registered by name (the API server's list) and those in memory (the worker's).

The two are not the same, and that is where a real replica surprises: an unload only forgets the name, and a registered
adapter that was dropped from memory is read from its directory again by the next request.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass

from proxy.simulator.lora_directory import AdapterFiles, read_adapter, resolve


@dataclass(frozen=True)
class LoraRequest:
    """One loading of one adapter. The id changes with every load of a name that was not registered before."""

    id: int
    name: str
    path: str
    inplace: bool
    """Loaded with load_inplace: the worker reads the directory anew whenever the adapter is used."""


class AdapterMemory:
    """The worker's adapters, least recently used first, at most `capacity`."""

    def __init__(self, *, capacity: int, max_rank: int) -> None:
        self._capacity = capacity
        self._max_rank = max_rank
        self._held: OrderedDict[int, AdapterFiles] = OrderedDict()

    def __repr__(self) -> str:
        return f"AdapterMemory({len(self._held)}/{self._capacity})"

    def get(self, lora: LoraRequest) -> AdapterFiles | None:
        """Return what memory holds of the adapter, without counting it as used."""
        return self._held.get(lora.id)

    def use(self, lora: LoraRequest, *, in_use: Collection[int] = ()) -> AdapterFiles:
        """Return the adapter, read from its directory when memory does not hold it.

        Raises what `read_adapter` raises; the adapters with ids `in_use` are never dropped to make room.
        """
        if lora.id in self._held and not lora.inplace:
            self._held.move_to_end(lora.id)
            return self._held[lora.id]
        files = read_adapter(resolve(lora.path), max_rank=self._max_rank)
        self._held[lora.id] = files
        self._held.move_to_end(lora.id)
        self._drop_oldest({*in_use, lora.id})
        return files

    def _drop_oldest(self, keep: Collection[int]) -> None:
        for id in [id for id in self._held if id not in keep]:
            if len(self._held) <= self._capacity:
                return
            del self._held[id]


class Registry:
    """The names that requests may use, in the order of loading."""

    def __init__(self) -> None:
        self._by_name: dict[str, LoraRequest] = {}
        self._ids = itertools.count(1)

    def __repr__(self) -> str:
        return f"Registry({', '.join(self._by_name)})"

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def get(self, name: str) -> LoraRequest | None:
        """Return the adapter registered under the name."""
        return self._by_name.get(name)

    def all(self) -> list[LoraRequest]:
        """Return every registered adapter, oldest first."""
        return list(self._by_name.values())

    def request(self, *, name: str, path: str, inplace: bool) -> LoraRequest:
        """Return the request that a load of this name makes; a registered name keeps its id."""
        known = self._by_name.get(name)
        return LoraRequest(id=known.id if known else next(self._ids), name=name, path=path, inplace=inplace)

    def register(self, lora: LoraRequest) -> None:
        """Make the name usable."""
        self._by_name[lora.name] = lora

    def forget(self, name: str) -> None:
        """Make the name unknown. Memory keeps the weights, and sequences that run keep using them."""
        del self._by_name[name]
