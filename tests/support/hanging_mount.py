"""A mount that never answers, not even a look at its root: a file system of FUSE that nobody serves.

with hanging_mount(tmp_path / "lora") as lora: ...

`WITHOUT_MOUNTS` says why there can be none here, if there can be none.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_DEVICE = "/dev/fuse"
_DETACH = 2
"""MNT_DETACH of umount2(2)."""


def _mount(directory: Path) -> int:
    """Mount at `directory` and return what keeps the calls waiting. Raises OSError."""
    device = os.open(_DEVICE, os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0".encode()
    if ctypes.CDLL(None, use_errno=True).mount(b"hangs", os.fsencode(directory), b"fuse", 0, options):
        os.close(device)
        raise OSError(ctypes.get_errno(), "cannot mount")
    return device


@contextmanager
def hanging_mount(directory: Path) -> Iterator[Path]:
    """Give a directory that hangs whoever looks at it, until the end of the `with` block: then the looks fail."""
    directory.mkdir()
    try:
        device = _mount(directory)
    except OSError:
        directory.rmdir()
        raise
    try:
        yield directory
    finally:
        os.close(device)  # everybody who waits gets ENOTCONN
        ctypes.CDLL(None).umount2(os.fsencode(directory), _DETACH)


def _why_not() -> str | None:
    if os.geteuid() != 0:
        return "only root can mount what nobody serves"
    try:
        with tempfile.TemporaryDirectory() as folder, hanging_mount(Path(folder) / "tried"):
            return None
    except OSError as error:
        return f"{_DEVICE} cannot be mounted: {error.strerror}"


WITHOUT_MOUNTS = _why_not()
