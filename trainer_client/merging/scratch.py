"""A folder on this machine where a checkpoint is until the store has it, and which its process takes along.

A process that is killed leaves its folder behind, with a whole model in it; the next one that merges below the same
directory removes it. Whoever is alive has a lock on its own (flock, which the kernel ends with the process), so that
several may merge there at the same time. Where a file system has no locks, nothing is removed.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
import weakref
from pathlib import Path

_NEW = "lora-sync-new-"
"""How folders begin that may not be locked yet: they are empty, and nobody touches them."""

_PREFIX = "lora-sync-merging-"

log = logging.getLogger(__name__)


class Scratch:
    """A new folder below `directory` (None: the system's for temporary files). Raises OSError.

    It is removed by `discard`, which may be called again, or with this object, or at the end of the process.
    """

    def __init__(self, directory: str | Path | None = None) -> None:
        below = Path(directory or tempfile.gettempdir())
        _sweep(below)
        new = Path(tempfile.mkdtemp(prefix=_NEW, dir=below))
        lock = _locked(new)  # before it gets the name by which others look for what is left
        self.path = new.rename(below / new.name.replace(_NEW, _PREFIX))
        self.discard = weakref.finalize(self, _remove, self.path, lock)

    def __repr__(self) -> str:
        return f"<Scratch {self.path}>"


def _sweep(below: Path) -> None:
    for folder in below.glob(f"{_PREFIX}*"):
        if (lock := _locked(folder)) is not None:
            _remove(folder, lock)
            log.info("removed %s, left by a merge that was killed", folder)


def _locked(folder: Path) -> int | None:
    """Return a descriptor that has the lock on a folder until it is closed; None if it cannot be had."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _remove(folder: Path, lock: int | None) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if lock is not None:
        os.close(lock)
