"""Which fleets this machine has started and has not seen ended: kept on disk, so that a crash of `up` is not forgotten.

A convenience: `down` needs only a name, since the Jobs' labels say everything. No secret is ever in here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Record:
    """A fleet that was started here."""

    fleet: str
    namespace: str
    run: str
    config: str
    """Path of its config file."""
    pid: int
    """The `up` that started it."""

    @property
    def watched(self) -> bool:
        """Whether that `up` is still there."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True


def folder() -> Path:
    """Return where records are kept: below XDG_STATE_HOME, else in ~/.local/state."""
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home) / "lora-sync" / "jobs"


def remember(record: Record) -> None:
    """Write a record. Call it before the first Job is started."""
    path = _path(record.fleet, record.namespace)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(asdict(record)) + "\n")
    draft.replace(path)


def forget(fleet: str, namespace: str) -> None:
    """Remove a record: everything has ended. Nothing happens if there is none."""
    _path(fleet, namespace).unlink(missing_ok=True)


def records() -> Iterator[Record]:
    """Yield every record; what cannot be read is left out."""
    for path in sorted(folder().glob("*.json")):
        try:
            yield Record(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            continue


def _path(fleet: str, namespace: str) -> Path:
    return folder() / f"{namespace}--{fleet}.json"
