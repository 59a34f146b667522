"""What a published policy is to its trainer, and the rules for numbering and retiring policies. No I/O."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from proxy.contract import LoadReport, PolicyStatus
from proxy.errors import SettingsError

_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True)
class Timings:
    """Seconds that each phase of one publication took."""

    stage: float
    """Writing the files (`save_pretrained` included), flushing them to the disk, renaming, and the manifest."""
    check: float
    """Looking for reasons why vLLM could not serve it."""
    announce: float
    """From the announcement until every replica serves it."""
    retire: float
    """Unloading what fell out of the window and deleting its files."""

    @property
    def total(self) -> float:
        """All phases together."""
        return self.stage + self.check + self.announce + self.retire


@dataclass(frozen=True)
class Policy:
    """One set of LoRA weights that every replica serves."""

    name: str
    """`RUN-vVERSION-DIGEST8`, which never repeats with other weights."""
    version: int
    """Its number within the run, from 1."""
    step: int
    """The optimizer step it came from."""
    digest: str
    """sha256 (hex) over config and weights."""
    path: Path
    """Its directory in the store, absolute."""
    timings: Timings
    report: LoadReport
    """How its load went on each replica."""

    @property
    def model(self) -> str:
        """What a rollout puts into `model`."""
        return self.name


def check_run(run: str) -> str:
    """Return `run` if it can be part of a directory's and a policy's name, else raise SettingsError."""
    if not _RUN.fullmatch(run):
        raise SettingsError(
            f"run {run!r} cannot be used in names; take up to 100 letters, digits, '.', '_' and '-', "
            "and begin with a letter or digit."
        )
    return run


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


def may_delete(status: PolicyStatus | None, *, unloaded: bool) -> bool:
    """Decide whether a retired policy's files may be removed: vLLM's engine dies when it misses files that it needs.

    `status` is what the proxy says, None if it does not know the policy. That alone proves nothing (it may be new, or
    another one), so that it counts only when the unload was acknowledged before: `unloaded`.
    """
    return unloaded if status is None else status.files_deletable
