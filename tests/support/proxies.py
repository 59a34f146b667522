"""The proxy under test: `lora-sync-proxy` as a process of its own, in front of whatever replicas a test has started.

with RunningProxy(a.url, b.url, PROXY_LORA_RETRY_S="0.2") as proxy:
    proxy.load("policy-v1", directory)
    proxy.complete("policy-v1", prompt=[1, 2, 3])
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx2

from proxy.demo.processes import free_port
from tests.support.replicas import own_code, wait_until

_START_S = 15
_STOP_S = 15


def proxy_command(
    environment: dict[str, str], *arguments: str, timeout_s: float = 15
) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end, for tests of how it refuses to start."""
    return subprocess.run(
        [sys.executable, "-m", "proxy.cli", *arguments],
        env={**_without_settings(), **environment},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


class RunningProxy:
    """One proxy process. The settings are environment variables, as users set them."""

    within: tuple[str, ...] = ()
    """A command that becomes the one that follows it, as `env` does."""

    def __init__(self, *replicas: str, cwd: Path | str | None = None, **environment: str) -> None:
        self._cwd = cwd
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._environment = {
            "UPSTREAM_URLS": ",".join(replicas),
            "PROXY_PORT": str(self.port),
            "PROXY_PROBE_S": "0.2",
            "PROXY_LORA_RETRY_S": "0.2",
            **environment,
        }
        with tempfile.NamedTemporaryFile(prefix="proxy-", suffix=".log", delete=False) as log:
            self.log_path = Path(log.name)

    def start(self, *, healthy: bool = True) -> Self:
        """Start, and wait until /health answers 200 (`healthy`), or until it listens. Again: with the same log."""
        self.spawn()
        wanted = "/health" if healthy else "/proxy/live"
        wait_until(lambda: self._answers(wanted), limit_s=_START_S, what=f"the proxy answers {wanted}")
        return self

    def spawn(self) -> None:
        """Start, and wait for nothing."""
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [*self.within, sys.executable, "-m", "proxy.cli"],
                cwd=self._cwd,
                env={**_without_settings(), **self._environment, **own_code()},
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C in the terminal is for those who started it
            )
        limits = httpx2.Limits(max_connections=512)
        self.client = httpx2.Client(base_url=self.url, timeout=15, trust_env=False, limits=limits)

    def stop(self, signal_number: int = signal.SIGTERM) -> int:
        """Ask it to stop and return its exit status."""
        self.process.send_signal(signal_number)
        try:
            return self.process.wait(_STOP_S)
        finally:
            self.client.close()

    def kill(self) -> None:
        """End it at once, as kill -9 does. `start` begins anew on the same command line."""
        self.process.kill()
        self.process.wait()
        self.client.close()

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.end()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
        if kind is None:
            # A traceback in the log is a defect even if every answer was right.
            assert "Traceback" not in self.log(), self.log()
        self.log_path.unlink()

    def log(self) -> str:
        """Return what it has logged so far."""
        return self.log_path.read_text()

    def load(self, name: str, path: Path | str, **fields: Any) -> httpx2.Response:
        """Announce a policy."""
        return self.client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path), **fields})

    def unload(self, name: str) -> httpx2.Response:
        """Take a policy away."""
        return self.client.post("/v1/unload_lora_adapter", json={"lora_name": name})

    def completion(self, model: str, **fields: Any) -> httpx2.Response:
        """Send a rollout; eight tokens unless `fields` say otherwise."""
        body = {"prompt": [100, 200, 300], "max_tokens": 8, "temperature": 0, "return_token_ids": True, **fields}
        return self.client.post("/v1/completions", json={"model": model, **body})

    def complete(self, model: str, **fields: Any) -> list[int]:
        """Send a rollout that must work and return its tokens."""
        answer = self.completion(model, **fields)
        assert answer.status_code == 200, answer.text
        tokens: list[int] = answer.json()["choices"][0]["token_ids"]
        return tokens

    def stats(self) -> dict[str, Any]:
        """Return /proxy/stats."""
        stats: dict[str, Any] = self.client.get("/proxy/stats").json()
        return stats

    def policy(self, name: str) -> dict[str, Any]:
        """Return /proxy/policies/NAME."""
        policy: dict[str, Any] = self.client.get(f"/proxy/policies/{name}").json()
        return policy

    def replicas(self) -> list[dict[str, Any]]:
        """Return /proxy/replicas."""
        replicas: list[dict[str, Any]] = self.client.get("/proxy/replicas").json()["replicas"]
        return replicas

    def states(self) -> list[str]:
        """Return the state of every replica, in the order of UPSTREAM_URLS."""
        return [replica["state"] for replica in self.replicas()]

    def wait_states(self, *states: str) -> None:
        """Wait until the replicas are in these states."""
        wait_until(lambda: self.states() == list(states), what=f"replicas {states}")

    def inflight(self) -> int:
        """Return the rollouts in flight on all replicas."""
        return sum(upstream["inflight"] for upstream in self.stats()["upstreams"])

    def _answers(self, path: str) -> bool:
        assert self.process.poll() is None, f"the proxy ended with {self.process.returncode}: {self.log()}"
        with suppress(httpx2.TransportError):
            return self.client.get(path).status_code == 200
        return False

    def end(self) -> None:
        """End it, gently if it can be."""
        if process := getattr(self, "process", None):
            if process.poll() is None:
                process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_S)
            process.kill()
            process.wait()
            self.client.close()


def _without_settings() -> dict[str, str]:
    """Return the environment without what configures a proxy, so that the machine's own settings do not leak in."""
    ours = ("PROXY_", "UPSTREAM_URLS", "HF_TOKEN", "HF_NETWORK", "OTEL_")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}
