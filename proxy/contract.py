"""What the trainer and the proxy say to each other: paths, names and JSON bodies. Both sides import this and only this.

The load request is vLLM's, plus `policy`; the rest of vLLM's dialect lives in `controlplane.replica_api`.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

LOAD_PATH = "/v1/load_lora_adapter"
UNLOAD_PATH = "/v1/unload_lora_adapter"
POLICIES_PATH = "/proxy/policies"
REPLICAS_PATH = "/proxy/replicas"
EVENTS_PATH = "/proxy/events"
STATS_PATH = "/proxy/stats"
RELOAD_PATH = "/proxy/weights/reload"

API_KEY = "PROXY_API_KEY"
API_KEY_FILE = "PROXY_API_KEY_FILE"
ADMIN_KEY = "PROXY_ADMIN_KEY"
"""Environment variables of the keys: the proxy asks for what they hold, its clients send it."""

DIGEST_IN_NAME = 8
"""Hex digits of the digest that a managed name carries: 32 bits tell apart the few versions of one run."""

_VERSION = re.compile(r"-v(\d{1,18})(?:-[0-9a-f]{8})?$")
"""More digits are no version: Python refuses to read a number of 4,300."""


def managed_name(run: str, version: int, digest: str) -> str:
    """Return the name of a policy that can never repeat with other weights: `RUN-vVERSION-DIGEST8`."""
    return f"{run}-v{version}-{digest[:DIGEST_IN_NAME]}"


def version_of(name: str) -> int | None:
    """Read the version out of a policy's name (`trl-policy-v7` -> 7), or return None if it carries none."""
    found = _VERSION.search(name)
    return int(found[1]) if found else None


def split_keys(text: str) -> tuple[str, ...]:
    """Return the keys in `text`, which commas or white space separate.

    Raises ValueError, without repeating it, for a text without a key or with one that no header can carry.
    """
    keys = tuple(text.replace(",", " ").split())
    if not keys:
        raise ValueError("holds no key; unset it, or set it to one")
    if not all(key.isascii() and key.isprintable() for key in keys):
        raise ValueError("holds characters that no key may have; use letters, digits and ASCII signs")
    return keys


