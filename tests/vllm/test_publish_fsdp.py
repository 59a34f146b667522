"""A model that FSDP2 shards over two processes: one publishes, and both return or raise alike."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from proxy.artifacts.check import inspect_directory
from proxy.artifacts.manifest import MANIFEST_FILE, read_manifest
from proxy.demo.processes import free_port
from tests.support.fake_proxy import FakeProxy, refusal
from tests.support.tiny_model import REPO

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(200)]

RANKS = 2
RUN_LIMIT_S = 150


def run_ranks(url: str, output: Path) -> list[dict[str, Any]]:
    """Run the training on every rank and return what each was told."""
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment |= {"WORLD_SIZE": str(RANKS), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "tests.support.fsdp_run", "--url", url, "--output", str(output)]
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


def test_every_rank_is_told_the_same_and_the_weights_are_whole(tmp_path: Path) -> None:
    with FakeProxy() as proxy:
        proxy.answers = {2: refusal(409, "no free slot"), 4: refusal(409, "still no slot")}
        first, second = run_ranks(proxy.url, tmp_path)
        live = list(proxy.live)
    assert first == second, "the ranks were told different things"

    names = [path.name for path in sorted((tmp_path / "store" / "fsdp").glob("fsdp-v*"))]
    assert first["first"] == {"policy": names[0]}
    assert (first["refused"]["error"], "no free slot" in first["refused"]["text"]) == ("AnnounceError", True)
    assert first["again"] == {"policy": names[1]}
    assert first["future"]["error"] == "AnnounceError"
    assert (first["earlier"]["error"], first["earlier"]["inner"]) == ("EarlierPublishError", ["AnnounceError"])
    assert first["rewind"]["error"] == "RewindError"
    assert first["background"] == {"policy": "Future"}
    assert first["last"] == {"policy": names[3]}
    assert first["current"] == names[3]
    assert live == names

    for version, name in enumerate(names[:2], start=1):
        published = tmp_path / "store" / "fsdp" / name
        assert (published / MANIFEST_FILE).exists()
        expected = inspect_directory(tmp_path / f"expected-{version}")
        assert read_manifest(published).digest == expected.digest
        assert inspect_directory(published).digest == expected.digest
