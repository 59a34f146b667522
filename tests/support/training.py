"""Run a training and wait for it: TRL's script as a process, against whatever URL stands for its one vLLM server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.support.replicas import VllmReplica
from tests.support.tiny_model import MODEL, REPO, VLLM_BIN

MAX_STALENESS = 2
SLOTS = MAX_STALENESS + 2

RUN_LIMIT_S = 1200


def trl_replica() -> VllmReplica:
    """Return a replica as TRL wants it: the model under the name that the trainer calls it by."""
    return VllmReplica(
        model=str(MODEL), max_loras=SLOTS, max_cpu_loras=2 * SLOTS, args=("--num-gpu-blocks-override", "512")
    )


@contextmanager
def trl_pair() -> Iterator[list[VllmReplica]]:
    """Start two such replicas together."""
    with ExitStack() as stack:
        pair = [trl_replica(), trl_replica()]
        for replica in pair:
            stack.callback(replica.stop)
        with ThreadPoolExecutor() as threads:
            list(threads.map(VllmReplica.start, pair))
        yield pair


class Training:
    """The training script as a process of its own, with all that it starts. Leaving the block kills it."""

    def __init__(self, url: str, output: Path, *, steps: int, seed: int, arguments: tuple[str, ...] = ()) -> None:
        output.mkdir(exist_ok=True)
        self._log = output / "trl.log"
        command = [sys.executable, "-m", "tests.support.trl_run", "--output", str(output), "--url", url]
        command += ["--steps", str(steps), "--seed", str(seed), *arguments]
        # TRL looks for the `vllm` command beside its Python.
        environment = {**os.environ, "PATH": f"{VLLM_BIN}:{os.environ['PATH']}"}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, cwd=REPO, env=environment, stdout=log, stderr=log, start_new_session=True
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def running(self) -> bool:
        """Tell whether it goes on. Fails if it has ended badly."""
        status = self._process.poll()
        assert status in (None, 0), self.log()
        return status is None

    def wait(self) -> None:
        """Wait for its end, which must be a good one."""
        self._process.wait(RUN_LIMIT_S)
        assert self._process.returncode == 0, self.log()

    def kill(self) -> None:
        """Kill the trainer and its rollout worker, as the end of a container does."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def log(self) -> str:
        """Return the end of what it has said."""
        return self._log.read_text(errors="replace")[-4000:]


def train(url: str, output: Path, *, steps: int, seed: int, arguments: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Run the training script to its end and return TRL's history."""
    with Training(url, output, steps=steps, seed=seed, arguments=arguments) as training:
        training.wait()
    history: list[dict[str, Any]] = json.loads((output / "history.json").read_text())
    return [entry for entry in history if "reward" in entry]
