"""The process behind a mounted bucket: FUSE's calls, answered from what the Hub shows and what was written here.

It runs apart from the tests: a page fault of a mapped file cannot be served by the process that waits for it.
usage: python -m tests.hub.mount_process BUCKET MOUNTPOINT --help
"""

from __future__ import annotations

import argparse
import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mfusepy
from huggingface_hub import HfApi

from tests.hub.mount_remote import Directory, Remote, RemoteFile
from tests.hub.mount_writes import Writes, Written
from tests.hub.parent import end_with_parent

_BLOCK = 4096
_PLENTY = 1 << 30
"""Blocks; a bucket is never full."""


class Mount:
    """The calls of one mount, named as FUSE names them. A file handle is a descriptor of the local copy."""

    use_ns = True

    def __init__(self, remote: Remote, writes: Writes, staging: Path) -> None:
        self._remote = remote
        self._writes = writes
        self._staging = staging
        self._directories: set[str] = set()
        """Made here; the Hub knows a directory only by its files."""
        self._writing: dict[int, Written] = {}
        """Handles that can write."""

    def init(self, path: str) -> None:
        """Begin."""
        self._writes.start()

    def destroy(self, path: str) -> None:
        """Send what is left, and end."""
        self._writes.close()

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        """Return size and kind."""
        found = self._find(path[1:])
        if isinstance(found, Directory):
            return {"st_mode": stat.S_IFDIR | 0o755, "st_nlink": 2}
        size = found.local.stat().st_size if isinstance(found, Written) else found.size
        return {"st_mode": stat.S_IFREG | 0o644, "st_nlink": 1, "st_size": size}

    def readdir(self, path: str, fh: int) -> Iterator[str]:
        """Yield the names in a directory."""
        yield from (".", "..", *self._children(path[1:]))

    def open(self, path: str, flags: int) -> int:
        """Open the local copy, made first if need be."""
        name = path[1:]
        self._writes.raise_error(name)
        found = self._find(name)
        assert not isinstance(found, Directory)  # the kernel opens those with opendir
        if not flags & (os.O_WRONLY | os.O_RDWR):
            local = found.local if isinstance(found, Written) else self._remote.content(found, name)
            return os.open(local, os.O_RDONLY)
        if isinstance(found, RemoteFile):
            content = None if flags & os.O_TRUNC else self._remote.content(found, name)
            found = self._new(name, content)
            found.on_hub = True
        fh = self._open_for_writing(found)
        if flags & os.O_TRUNC:
            self.truncate(path, 0, fh)
        return fh

    def create(self, path: str, mode: int) -> int:
        """Make a file, which goes up when it has been closed."""
        fh = self._open_for_writing(self._new(path[1:], None))
        self._change(fh)
        return fh

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        """Read."""
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        """Write into the local copy."""
        self._change(fh)
        return os.pwrite(fh, data, offset)

    def truncate(self, path: str, length: int, fh: int | None = None) -> None:
        """Change the size."""
        own = self.open(path, os.O_RDWR) if fh is None else fh
        os.ftruncate(own, length)
        self._change(own)
        if fh is None:
            self.release(path, own)

    def flush(self, path: str, fh: int) -> None:
        """Close one descriptor: EIO if an earlier version of the file could not be sent."""
        self._writes.raise_error(path[1:])

    def fsync(self, path: str, datasync: int, fh: int) -> None:
        """Promise nothing."""

    def release(self, path: str, fh: int) -> None:
        """Let go of a file after its last close, and send it later if it was changed."""
        os.close(fh)
        written = self._writing.pop(fh, None)
        if written is None:
            return
        written.writers -= 1
        if written.changed and not written.writers:
            written.changed = False
            if self._writes.find(path[1:]) is written:
                self._writes.closed(path[1:])

    def mkdir(self, path: str, mode: int) -> None:
        """Make a directory, here only."""
        self._directories.add(path[1:])
        self._remote.forget(path[1:])

    def rmdir(self, path: str) -> None:
        """Remove an empty directory."""
        if self._children(path[1:]):
            raise OSError(errno.ENOTEMPTY, path)
        self._directories.discard(path[1:])
        self._remote.forget(path[1:])

    def unlink(self, path: str) -> None:
        """Remove a file, on the Hub with the next batch."""
        self._directories.add(path[1:].rpartition("/")[0])
        self._writes.delete(path[1:])

    def rename(self, old: str, new: str) -> None:
        """Rename a file, or one by one the files of a directory: what the Hub has at once, the rest when it goes up."""
        source, target = old[1:], new[1:]
        found = self._find(source)
        if isinstance(found, Written):
            self._writes.move(source, target)
        elif isinstance(found, RemoteFile):
            self._remote.move([(source, target, found)])
        else:
            self._rename_directory(source, target)

    def _rename_directory(self, source: str, target: str) -> None:
        written = self._writes.below(source)
        landed = {path: file for path, file in self._remote.below(source).items() if path not in written}
        for path in written:
            self._writes.move(path, target + path.removeprefix(source))
        if landed:
            self._remote.move([(path, target + path.removeprefix(source), file) for path, file in landed.items()])
        inside = {path for path in self._directories if path == source or path.startswith(f"{source}/")}
        self._directories -= inside
        self._directories |= {target} | {target + path.removeprefix(source) for path in inside}
        for path in (source, target):
            self._remote.forget(path)

    def chmod(self, path: str, mode: int) -> None:
        """Accept, and forget."""

    def chown(self, path: str, uid: int, gid: int) -> None:
        """Accept, and forget."""

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> None:
        """Accept, and forget."""

    def statfs(self, path: str) -> dict[str, int]:
        """Return that there is plenty of room."""
        return {"f_bsize": _BLOCK, "f_frsize": _BLOCK, "f_blocks": _PLENTY, "f_bfree": _PLENTY, "f_bavail": _PLENTY}

    def _find(self, path: str) -> Directory | RemoteFile | Written:
        if path == "" or path in self._directories or self._writes.below(path):
            return Directory()
        found = self._writes.find(path) or (None if self._writes.is_deleted(path) else self._remote.find(path))
        if found is None:
            raise OSError(errno.ENOENT, path)
        return found

    def _children(self, path: str) -> list[str]:
        prefix = f"{path}/" if path else ""
        here = [*self._writes.below(path), *(name for name in self._directories if name.startswith(prefix))]
        names = {name.removeprefix(prefix).partition("/")[0] for name in here}
        there = {name for name in self._remote.children(path) if not self._writes.is_deleted(prefix + name)}
        return sorted((names | there) - {""})

    def _open_for_writing(self, written: Written) -> int:
        fh = os.open(written.local, os.O_RDWR)
        self._writing[fh] = written
        written.writers += 1
        return fh

    def _change(self, fh: int) -> None:
        written = self._writing[fh]
        written.changed = written.dirty = True

    def _new(self, path: str, content: Path | None) -> Written:
        descriptor, local = tempfile.mkstemp(dir=self._staging)
        os.close(descriptor)
        if content is not None:
            shutil.copyfile(content, local)
        written = Written(Path(local))
        self._writes.add(path, written)
        return written


def main() -> None:
    """Mount until it is unmounted. The Hub and the token are huggingface_hub's, from the environment."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bucket")
    parser.add_argument("mountpoint")
    parser.add_argument("--home", type=Path, required=True, help="where to keep local copies")
    parser.add_argument("--negative-ttl-s", type=float, required=True)
    parser.add_argument("--flush-debounce-s", type=float, required=True)
    parser.add_argument("--read-only", action="store_true")
    options = parser.parse_args()
    end_with_parent()
    cache, staging = options.home / "cache", options.home / "staging"
    for folder in (cache, staging):
        folder.mkdir()
    remote = Remote(HfApi(), options.bucket, negative_ttl_s=options.negative_ttl_s, cache=cache)
    mount = Mount(remote, Writes(remote, debounce_s=options.flush_debounce_s), staging)
    # All memory is ours: the kernel's would add to it.
    kernel = {"attr_timeout": 0, "entry_timeout": 0, "negative_timeout": 0, "ro": options.read_only}
    mfusepy.FUSE(
        mount, options.mountpoint, foreground=True, nothreads=True, fsname="bucket", hard_remove=True, **kernel
    )


if __name__ == "__main__":
    main()
