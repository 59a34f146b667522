"""A rollout kills every engine that runs it: two die, not the fleet, and its policy waits until it is whole again.

vLLM reads an adapter that its cache has dropped from disk again, and dies if the directory is gone.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.simulated.checks import Traffic, right_tokens, wait_quiet
from tests.simulated.conftest import Adapters
from tests.support.proxies import RunningProxy
from tests.support.replicas import SimulatedReplica, simulators, wait_until

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def replicas() -> Iterator[list[SimulatedReplica]]:
    with simulators(4, max_loras=3, max_cpu_loras=1) as replicas:
        yield replicas


@pytest.fixture
def proxy(replicas: list[SimulatedReplica], adapter: Adapters, killer: Path) -> Iterator[RunningProxy]:
    """A proxy whose replicas have dropped a policy from their caches, and whose directory is gone."""
    with RunningProxy(*(replica.url for replica in replicas)) as proxy:
        assert proxy.load("killer-v1", killer).status_code == 200
        assert proxy.load("steady-v2", adapter(2)).status_code == 200
        shutil.rmtree(killer)
        yield proxy


@pytest.fixture
def killer(adapter: Adapters, tmp_path: Path) -> Path:
    return Path(shutil.copytree(adapter(1), tmp_path / "killer"))


def _dead(replicas: list[SimulatedReplica]) -> list[SimulatedReplica]:
    return [replica for replica in replicas if not replica.accepts()]


def test_one_rollout(replicas: list[SimulatedReplica], proxy: RunningProxy, adapter: Adapters, killer: Path) -> None:
    with Traffic(proxy, {"steady-v2": adapter(2)}, retries=5) as traffic:
        traffic.wait_more(10)
        answer = proxy.completion("killer-v1")
        assert answer.status_code == 500, answer.text
        assert proxy.policy("killer-v1")["blocked"]
        for _ in range(5):
            again = proxy.completion("killer-v1")
            assert (again.status_code, again.headers["X-Proxy-Error"]) == (503, "blocked"), again.text
            assert again.headers["Retry-After"] == "1"
            assert str(killer) in again.json()["error"]["message"]
        wait_until(lambda: len(_dead(replicas)) == 2, what="two engines are dead")
        traffic.wait_more(20)
        # Replicas that come back need not hold it: nobody vouches for it.
        for replica in _dead(replicas):
            replica.restart()
        proxy.wait_states(*["ready"] * 4)
        traffic.wait_more(20)
        assert proxy.completion("killer-v1").status_code == 503
        shutil.copytree(adapter(1), killer)
        wait_until(lambda: not proxy.policy("killer-v1")["blocked"], what="its files have been seen")
        assert proxy.complete("killer-v1") == right_tokens(adapter(1))
        traffic.serve("killer-v1", killer)
        proxy.wait_states(*["ready"] * 4)
        traffic.wait_more(30)
    assert _dead(replicas) == []
    wait_quiet(proxy, *replicas)


def test_a_group_of_rollouts_at_once(replicas: list[SimulatedReplica], proxy: RunningProxy, adapter: Adapters) -> None:
    with Traffic(proxy, {"steady-v2": adapter(2)}, retries=5) as traffic, ThreadPoolExecutor(16) as pool:
        traffic.wait_more(10)
        # A trainer sends a group of them, and a group goes to one replica; its retries must not go to all others.
        pending = [pool.submit(proxy.completion, "killer-v1") for _ in range(8)]
        statuses = {one.result().status_code for one in pending}
        assert statuses <= {500, 502, 503}, statuses
        traffic.wait_more(20)
    assert len(_dead(replicas)) <= 2
    assert proxy.completion("killer-v1").headers["X-Proxy-Error"] == "blocked"
    wait_quiet(proxy)


def test_it_is_loaded_again(replicas: list[SimulatedReplica], proxy: RunningProxy, adapter: Adapters) -> None:
    assert proxy.completion("killer-v1").status_code == 500
    wait_until(lambda: len(_dead(replicas)) == 2, what="two engines are dead")
    answer = proxy.load("killer-v1", adapter(3))
    assert answer.status_code == 200, answer.text
    assert proxy.complete("killer-v1") == right_tokens(adapter(3))
    assert proxy.complete("steady-v2") == right_tokens(adapter(2))
    assert len(_dead(replicas)) == 2
    wait_quiet(proxy)
