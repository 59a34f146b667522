"""Run a module as several processes of one training, over torch.distributed on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from proxy.demo.processes import free_port
from tests.support.tiny_model import REPO

RANKS = 2
RUN_LIMIT_S = 150


def run_ranks(module: str, url: str, output: Path, *arguments: str) -> list[dict[str, Any]]:
    """Run `module` on every rank, and return what each has written into OUTPUT/rank-N.json."""
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment |= {"WORLD_SIZE": str(RANKS), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", module, "--url", url, "--output", str(output), *arguments]
    processes = []
    for rank in range(RANKS):
        with (output / f"rank-{rank}.log").open("wb") as log:
            its_own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(subprocess.Popen(command, cwd=REPO, env=its_own, stdout=log, stderr=log))
    try:
        for rank, process in enumerate(processes):
            assert process.wait(RUN_LIMIT_S) == 0, (output / f"rank-{rank}.log").read_text()[-4000:]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [json.loads((output / f"rank-{rank}.json").read_text()) for rank in range(RANKS)]
