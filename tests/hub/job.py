"""A Job of the offline Hub: a process of this machine with the stages, times and log that the Hub reports.

There is no container: image, flavor and volumes are kept and shown, and nothing more. Ports would clash between Jobs:
an argument or an environment value that is an exposed port becomes a free local one. A Job in a network group keeps its
ports and has an address of its own instead, on which it listens where it was asked to listen on 0.0.0.0.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from huggingface_hub import JobStage

from proxy.demo.processes import free_port
from tests.hub.job_network import Membership
from tests.support.tiny_model import REPO

_TIMEOUT_S = 1800.0
"""The Hub's limit where none is given."""
_GRACE_S = 2.0
"""From SIGTERM to SIGKILL; short, since tests wait for it."""
_POLL_S = 0.02


@dataclass
class Job:
    """One Job; `start()` once. Its threads and processes end with `end()`."""

    id: str
    spec: dict[str, Any]
    """As huggingface_hub sent it."""
    log: Path
    membership: Membership | None = None
    """Of its network group."""
    created_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    started_at: datetime | None = None
    finished_at: datetime | None = None
    message: str | None = None

    def __post_init__(self) -> None:
        exposed = self.spec.get("expose", {}).get("ports", [])
        self.ports: dict[int, int] = {port: port if self.membership else free_port() for port in exposed}
        self.address = self.membership.address if self.membership else "127.0.0.1"
        self._canceled = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None

    @property
    def stage(self) -> JobStage:
        """Return the stage, as the Hub names it."""
        if self.finished_at is None:
            return JobStage.SCHEDULING if self.started_at is None else JobStage.RUNNING
        if self._canceled.is_set():
            return JobStage.CANCELED
        return JobStage.ERROR if self.message else JobStage.COMPLETED

    def command(self) -> list[str]:
        """Return what the Job was asked to run, with local ports."""
        return [self._local(part) for part in [*self.spec["command"], *self.spec["arguments"]]]

    def start(self, command: list[str], *, environment: dict[str, str], scheduling_s: float) -> None:
        """Run `command` after so many seconds; return at once."""
        given = {**self.spec.get("environment", {}), **self.spec.get("secrets", {})}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        variables = {
            "PATH": path,
            "JOB_ID": self.id,
            **environment,
            **{name: self._local(value) for name, value in given.items()},
        }
        if self.membership:
            command = self.membership.wrap(command)
            variables["HF_NETWORK_GROUP_PREFIX"] = self.membership.prefix
        self._thread = threading.Thread(target=self._run, args=(command, variables, scheduling_s))
        self._thread.start()

    def cancel(self) -> None:
        """Ask the process to end, and end it if it does not; return at once."""
        self._canceled.set()

    def kill(self) -> None:
        """Let the process die, as a machine that is lost."""
        self._signal(signal.SIGKILL)

    def end(self) -> None:
        """Leave nothing running."""
        self._canceled.set()
        self._signal(signal.SIGKILL)
        if self._thread is not None:
            self._thread.join()

    def _local(self, text: str) -> str:
        if self.membership and text == "0.0.0.0":
            return self.address
        return str(self.ports.get(int(text), text)) if text.isdecimal() else text

    def _run(self, command: list[str], variables: dict[str, str], scheduling_s: float) -> None:
        if not self._canceled.wait(scheduling_s):
            try:
                self._process = self._popen(command, variables)
            except OSError as error:
                self.message = f"Job failed to start: {error}"
            else:
                self.started_at = datetime.now(UTC)
                self.message = self._wait(self._process)
        self.finished_at = datetime.now(UTC)

    def _popen(self, command: list[str], variables: dict[str, str]) -> subprocess.Popen[bytes]:
        with self.log.open("wb") as log:
            return subprocess.Popen(
                command,
                cwd=REPO,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _wait(self, process: subprocess.Popen[bytes]) -> str | None:
        deadline = time.monotonic() + self.spec.get("timeoutSeconds", _TIMEOUT_S)
        while process.poll() is None and time.monotonic() < deadline and not self._canceled.wait(_POLL_S):
            pass
        timed_out = process.poll() is None and not self._canceled.is_set()
        self._signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
        self._signal(signal.SIGKILL)
        code = process.wait()
        if timed_out:
            return "Job timeout"
        return f"Job failed with exit code: {code}" if code else None

    def _signal(self, number: signal.Signals) -> None:
        # The process began a session, so this reaches its children as well, even after its own end.
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
