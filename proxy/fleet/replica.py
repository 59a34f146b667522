"""One vLLM server as the proxy knows it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any


class ReplicaState(StrEnum):
    """Where a replica stands. There is no edge from down to ready: a replica that comes back joins first (P3)."""

    JOINING = "joining"
    """Answers, but has not been confirmed to hold every live policy. Gets no rollouts."""
    READY = "ready"
    """Holds every live policy. Gets rollouts."""
    DOWN = "down"
    """Does not answer, or has not been asked yet. Gets no rollouts and no loads."""


@dataclass(frozen=True)
class Lack:
    """Something that keeps a replica from its work here."""

    message: str
    """What is missing and the flag to add."""
    blocks_loads: bool
    """Whether adapters cannot be loaded because of it."""


@dataclass(frozen=True)
class Facts:
    """What a replica says of itself in /v1/models and /server_info. None means that it did not say."""

    models: tuple[dict[str, Any], ...]
    """The entries of the base model in its /v1/models, one for each served name."""
    max_model_len: int | None = None
    """Tokens."""
    max_loras: int | None = None
    """Adapters that can take part in one batch."""
    max_cpu_loras: int | None = None
    max_lora_rank: int | None = None
    kv_cache_tokens: int | None = None
    """Size of its KV cache."""
    data_parallel_size: int | None = None
    world_size: int = 1
    """Workers, for weight transfer."""
    instance_id: str | None = None
    """Changes when the server restarts."""
    lacks: tuple[Lack, ...] = ()

    @cached_property
    def model_names(self) -> tuple[str, ...]:
        """The names under which it serves the base model."""
        return tuple(str(entry["id"]) for entry in self.models)


@dataclass
class Replica:
    """The mutable record of one replica. Only `Fleet` and the plane that owns a field write to it."""

    index: int
    url: str
    state: ReplicaState = ReplicaState.DOWN
    reason: str = "not asked yet"
    """Why it is in this state, in words."""
    facts: Facts | None = None
    held: dict[str, str] = field(default_factory=dict)
    """The adapters that it was last seen to list: name -> path."""
    incarnation: int = 0
    """Counts its joins, so that what was known of an earlier life can be told apart."""
    inflight: int = 0
    load: int = 0
    """What its rollouts in flight cost, in tokens as `routing` counts them."""
    cache_resets: int = 0
    """Counts how often its prefix cache was emptied."""
    routed: int = 0

    @property
    def is_ready(self) -> bool:
        """Whether rollouts may go to it."""
        return self.state is ReplicaState.READY

    def __repr__(self) -> str:
        return f"<Replica {self.index} {self.url} {self.state} inflight={self.inflight} held={sorted(self.held)}>"
