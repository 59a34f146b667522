"""A bucket of the offline Hub as a directory, with hf-mount's ways. Each mount remembers for itself, as a machine does.

    with BucketMount(hub, "tester/runs", tmp_path / "lora", negative_ttl_s=30) as lora:
        (lora / "v1" / "adapter_config.json").exists()

`WITHOUT_FUSE` says why mounts cannot be tried here, if they cannot.
"""

from __future__ import annotations

import ctypes.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType

from tests.hub.offline_hub import OfflineHub
from tests.support.replicas import wait_until
from tests.support.tiny_model import REPO

NEGATIVE_TTL_S = 30.0
"""hf-mount 0.9.2, where it cannot be changed."""
NEWER_NEGATIVE_TTL_S = 1.0
"""What newer versions of hf-mount begin with."""
FLUSH_DEBOUNCE_S = 2.0
"""hf-mount's default."""

_DEVICE = Path("/dev/fuse")
_UNMOUNT = "fusermount3"
_STOP_S = 15


def _why_not() -> str | None:
    if shutil.which(_UNMOUNT) is None or ctypes.util.find_library("fuse3") is None:
        return "FUSE 3 is not installed (Debian: fuse3)"
    try:
        os.close(os.open(_DEVICE, os.O_RDWR))
    except OSError as error:
        return f"{_DEVICE} cannot be opened: {error.strerror}"
    return None


WITHOUT_FUSE = _why_not()


class BucketMount:
    """Mount a bucket at `directory`, which is made, from entering to leaving the context."""

    def __init__(
        self,
        hub: OfflineHub,
        bucket_id: str,
        directory: Path,
        *,
        negative_ttl_s: float = NEGATIVE_TTL_S,
        flush_debounce_s: float = FLUSH_DEBOUNCE_S,
        read_only: bool = False,
    ) -> None:
        self.directory = directory
        self._environment = hub.environment()
        options = ["--negative-ttl-s", str(negative_ttl_s), "--flush-debounce-s", str(flush_debounce_s)]
        if read_only:
            options.append("--read-only")
        self._command = [sys.executable, "-m", "tests.hub.mount_process", bucket_id, str(directory), *options]

    def __enter__(self) -> Path:
        self.directory.mkdir()
        self._home = tempfile.TemporaryDirectory(prefix="mounted-bucket-")
        command = [*self._command, "--home", self._home.name]
        environment = {**os.environ, **self._environment}
        self._process = subprocess.Popen(command, cwd=REPO, env=environment, stdin=subprocess.PIPE)
        try:
            wait_until(self._is_up, limit_s=_STOP_S, what=f"{self.directory} is mounted")
        except BaseException:
            self.kill()
            raise
        return self.directory

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            wait_until(self._unmount, limit_s=_STOP_S, what=f"{self.directory} is not busy")
            assert self._process.wait(_STOP_S) == 0
            self._clean_up()

    def kill(self) -> None:
        """End the mount's process; what it has not sent is lost."""
        self._process.kill()
        self._process.wait(_STOP_S)
        self._unmount("-z")
        self._clean_up()

    def _clean_up(self) -> None:
        self._process.communicate()
        self._home.cleanup()

    def _is_up(self) -> bool:
        assert self._process.poll() is None, f"the mount ended with {self._process.returncode}"
        return self.directory.is_mount()

    def _unmount(self, *options: str) -> bool:
        command = [_UNMOUNT, "-u", *options, str(self.directory)]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
