"""Run a training and wait for it: TRL's script as a process, against whatever URL stands for its one vLLM server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

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


def train(url: str, output: Path, *, steps: int, seed: int, arguments: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Run the training script to its end and return TRL's history."""
    output.mkdir()
    command = [sys.executable, "-m", "tests.support.trl_run", "--output", str(output), "--url", url]
    command += ["--steps", str(steps), "--seed", str(seed), *arguments]
    # TRL looks for the `vllm` command beside its Python.
    environment = {**os.environ, "PATH": f"{VLLM_BIN}:{os.environ['PATH']}"}
    with (output / "trl.log").open("wb") as log:
        done = subprocess.run(command, cwd=REPO, env=environment, stdout=log, stderr=log, timeout=RUN_LIMIT_S)
    assert done.returncode == 0, (output / "trl.log").read_text(errors="replace")[-4000:]
    history: list[dict[str, Any]] = json.loads((output / "history.json").read_text())
    return [entry for entry in history if "reward" in entry]