class _Wire(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class PolicyFile(_Wire):
    """One file of a published policy."""

    path: str
    """Relative to the policy's directory, with forward slashes."""
    size: int = Field(ge=0)
    """Bytes."""
    sha256: str
    """Hex digest of the content."""
    xet_hash: str | None = None
    """The Hub's name for the same content, None where the store is not the Hub."""

    @field_validator("path")
    @classmethod
    def _inside(cls, path: str) -> str:
        if "\\" in path or "\0" in path or any(part in ("", ".", "..") for part in path.split("/")):
            raise ValueError("must name a file inside the policy's directory, as name or folder/name")
        return path


class Announcement(_Wire):
    """The `policy` field of a load request: makes the path managed, so that the proxy holds it to its manifest."""

    run: str = Field(min_length=1)
    version: int = Field(ge=1)
    step: int = Field(ge=0)
    digest: str = Field(pattern=r"^[0-9a-f]{64}$")
    files: tuple[PolicyFile, ...] = ()
    alias: str | None = None
    """A name of the client's own, such as TRL's `trl-policy-v7`, that means this policy once it is live, until it is
    announced or unloaded again."""

    @property
    def from_hub(self) -> bool:
        """Whether the Hub's names for all its files are told: then nobody needs to look at the files to know them."""
        return bool(self.files) and all(file.xet_hash for file in self.files)


class LoadRequest(_Wire):
    """Body of POST /v1/load_lora_adapter."""

    lora_name: str = Field(min_length=1)
    lora_path: str = Field(min_length=1)
    load_inplace: bool = False
    policy: Announcement | None = None


class UnloadRequest(_Wire):
    """Body of POST /v1/unload_lora_adapter."""

    lora_name: str = Field(min_length=1)


LoadStatus = Literal["loaded", "failed", "rolled_back", "unknown"]
"""How a load ended on one replica. `unknown`: it left the fleet meanwhile, or did not answer the rollback."""


class ReplicaLoad(_Wire):
    """How the load of one policy went on one replica."""

    replica: str
    """The replica's URL."""
    status: LoadStatus
    attempts: int
    """Load calls sent. More than one means that the files were late there."""
    seconds: float
    """From the first call to the last answer."""
    message: str = ""
    """The replica's own words when it failed, empty otherwise."""
    phases: dict[str, float] = {}
    """Seconds by phase: `load` (all tries), `verify`."""


class LoadReport(_Wire):
    """Answer to an announcement that carried `policy`, and the `details` of a failed one."""

    policy: str
    """The name that rollouts put into `model`."""
    version: int | None = None
    status: Literal["live", "failed"]
    seconds: float
    phases: dict[str, float] = {}
    """Seconds by phase, one after the other: `check` of the files, `name` (until it was free), `gate`, `slot`, `load`
    (until all replicas had it), `verify` (until all had proven it), `commit`; of a failed one `load` and `rollback`."""
    replicas: tuple[ReplicaLoad, ...] = ()
    warnings: tuple[str, ...] = ()
    """What the replicas lack for the rest of their work, each with the flag to add."""


class ReloadRequest(_Wire):
    """Body of POST /proxy/weights/reload: a checkpoint that every replica is to serve in place of its base weights."""

    name: str = Field(min_length=1, pattern=r"^[\x21-\x7d]+$")
    """Of the policy that it is, such as `math-r1-v40-9f86d081`. It comes back in labels and, as its version, in the
    header X-Policy-Version."""
    path: str = Field(min_length=1)
    """Its directory, as replicas see it."""
    policy: Announcement | None = None
    """Makes the path managed, as in a load request."""


class ReplicaReload(_Wire):
    """How the reload went on one replica."""

    replica: str
    """The replica's URL."""
    status: Literal["reloaded", "failed", "left"]
    """`failed`: it serves nothing until it has been reloaded. `left`: it went down, and is reloaded when it is back."""
    seconds: float
    message: str = ""
    """The replica's own words when it failed, empty otherwise."""


class ReloadReport(_Wire):
    """Answer to a reload, and the `details` of a failed one."""

    name: str
    version: str
    """The label that the replicas carry now."""
    status: Literal["live", "failed"]
    seconds: float
    phases: dict[str, float] = {}
    """Seconds by phase: `gate`, `check` of the files, `reload`."""
    replicas: tuple[ReplicaReload, ...] = ()
    warnings: tuple[str, ...] = ()
    model: str = ""
    """The name under which replicas serve it, which is the base model's: what rollouts put into `model`."""


class PolicyStatus(_Wire):
    """One policy in GET /proxy/policies/{name}."""

    name: str
    upstream: str = ""
    """What the replicas call it."""
    path: str
    state: str
    """One of `fleet.policies.PolicyState`."""
    reason: str = ""
    """Why it is in this state, where the state alone does not say; while it loads, what replicas have said of it."""
    since: float = 0.0
    """When it came into this state, seconds since 1970."""
    run: str | None = None
    alias: str | None = None
    digest: str | None = None
    adopted: bool = False
    """Found on a replica rather than announced to this proxy."""
    blocked: str = ""
    """Why it takes no new rollouts although it is live; empty if it does."""
    version: int | None
    step: int | None = None
    leases: int
    """Rollouts in flight that named it."""
    in_flight: dict[str, int] = {}
    """The same by the URL of their replica; those that have some."""
    held_by: tuple[str, ...]
    """URLs of the replicas that are known to hold it."""
    phases: dict[str, float] = {}
    """Seconds that the phases of its load took (see LoadReport)."""
    files_deletable: bool
    """True once no replica holds it and no rollout uses it: only then may its directory be removed."""


class PolicyList(_Wire):
    """Answer to GET /proxy/policies."""

    policies: tuple[PolicyStatus, ...]
    slots: int | None = None
    """Smallest max_loras of the replicas, None if none tells."""


class CacheHits(_Wire):
    """Prompt tokens, and those of them that were in a prefix cache."""

    prompt_tokens: int = 0
    cached_tokens: int = 0


class PrefixCache(_Wire):
    """What is known of a replica's prefix cache."""

    predicted: CacheHits = CacheHits()
    """As routing expects, since the cache was last empty."""
    reported: CacheHits = CacheHits()
    """As its answers tell, if it is started so that they do."""


class ReplicaStatus(_Wire):
    """One replica in GET /proxy/replicas."""

    index: int
    url: str
    state: str
    """One of `fleet.replica.ReplicaState`."""
    reason: str = ""
    since: float = 0.0
    """When it came into this state, seconds since 1970."""
    paused: bool = False
    weights: str | None = None
    """The label of its base weights (see `fleet.weights`); None: it tells none."""
    policies: dict[str, dict[str, Any]] = {}
    """What it holds, by what it calls it: `path`, `since`."""
    inflight: int = 0
    load: int = 0
    """What its rollouts in flight cost, in tokens as routing counts them."""
    routed: int = 0
    joins: int = 0
    prefix_cache: PrefixCache = PrefixCache()
    kv_cache_tokens: int | None = None
    max_loras: int | None = None
    max_lora_rank: int | None = None
    dtype: str | None = None
    """Of its weights, such as `torch.bfloat16`. None: it does not tell how it is started."""
    model: str | None = None
    """The base model that it was started with: a directory, as it sees it, or a repository of the Hub."""


class ErrorDetail(_Wire):
    """What went wrong, in vLLM's words."""

    message: str
    type: str
    param: str | None
    code: int
    """The HTTP status again."""


class ErrorAnswer(_Wire):
    """Every error of the proxy's own, as vLLM has them."""

    error: ErrorDetail


class ReplicaList(_Wire):
    """Answer to GET /proxy/replicas."""

    replicas: tuple[ReplicaStatus, ...]
    checkpoints: tuple[str, ...] | None = None
    """Policies with merged weights that replicas have, or may be told to read again: their files must stay. None: the
    proxy does not tell."""


class Router(_Wire):
    """Where rollouts went since the proxy's start."""

    routed: int
    affinity: int
    spilled: int
    unmatched: int
    retried: int = 0
    tracked_blocks: int = 0


class Stats(_Wire):
    """Answer to GET /proxy/stats."""

    router: Router
    generated_tokens: int = 0
