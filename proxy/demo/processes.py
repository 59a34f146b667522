"""Start servers of this package as processes of their own, and end them again whatever happens."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx2

from proxy.contract import API_KEY, API_KEY_FILE
from proxy.errors import LoraSyncError

START_TIMEOUT_S = 30.0
"""A server of this package is up in about a second; a machine that is busy may need ten times as long."""

STOP_TIMEOUT_S = 10.0
"""Seconds from SIGTERM to SIGKILL, and after that to its end."""


class StartError(LoraSyncError):
    """A server did not come up. Says what it printed."""


def free_port() -> int:
    """Return a port that nobody listens on just now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def server(arguments: Sequence[str], *, port: int, ready_path: str, environment: dict[str, str]) -> Iterator[str]:
    """Run `python -m ARGUMENTS` and yield its URL once `ready_path` answers 200. Ends it at exit.

    Raises StartError with its last words if it ends, or does not answer in time.
    """
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            stdout=log,
            stderr=log,
            env={**os.environ, **environment},
            start_new_session=True,  # Ctrl-C in the terminal is for the demo, which ends its servers in order
        )
        try:
            _wait(process, url + ready_path, log.fileno())
            yield url
        finally:
            _stop(process)


@contextmanager
def replica(settings: str) -> Iterator[str]:
    """Run a simulated replica; `settings` is its SimulatorSettings as JSON."""
    port = free_port()
    arguments = ["proxy.simulator", "--port", str(port), "--settings", settings]
    with server(arguments, port=port, ready_path="/health", environment={}) as url:
        yield url


@contextmanager
def proxy(replicas: Sequence[str]) -> Iterator[str]:
    """Run the proxy in front of `replicas`."""
    port = free_port()
    environment = {"UPSTREAM_URLS": ",".join(replicas), "PROXY_PORT": str(port), "PROXY_HOST": "127.0.0.1"}
    environment |= {API_KEY: "", API_KEY_FILE: "", "PROXY_REQUIRE_KEY": "0"}  # its rollouts are TRL's, without a key
    with server(["proxy.cli"], port=port, ready_path="/health", environment=environment) as url:
        yield url


def _wait(process: subprocess.Popen[bytes], url: str, log: int) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise StartError(f"{url} ended with status {process.returncode} at its start: {_last_words(log)}")
        try:
            if httpx2.get(url, timeout=2.0, trust_env=False).status_code == 200:
                return
        except httpx2.HTTPError:
            pass
        time.sleep(0.05)
    raise StartError(f"{url} did not answer 200 within {START_TIMEOUT_S:.0f} s: {_last_words(log)}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(STOP_TIMEOUT_S)


def _last_words(log: int) -> str:
    return Path(f"/proc/self/fd/{log}").read_text(errors="replace")[-2000:].strip() or "it printed nothing"
