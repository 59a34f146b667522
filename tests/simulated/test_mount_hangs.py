"""A mount that never answers: whoever waits for it is told, and everything else goes on."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxy.contract import RELOAD_PATH
from proxy.simulator.checkpoints import write_checkpoint
from tests.simulated.checks import Traffic, together, wait_quiet
from tests.simulated.conftest import Adapters
from tests.support.adapters import unopenable
from tests.support.hanging_mount import WITHOUT_MOUNTS, hanging_mount
from tests.support.proxies import RunningProxy
from tests.support.replicas import SimulatedReplica, wait_until


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[Path]:
    with unopenable(tmp_path / "policy") as directory:
        yield directory


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
        assert proxy.stop() == 0, "the thread that hangs does not hold up its end"


needs_mounts = pytest.mark.skipif(WITHOUT_MOUNTS is not None, reason=WITHOUT_MOUNTS or "")


@needs_mounts
def test_where_roots_are_set_the_first_look_ends_at_its_limit(pair: list[SimulatedReplica], tmp_path: Path) -> None:
    limits = {"PROXY_LORA_LOAD_TIMEOUT_S": "1", "PROXY_CALL_TIMEOUT_S": "1"}  # the latter: of looks at what is adopted
    with (
        hanging_mount(tmp_path / "lora") as lora,
        RunningProxy(*(r.url for r in pair), PROXY_ADAPTER_ROOTS=str(lora), **limits) as proxy,
    ):
        answer = proxy.load("hangs-v1", lora / "policy")
        assert (answer.status_code, answer.headers["X-Proxy-Error"]) == (500, "unfinished")
        assert "its mount hangs" in answer.json()["error"]["message"]
        assert proxy.stop() == 0


@needs_mounts
def test_more_looks_than_the_loop_has_threads_keep_nobody_else_out(
    pair: list[SimulatedReplica], adapter: Adapters, tmp_path: Path
) -> None:
    with (
        hanging_mount(tmp_path / "lora") as lora,
        RunningProxy(*(r.url for r in pair), PROXY_LORA_LOAD_TIMEOUT_S="3") as proxy,
    ):
        threads = min(32, (os.cpu_count() or 1) + 4)  # concurrent.futures.ThreadPoolExecutor's own number
        looks = [lambda n=number: proxy.load(f"hangs-v{n}", lora / "policy") for number in range(threads + 1)]
        answers = together(*looks, lambda: proxy.load("good-v1", adapter(1)))
        assert [answer.headers.get("X-Proxy-Error") for answer in answers] == ["unfinished"] * len(looks) + [None]
        assert proxy.load("good-v2", adapter(2)).status_code == 200
        assert proxy.client.get("/proxy/replicas/metrics").status_code == 200, "merged in a thread of the loop's"
        assert proxy.stop() == 0


def test_an_announcement_waits_for_an_earlier_one_of_its_name_no_longer_than_it_may(
    pair: list[SimulatedReplica], hanging: Path
) -> None:
    with RunningProxy(*(r.url for r in pair), PROXY_LORA_LOAD_TIMEOUT_S="1") as proxy:
        began = time.monotonic()
        answers = together(*[lambda: proxy.load("hangs-v1", hanging)] * 8)
        assert {answer.headers["X-Proxy-Error"] for answer in answers} <= {"unfinished", "under_way"}
        assert time.monotonic() - began < 6, "one after the other they would take eight seconds"


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
