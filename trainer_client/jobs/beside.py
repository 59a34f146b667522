"""Inside the trainer Job: the proxy on loopback beside the trainer's command, both ended together.

At the end the replicas are canceled from here, too: whoever started the fleet may be gone, and they have no end of
their own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType

import httpx2

from trainer_client.errors import JobsError
from trainer_client.jobs.ending import cancel_all, must_be_complete
from trainer_client.jobs.hub import Hub
from trainer_client.jobs.launch import FLEET_VARIABLE, LOOPBACK, REPLICAS_LABEL

READY_S = 330.0
"""For the proxy to call its fleet ready: it waits up to 120 s (PROXY_START_WAIT_S) for all replicas, which were healthy
a moment ago, and may have to load what they hold."""

STOP_S = 75.0
"""From SIGTERM to SIGKILL: the proxy lets rollouts finish for 60 s (PROXY_SHUTDOWN_S)."""

KILL_WAIT_S = 10.0
"""A killed process ends in milliseconds, unless the GPU driver or a mount holds it."""

REPLICAS_S = 30.0
"""For canceling the replicas, which is done only in case that nobody else does."""

EXIT_USAGE = 64
"""The proxy's status for settings that cannot work: starting it again would not help."""

REVIVE_S = 1.0
"""Before the proxy is started again, so that one that dies at every start does not fill the log."""

_POLL_S = 0.2
_PROXY = [sys.executable, "-m", "proxy.cli"]


def run_beside(command: Sequence[str]) -> int:
    """Run the proxy, wait until it is ready, run `command` to its end, end the proxy; return the command's status.

    A proxy that dies is started again; it finds everything again by itself. SIGTERM and SIGINT go to the command.
    Raises JobsError if the proxy does not become ready.
    """
    with _Both() as both:
        both.start_proxy()
        both.wait_ready()
        return both.run(command)


class _Both:
    def __init__(self) -> None:
        self._url = f"http://{LOOPBACK}:{os.environ.get('PROXY_PORT', '8000')}"
        self._stopped = False
        self._trainer: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> _Both:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        return self

    def __exit__(self, *exception: object) -> None:
        for process in (self._trainer, self._proxy):
            if process is not None:
                _end(process)
        _cancel_replicas()

    def start_proxy(self) -> None:
        self._proxy = subprocess.Popen(_PROXY, stdin=subprocess.DEVNULL)

    def wait_ready(self) -> None:
        deadline = time.monotonic() + READY_S
        with httpx2.Client(timeout=5.0, trust_env=False) as client:
            while not self._stopped and time.monotonic() < deadline:
                if self._proxy.poll() is not None:
                    self._revive()
                with suppress(httpx2.HTTPError):
                    if client.get(f"{self._url}/health").status_code == 200:
                        return
                time.sleep(_POLL_S)
        if not self._stopped:
            raise JobsError(f"the proxy was not ready within {READY_S:.0f} s; its own words are above")

    def run(self, command: Sequence[str]) -> int:
        if self._stopped:
            return 128 + signal.SIGTERM
        try:
            self._trainer = subprocess.Popen(list(command))
        except OSError as error:
            raise JobsError(f"{command[0]} cannot be run: {error.strerror}; see trainer.command") from error
        while (status := self._trainer.poll()) is None:
            if self._proxy.poll() is not None and not self._stopped:
                self._revive()
            time.sleep(_POLL_S)
        return status if status >= 0 else 128 - status

    def _revive(self) -> None:
        status = self._proxy.returncode
        if status == EXIT_USAGE:
            raise JobsError(f"the proxy cannot work with its settings (status {status}); its own words are above")
        print(f"lora-sync: the proxy ended with status {status}; starting it again", file=sys.stderr, flush=True)
        time.sleep(REVIVE_S)
        self.start_proxy()

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._stopped = True
        if self._trainer is not None:
            self._trainer.send_signal(number)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        with suppress(subprocess.TimeoutExpired):  # held in the kernel: replicas must be canceled all the same
            process.wait(KILL_WAIT_S)


def _cancel_replicas() -> None:
    namespace, _, run = os.environ.get(FLEET_VARIABLE, "").partition("/")
    if not run:
        return
    try:
        must_be_complete(cancel_all(Hub(namespace), {REPLICAS_LABEL: run}, limit_s=REPLICAS_S))
    except JobsError as error:
        print(f"lora-sync: replicas are left: {error}", file=sys.stderr)
