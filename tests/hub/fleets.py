"""`lora-sync jobs` as users run it: a process, on an offline Hub whose Jobs are processes; and whether all are gone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx2
import yaml
from huggingface_hub import JobInfo

from proxy.demo.processes import free_port
from tests.hub.hub_process import USER
from tests.hub.offline_hub import OfflineHub
from tests.support.replicas import wait_until

NAME = "fleet"
MAX_STALENESS = 2
UP_S = 60
"""For a fleet of processes to come up on a busy machine, and for one to go."""

_COMMAND_S = 60
_IMPATIENT = """
import sys
from trainer_client import cli
from trainer_client.jobs import watch
watch.UNANSWERED_S = float(sys.argv.pop(1))
cli.main()
"""


@dataclass
class Fleet:
    """A fleet's config in `folder`, and the commands that a user runs on it."""

    hub: OfflineHub
    folder: Path

    def __post_init__(self) -> None:
        self.path = self.folder / "fleet.yaml"
        self.stop_file = self.folder / "stop"
        self.spoiled = self.folder / "spoiled"
        self.spoiled.mkdir()
        self.proxy_port = free_port()

    def write(
        self,
        *,
        seconds: float | None = None,
        spoiled_how: str = "dies",
        trainer: dict[str, Any] | None = None,
        replicas: dict[str, Any] | None = None,
        **fields: Any,
    ) -> None:
        """Write the config: three replicas, and a pretend trainer of so many seconds, or until `stop_file` is there."""
        store = self.folder / "lora"
        store.mkdir(exist_ok=True)
        command = ["python", "-m", "tests.hub.job_trainer", "--store", str(store)]
        command += ["--max-staleness", str(MAX_STALENESS)]
        command += ["--until", str(self.stop_file)] if seconds is None else ["--seconds", str(seconds)]
        config = {
            "name": NAME,
            "bucket": f"{USER}/runs",
            "mount": str(store),
            "model": "sim",
            "max_staleness": MAX_STALENESS,
            "poll": "0.2s",
            "replicas": {
                "count": 3,
                "flavor": "cpu-basic",
                "environment": {"SIM_SPOIL": str(self.spoiled), "SIM_SPOIL_HOW": spoiled_how},
                **(replicas or {}),
            },
            "trainer": {
                "image": "trainer:1",
                "flavor": "cpu-basic",
                "command": command,
                "proxy_port": self.proxy_port,
                "environment": {"PROXY_PROBE_S": "0.5", "PROXY_DISCOVER_EVERY_S": "0.5"},
                **(trainer or {}),
            },
            **fields,
        }
        self.path.write_text(yaml.safe_dump(config))

    def spoil(self, count: int) -> None:
        """Let the next `count` replicas be spoiled, as SIM_SPOIL_HOW says."""
        for number in range(count):
            (self.spoiled / str(number)).touch()

    def up(self, *arguments: str, output: int | None = None, unanswered_s: float | None = None) -> Up:
        """Start `up` and return at once. Use it as a context manager.

        `output` is where it prints: else into a file. `unanswered_s` replaces the constant of `watch`.
        """
        command = _command(["up", *arguments, str(self.path)])
        if unanswered_s is not None:
            command = [sys.executable, "-c", _IMPATIENT, str(unanswered_s), *command[1:]]
        return Up(self, command, output)

    def command(self, *arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run another command of `lora-sync jobs` to its end."""
        return subprocess.run(
            _command(arguments),
            cwd=self.folder,
            env={**self.environment(), **(environment or {})},
            capture_output=True,
            text=True,
            timeout=_COMMAND_S,
            check=False,
        )

    def environment(self) -> dict[str, str]:
        """Return what a user's shell has: no more than the Hub and a home of its own."""
        home = {"HOME": str(self.folder), "XDG_STATE_HOME": str(self.folder / "state"), "PATH": os.environ["PATH"]}
        return {**home, **self.hub.environment()}

    def jobs(self, **labels: str) -> list[JobInfo]:
        """Return the fleet's Jobs, of all stages, the newest first."""
        wanted = {"lora-sync-fleet": NAME, **{f"lora-sync-{name}": value for name, value in labels.items()}}
        return list(self.hub.api().list_jobs(namespace=USER, labels=wanted))

    def alive(self, **labels: str) -> list[JobInfo]:
        """Return those that are not over."""
        return [job for job in self.jobs(**labels) if job.status.stage in ("SCHEDULING", "RUNNING")]

    def trainer_log(self) -> list[str]:
        """Return what the trainer's Job has printed."""
        (trainer,) = self.jobs(role="trainer")
        return list(self.hub.api().fetch_job_logs(job_id=trainer.id, namespace=USER))

    def training(self) -> dict[str, Any]:
        """Return what the pretend trainer has counted, after its end."""
        lines = self.trainer_log()
        found = [line for line in lines if line.startswith('{"rollouts"')]
        assert found, "\n".join(lines)
        counted: dict[str, Any] = json.loads(found[-1])
        return counted

    def replicas_of_proxy(self) -> list[dict[str, Any]]:
        """Return what the proxy in the trainer's Job says of its replicas; nothing while it does not answer."""
        try:
            answer = httpx2.get(f"http://127.0.0.1:{self.proxy_port}/proxy/replicas", trust_env=False)
        except httpx2.TransportError:
            return []
        replicas: list[dict[str, Any]] = answer.json()["replicas"]
        return replicas

    def wait_served(self, count: int, up: Up, *, not_at: str = "") -> None:
        """Wait until the proxy has `count` replicas, all ready with a policy, none at `not_at`, while `up` goes on."""

        def served() -> bool:
            assert up.running(), up.log()
            replicas = self.replicas_of_proxy()
            serving = [one for one in replicas if one["state"] == "ready" and one["policies"] and one["url"] != not_at]
            return len(replicas) == len(serving) == count

        wait_until(served, limit_s=UP_S, what=f"{count} replicas serve")

    def wait_gone(self) -> None:
        """Wait until no Job is alive, and no process that knows this Hub's address, which all of a fleet do."""
        wait_until(lambda: not self.alive(), limit_s=UP_S, what="no Job is alive")
        wait_until(lambda: not processes_of(self.hub), limit_s=UP_S, what="no process is left")

    def ended_with(self, up: Up, status: int) -> None:
        """Assert that `up` ends with this status, and leaves neither a Job nor a process, nor the token anywhere."""
        assert up.wait() == status, up.log()
        self.wait_gone()
        self.secrets_are_nowhere(up.log())

    def lost_nothing(self) -> None:
        """Assert that the pretend trainer got every rollout, each token from the weights that it asked for."""
        training = self.training()
        assert training["rollouts"] > 0
        assert training["policies"] > 0
        assert (training["failures"], training["wrong_tokens"]) == (0, 0), training["first_failure"]

    def secrets_are_nowhere(self, *texts: str) -> None:
        """Fail if the token is in one of the texts, in what the Hub shows of a Job, or in a file on disk."""
        token = self.hub.environment()["HF_TOKEN"]
        shown = [repr(job) for job in self.jobs()]
        files = [
            path.read_bytes().decode(errors="replace") for path in (self.folder / "state").rglob("*") if path.is_file()
        ]
        assert not any(token in text for text in (*texts, *shown, *files))


class Up:
    """`lora-sync jobs up`, running. Leaving the block kills it, should it still be there."""

    def __init__(self, fleet: Fleet, command: list[str], output: int | None) -> None:
        self._log = fleet.folder / "up.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                cwd=fleet.folder,
                env=fleet.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log if output is None else output,
                stderr=log,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def log(self) -> str:
        """Return what it has printed so far."""
        return self._log.read_text()

    def wait_said(self, text: str) -> None:
        """Wait until it has printed this."""

        def said() -> bool:
            assert self.running() or text in self.log(), self.log()
            return text in self.log()

        wait_until(said, limit_s=UP_S, what=f"{text!r} in: {self.log()}")

    def running(self) -> bool:
        """Return whether it has not ended."""
        return self._process.poll() is None

    def wait(self) -> int:
        """Wait for its end and return its status."""
        return self._process.wait(UP_S)

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """End it at once, as kill -9 does."""
        self._process.kill()
        self._process.wait()


def processes_of(hub: OfflineHub) -> dict[int, str]:
    """Return id and command line of all processes with this Hub's address in their environment."""
    found = {}
    marker = f"HF_ENDPOINT={hub.url}".encode()
    for process in Path("/proc").iterdir():
        with suppress(OSError):
            if process.name.isdecimal() and marker in (process / "environ").read_bytes().split(b"\0"):
                found[int(process.name)] = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def _command(arguments: Sequence[str]) -> list[str]:
    return [str(Path(sys.executable).with_name("lora-sync")), "jobs", *arguments]
