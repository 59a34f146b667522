"""What a replica sees of the publisher's files: all of them, or an old or a torn view, as a bucket's mount may show.

A policy's path leads through the working directory of whoever opens it (`tests.support.mounts`), so that every replica
can be shown something else without the right to mount anything.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

from tests.support.adapters import BROKEN

TORN = ("no_weights", "truncated", "empty_weights", "bad_config", "empty_config")
"""What can be missing of a directory that is half there."""

_LOOK_EVERY_S = 0.01
_UNFINISHED = ".tmp"
"""A directory of this name is still being written, by TRL; TrainerClient begins such names with a dot."""


class View:
    """One view of the directory `published`, for a process whose working directory is `cwd`.

    New policies are those that come after the view has become old or torn.
    """

    def __init__(self, cwd: Path, published: Path) -> None:
        self.cwd = cwd
        self.withheld = 0
        """New policies that were not shown, or torn."""
        self.has_withheld = False
        """Whether there was one since the view has become old or torn."""
        self._published = published
        self._shown = published
        self._turn = threading.Lock()
        cwd.mkdir(parents=True)
        self._show(published)

    def grow_old(self) -> None:
        """Show no new policy."""
        self._withhold(torn=False)

    def tear(self) -> None:
        """Show new policies, each with a part of it missing."""
        self._withhold(torn=True)

    def renew(self) -> None:
        """Show everything as it is."""
        self._show(self._published)

    def _withhold(self, *, torn: bool) -> None:
        old = Path(tempfile.mkdtemp(dir=self.cwd))
        known = self._policies()
        for name in known:
            (old / name).symlink_to(self._published / name)
        self.has_withheld = False
        self._show(old)
        threading.Thread(target=self._follow, args=(old, known, torn), daemon=True).start()

    def _policies(self) -> dict[str, int]:
        """Return the serial number of every policy's directory: another policy of the same name has another one."""
        with os.scandir(self._published) as entries:
            return {
                entry.name: entry.inode()
                for entry in entries
                if not entry.name.startswith(".") and not entry.name.endswith(_UNFINISHED)
            }

    def _show(self, directory: Path) -> None:
        """Let the path lead there from now on; it leads somewhere at every moment."""
        beside = self.cwd / ".next"
        with self._turn:
            beside.symlink_to(directory)
            beside.replace(self.cwd / self._published.name)
            self._shown = directory

    def _follow(self, old: Path, known: dict[str, int], torn: bool) -> None:
        """Look for new policies as long as `old` is shown."""
        while self._shown is old:
            time.sleep(_LOOK_EVERY_S)
            for name, serial in self._policies().items():
                if known.get(name) == serial:
                    continue
                known[name] = serial
                (old / name).unlink(missing_ok=True)
                if torn:
                    self._copy_torn(name, old)
                self.withheld += 1
                self.has_withheld = True

    def _copy_torn(self, name: str, old: Path) -> None:
        copy = Path(tempfile.mkdtemp(dir=self.cwd)) / name  # elsewhere, so that it is never whole where it is seen
        with suppress(OSError):  # its publisher may be taking it away again
            shutil.copytree(self._published / name, copy)
            BROKEN[random.choice(TORN)](copy)
            (old / f".{name}").symlink_to(copy)
            (old / f".{name}").replace(old / name)
