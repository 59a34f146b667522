"""A mount that never answers: whoever waits for it is told, and everything else goes on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxy.contract import RELOAD_PATH
from proxy.simulator.adapters import write_adapter
from proxy.simulator.checkpoints import write_checkpoint
from tests.simulated.checks import Traffic, wait_quiet
from tests.simulated.conftest import Adapters
from tests.support.proxies import RunningProxy
from tests.support.replicas import SimulatedReplica, wait_until


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[Path]:
    """An adapter whose config nobody can open: it is a pipe that nobody writes to."""
    directory = write_adapter(tmp_path / "policy", seed=3)
    config = directory / "adapter_config.json"
    config.unlink()
    os.mkfifo(config)
    yield directory
    os.close(os.open(config, os.O_RDWR | os.O_NONBLOCK))  # whoever still waits finds its end


def test_a_load_ends_at_its_limit(pair: list[SimulatedReplica], adapter: Adapters, hanging: Path) -> None:
    with RunningProxy(*(r.url for r in pair), PROXY_LORA_LOAD_TIMEOUT_S="1") as proxy:
        assert proxy.load("kept-v1", adapter(1)).status_code == 200
        with Traffic(proxy, {"kept-v1": adapter(1)}) as traffic:
            answer = proxy.load("hangs-v2", hanging)
            assert (answer.status_code, answer.headers["X-Proxy-Error"]) == (500, "unfinished")
            assert "its mount hangs" in answer.json()["error"]["message"]
            traffic.wait_more(10)
        wait_until(lambda: proxy.client.get("/health").status_code == 200, what="it is well")
        wait_quiet(proxy, *pair)
        proxy.process.kill()  # SIGTERM waits for the thread that hangs; a second one would not


def test_a_reload_ends_at_its_limit_before_any_replica_is_touched(pair: list[SimulatedReplica], tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "run-v1", seed=1)
    config = checkpoint / "config.json"
    config.unlink()
    os.mkfifo(config)
    with RunningProxy(*(r.url for r in pair), PROXY_RELOAD_TIMEOUT_S="1") as proxy:
        answer = proxy.client.post(RELOAD_PATH, json={"name": "run-v1", "path": str(checkpoint)})
        assert (answer.status_code, answer.headers["X-Proxy-Error"]) == (500, "unfinished")
        assert "its mount hangs" in answer.json()["error"]["message"]
        assert proxy.states() == ["ready", "ready"]
        assert all("POST /collective_rpc" not in replica.state()["calls"] for replica in pair)
        os.close(os.open(config, os.O_RDWR | os.O_NONBLOCK))
        wait_quiet(proxy, *pair)
