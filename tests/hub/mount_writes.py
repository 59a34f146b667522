"""What was written into a mounted bucket: kept on local disk, and sent up after `debounce_s` without a further close.

A file that could not be sent is not tried again; the next close of it gets EIO, once. So neither close nor fsync nor a
rename says anything about the Hub. Source: hf-mount 0.9.2, `src/virtual_fs/flush.rs` (advanced writes).
"""

from __future__ import annotations

import errno
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hf_xet
from huggingface_hub.errors import BucketBatchError, HfHubHTTPError

from tests.hub.mount_remote import KNOWN_S, Remote, RemoteFile, failing_as_eio

_LONGEST_WAIT_S = 30.0
"""Dirty files go up after this long even if others keep being closed."""
_ALL = ""
"""Stands for every path of a batch that failed as a whole."""


@dataclass
class Written:
    """A file that was written here."""

    local: Path
    dirty: bool = True
    """Whether the Hub does not have it as it is now."""
    on_hub: bool = False
    """Whether the Hub has some version of it under its path."""
    generation: int = 0
    writers: int = 0
    """Handles that can write to it; only after the last of them does it go up."""
    changed: bool = False
    """Whether one of them did."""
    error: str | None = None
    until: float = 0.0
    """When clean: how long this copy stands in for the Hub's."""


class Writes:
    """The written files of one mount. Start with `start`; `close` sends up what is left."""

    def __init__(self, remote: Remote, *, debounce_s: float) -> None:
        self._remote = remote
        self._debounce_s = debounce_s
        self._files: dict[str, Written] = {}
        self._waiting: list[Written] = []
        self._deleted: list[str] = []
        self._changed_at: float | None = None
        self._closing = False
        self._condition = threading.Condition()
        self._thread = threading.Thread(target=self._run)

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    def close(self) -> None:
        """Send what is waiting, and end."""
        with self._condition:
            self._closing = True
            self._condition.notify()
        self._thread.join()

    def find(self, path: str) -> Written | None:
        """Return the file at a path that is still kept here."""
        with self._condition:
            self._drop_expired()
            return self._files.get(path)

    def below(self, path: str) -> dict[str, Written]:
        """Return the files below a directory."""
        prefix = f"{path}/" if path else ""
        with self._condition:
            self._drop_expired()
            return {name: file for name, file in self._files.items() if name.startswith(prefix)}

    def add(self, path: str, file: Written) -> None:
        """Keep a file at a path, in place of what was there."""
        with self._condition:
            self._files[path] = file
            self._deleted = [deleted for deleted in self._deleted if deleted != path]
        self._remote.forget(path)

    def closed(self, path: str) -> None:
        """Let a file that was changed wait for its turn."""
        with self._condition:
            file = self._files[path]
            file.dirty = True
            file.generation += 1
            self._waiting.append(file)
            self._wake()

    def raise_error(self, path: str) -> None:
        """Raise EIO if this file could not be sent, the first time that this is asked."""
        with self._condition:
            file = self._files.get(path)
            if file is not None and file.error is not None:
                error, file.error = file.error, None
                raise OSError(errno.EIO, error)

    def move(self, old: str, new: str) -> None:
        """Rename a file that is kept here: on the Hub at once if it is there, else when its turn comes."""
        with self._condition:
            file = self._files.pop(old)
            self._files[new] = file
            if file.dirty and file.on_hub:
                self._deleted.append(old)
        self._remote.forget(old)
        self._remote.forget(new)
        if not file.dirty:
            with failing_as_eio():
                [hashed] = hf_xet.hash_files([str(file.local)])
            self._remote.move([(old, new, RemoteFile(file.local.stat().st_size, hashed.hash))])

    def delete(self, path: str) -> None:
        """Remove a file here now, and on the Hub with the next batch."""
        with self._condition:
            self._files.pop(path, None)
            self._deleted.append(path)
            self._wake()
        self._remote.forget(path)

    def is_deleted(self, path: str) -> bool:
        """Tell whether the Hub has not been told yet that this path is gone."""
        with self._condition:
            return path in self._deleted

    def _drop_expired(self) -> None:
        now = time.monotonic()
        self._files = {
            path: file for path, file in self._files.items() if file.dirty or file.writers or now <= file.until
        }

    def _wake(self) -> None:
        self._changed_at = time.monotonic()
        self._condition.notify()

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._closing or self._changed_at is not None)
                self._wait_for_quiet()
                self._changed_at = None
                deleted = self._deleted.copy()
                waiting, self._waiting = self._waiting, []
                batch = [
                    (path, file, file.generation)
                    for path, file in self._files.items()
                    if any(file is waits for waits in waiting)
                ]
                ending = self._closing
            self._send(batch, deleted)
            if ending:
                return

    def _wait_for_quiet(self) -> None:
        last = time.monotonic() + _LONGEST_WAIT_S
        while not self._closing and self._changed_at is not None:
            left = min(self._changed_at + self._debounce_s, last) - time.monotonic()
            if left <= 0:
                return
            self._condition.wait(left)

    def _send(self, batch: list[tuple[str, Written, int]], deleted: list[str]) -> None:
        if deleted and not self._failures(delete=deleted):
            with self._condition:
                self._deleted = [path for path in self._deleted if path not in deleted]
        if not batch:
            return
        failures = self._failures(add=[(str(file.local), path) for path, file, _ in batch])
        with self._condition:
            for path, file, generation in batch:
                file.error = failures.get(path) or failures.get(_ALL)
                if file.error is None and file.generation == generation and not file.changed:
                    self._sent(path, file)

    def _failures(self, **operations: Any) -> dict[str, str]:
        try:
            self._remote.api.batch_bucket_files(self._remote.bucket, **operations)
        except BucketBatchError as error:
            return {failure["path"]: failure["error"] for failure in error.failures}
        except (HfHubHTTPError, OSError, RuntimeError) as error:
            return {_ALL: str(error)}
        return {}

    def _sent(self, path: str, file: Written) -> None:
        if self._files.get(path) is not file:  # renamed, removed or replaced while it was on its way
            if path not in self._files:
                self._deleted.append(path)
            self._waiting.append(file)
            self._wake()
            return
        file.dirty, file.on_hub = False, True
        file.until = time.monotonic() + KNOWN_S
