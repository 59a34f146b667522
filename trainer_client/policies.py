"""What a published policy is to its trainer, and the rules for numbering and retiring policies. No I/O."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from proxy.contract import DIGEST_IN_NAME, LoadReport, PolicyStatus, ReloadReport, managed_name, version_of
from proxy.errors import SettingsError

_LOADED = frozenset({"loading", "live"})
"""The states of `PolicyStatus` in which nobody has asked for the unload."""

_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True)
class Timings:
    """Seconds that each phase of one publication took."""

    gather: float
    """Copying the weights, and merging them where need be: the only phase in which the training has to stand still."""
    check: float
    """Looking for reasons why vLLM could not serve it, and hashing."""
    store: float
    """Writing the files and the manifest, so that everyone sees them."""
    announce: float
    """From the announcement until every replica serves it."""
    retire: float
    """Unloading what fell out of the window and deleting its files."""

    @property
    def total(self) -> float:
        """All phases together."""
        return self.gather + self.check + self.store + self.announce + self.retire


@dataclass(frozen=True)
class Policy:
    """One set of weights that every replica serves: an adapter, or one that is merged into the base model."""

    name: str
    """`RUN-vVERSION-DIGEST8`, which never repeats with other weights."""
    version: int
    """Its number within the run, from 1."""
    step: int
    """The optimizer step it came from."""
    digest: str
    """sha256 (hex) over config and weights."""
    path: Path
    """Its directory as replicas see it, absolute."""
    timings: Timings
    report: LoadReport | ReloadReport
    """How its load, or reload, went on each replica."""
    alias: str | None = None
    """The caller's own name for it."""
    served_as: str | None = None
    """The base model's name, under which replicas serve merged weights; None for an adapter."""

    @property
    def model(self) -> str:
        """What a rollout puts into `model`."""
        return self.served_as or self.name


def check_run(run: str) -> str:
    """Return `run` if it can be part of a directory's and a policy's name, else raise SettingsError."""
    if not _RUN.fullmatch(run):
        raise SettingsError(
            f"run {run!r} cannot be used in names; take up to 100 letters, digits, '.', '_' and '-', "
            "and begin with a letter or digit."
        )
    return run


def version_in(run: str, folder: str) -> int | None:
    """Return the version of a policy of `run` from its folder's name, or None if the folder is no policy of it."""
    version, digest = version_of(folder), folder[-DIGEST_IN_NAME:]
    return version if version and folder == managed_name(run, version, digest) else None


def next_version(taken: Iterable[int]) -> int:
    """Return the version after the highest one taken, 1 for a new run. Gaps are never filled."""
    return max(taken, default=0) + 1


def fallen_out(versions: Iterable[int], *, max_staleness: int) -> list[int]:
    """Return the versions that no rollout may use any more, oldest first.

    A rollout may lag `max_staleness` versions behind the newest, so those and the newest stay. The rule is TRL's
    `AsyncGRPOTrainer`'s.
    """
    known = sorted(set(versions))
    return [version for version in known if version <= known[-1] - max_staleness - 1]


class Fate(StrEnum):
    """What happens to a policy that fell out of the window."""

    UNLOAD = "unload"
    """The proxy is asked to unload it."""
    WAIT = "wait"
    """Rollouts or replicas still need it."""
    DELETE = "delete"
    """Nobody needs it: its files go."""
    KEEP = "keep"
    """Unloaded, and a checkpoint: its files stay for ever."""


def fate(status: PolicyStatus | None, *, unloaded: bool, checkpoint: bool) -> Fate:
    """Decide on a policy that fell out of the window. vLLM's engine dies when it misses files that it needs.

    `status` is what the proxy says, None if it does not know the policy. That alone proves nothing (it may be new, or
    another one), so that it counts only when an unload was acknowledged before: `unloaded`.
    """
    if status is None and not unloaded:
        return Fate.UNLOAD
    if status is not None and status.state in _LOADED:
        return Fate.UNLOAD
    if checkpoint:
        return Fate.KEEP
    return Fate.DELETE if status is None or status.files_deletable else Fate.WAIT


def is_checkpoint(version: int, *, keep_every: int | None) -> bool:
    """Tell whether a policy's files are kept for ever: every `keep_every`-th version's are, none without it."""
    return keep_every is not None and version % keep_every == 0
