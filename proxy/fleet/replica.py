"""One vLLM server as the proxy knows it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any

from proxy.fleet.policies import Policy


class ReplicaState(StrEnum):
    """Where a replica stands. There is no edge from down to ready: a replica that comes back joins first (P3)."""

    JOINING = "joining"
    """Answers, but has not been confirmed to hold every live policy. Gets no rollouts."""
    READY = "ready"
    """Holds every live policy. Gets rollouts."""
    DOWN = "down"
    """Does not answer, or has not been asked yet. Gets no rollouts and no loads."""
    DRAINING = "draining"
    """Is being removed: gets no new rollouts, keeps those it has until they end."""
    QUARANTINED = "quarantined"
    """A pause got no answer, so nobody knows how it stands; or its base weights are not the fleet's. Gets nothing until
    it has said how it stands, or has the weights."""


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
    dtype: str | None = None
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
    model: str | None = None
    """The base model: a directory, as the server sees it, or a repository of the Hub."""
    lacks: tuple[Lack, ...] = ()

    @cached_property
    def model_names(self) -> tuple[str, ...]:
        """The names under which it serves the base model."""
        return tuple(str(entry["id"]) for entry in self.models)


@dataclass
class Trial:
    """How far one policy has come on one replica since the proxy first asked for it there."""

    started_at: float
    """Seconds on the fleet's clock."""
    tries: int = 0
    """Load calls sent. More than one means that the files were late there, or an answer was lost."""
    retry_at: float = 0.0
    """Not to be asked again before."""
    pause_s: float = 0.0
    """The pause before the next try."""
    outcome: str = ""
    """The last answer, one of `controlplane.replica_api.LoadOutcome`; empty before the first."""
    message: str = ""
    """The replica's own words."""
    final: bool = False
    """It will never take the policy."""
    proven: bool = False
    """It lists the policy with the right path and has answered the probe, as far as that was asked of it."""
    load_s: float = 0.0
    """Seconds from the first load call to the last answer."""
    verify_s: float = 0.0
    proven_at: float = 0.0
    """When it was proven, on the fleet's clock."""
    logprobs: tuple[float, ...] = ()
    """What the probe told of the fixed prompt, to compare replicas by."""


@dataclass(eq=False)
class Replica:
    """The mutable record of one replica. Only `Fleet` and the plane that owns a field write to it."""

    index: int
    url: str
    serial: int = 0
    """Tells apart replicas that had the same index one after the other."""
    state: ReplicaState = ReplicaState.DOWN
    reason: str = "not asked yet"
    """Why it is in this state, in words."""
    since: float = 0.0
    """When it came into this state, seconds since 1970."""
    about: str = ""
    """What the place tells of it where it was found: its Job and how that stands."""
    facts: Facts | None = None
    held: dict[str, str] = field(default_factory=dict)
    """The adapters that it is known to list: upstream name -> path."""
    held_since: dict[str, float] = field(default_factory=dict)
    """When each of these was first seen there, seconds since 1970."""
    unsure: set[str] = field(default_factory=set)
    """Upstream names of which a load or unload got no answer: it may hold them or not."""
    trials: dict[str, Trial] = field(default_factory=dict)
    """Upstream name -> how far that policy has come here."""
    unload_at: dict[str, float] = field(default_factory=dict)
    """Upstream names whose unload has failed: not to be tried again before, on the fleet's clock."""
    life: int = 0
    """Counts how often it went down: what was asked in an earlier life says nothing about this one."""
    joins: int = 0
    """Counts how often it became ready."""
    surveyed: bool = False
    """What it listed when it was first looked at is known to the fleet."""
    paused_since: float | None = None
    """Since when its engine is paused, as far as the proxy has seen, on the fleet's clock; None: it runs."""
    paused_s: float = 0.0
    """Seconds for which it was, before this."""
    weights: str | None = None
    """The label of its base weights, as it was last read or set; None: it does not say (see `fleet.weights`)."""
    found_paused: bool = False
    """It was paused by nobody that the proxy knows of: it gets no rollouts until it is resumed."""
    inflight: int = 0
    load: int = 0
    """What its rollouts in flight cost, in tokens as `routing` counts them."""
    cache_resets: int = 0
    """Counts how often its prefix cache was emptied."""
    routed: int = 0
    silent: bool = False
    """It went down without a word, as one that hangs or whose network is cut: nothing there has died."""
    heard_at: float = -math.inf
    """When its engine last gave a rollout something, on the fleet's clock."""

    @property
    def is_ready(self) -> bool:
        """Whether it holds all that the fleet serves."""
        return self.state is ReplicaState.READY

    @property
    def is_up(self) -> bool:
        """Whether it answers."""
        return self.state is not ReplicaState.DOWN

    @property
    def paused(self) -> bool:
        """Whether its engine is paused, as far as the proxy has seen."""
        return self.paused_since is not None

    def holds(self, policy: Policy) -> bool:
        """Whether it lists the policy from its own path, as far as is known. What it serves of it is right, then."""
        return self.held.get(policy.upstream) == policy.path

    def may_hold(self, upstream: str) -> bool:
        """Whether it lists this name, or got a call about it that it did not answer."""
        return upstream in self.held or upstream in self.unsure

    def has_proven(self, policy: Policy) -> bool:
        """Whether it holds the policy and nothing about it is left to be checked here."""
        trial = self.trials.get(policy.upstream)
        return self.holds(policy) and policy.upstream not in self.unsure and (trial is None or trial.proven)

    def saw(self, held: dict[str, str], now: float) -> bool:
        """Note what it lists, `now` in seconds since 1970. Return whether that is news."""
        news = held != self.held
        self.held = held
        self.held_since = {name: self.held_since.get(name, now) for name in held}
        return news

    def __repr__(self) -> str:
        return f"<Replica {self.index} {self.url} {self.state} inflight={self.inflight} held={sorted(self.held)}>"
