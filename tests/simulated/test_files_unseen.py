"""The proxy cannot see the files: one replica proves them before the others hear of them. And what a load checks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from proxy.contract import LOAD_PATH
from proxy.fleet import names
from proxy.simulator.adapters import write_adapter
from tests.simulated.checks import (
    Traffic,
    assert_held_by_none,
    assert_served_by_all,
    models_of,
    right_tokens,
    upstream_of,
    wait_quiet,
)
from tests.simulated.conftest import Adapters
from tests.support.adapters import write_broken
from tests.support.mounts import MOUNT
from tests.support.proxies import RunningProxy
from tests.support.replicas import SimulatedReplica, wait_until

SMALL = {"max_num_seqs": 4, "max_lora_rank": 8}


@dataclass
class World:
    """Two replicas that share a mount, and an empty directory in which the proxy sees nothing of it."""

    replicas: list[SimulatedReplica]
    mount: Path
    elsewhere: Path

    def proxy(self, **settings: str) -> RunningProxy:
        return RunningProxy(*(replica.url for replica in self.replicas), cwd=self.elsewhere, **settings)

    def asked(self, name: str) -> list[int]:
        """Return how often each replica was asked to load a policy."""
        calls = [replica.state()["control"] for replica in self.replicas]
        loads = [[call["body"] for call in told if call["path"] == LOAD_PATH] for told in calls]
        return [sum(names.decode(json.loads(body)["lora_name"])[0] == name for body in told) for told in loads]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    mount, elsewhere = tmp_path / "mount", tmp_path / "elsewhere"
    mount.mkdir()
    elsewhere.mkdir()
    with ExitStack() as stack:
        replicas = [stack.enter_context(SimulatedReplica(cwd=mount, **SMALL)) for _ in range(2)]
        yield World(replicas, mount, elsewhere)


def _probes(replica: SimulatedReplica) -> int:
    return len(replica.state()["rollouts"])


@pytest.mark.parametrize(("verify", "probes"), [("probe", [1, 1]), ("list", [0, 0]), ("off", [0, 0])])
def test_one_replica_proves_them_before_the_others_are_told(world: World, verify: str, probes: list[int]) -> None:
    directory = write_adapter(world.mount / "unseen", seed=1)
    world.replicas[0].set_faults(late={"attempts": 3})
    with world.proxy(PROXY_VERIFY=verify) as proxy, ThreadPoolExecutor(1) as pool:
        loading = pool.submit(proxy.load, "unseen-v1", MOUNT / "unseen")
        wait_until(lambda: world.asked("unseen-v1")[0] == 2, what="the first is asked again")
        assert world.asked("unseen-v1")[1] == 0
        answer = loading.result()
        assert answer.status_code == 200, answer.text
        assert world.asked("unseen-v1") == [4, 1]
        assert [_probes(replica) for replica in world.replicas] == probes
        with Traffic(proxy, {"unseen-v1": directory}) as traffic:
            traffic.wait_more(20)
        wait_quiet(proxy, *world.replicas)


@pytest.mark.parametrize(("kind", "said"), [("nan", "not numbers"), ("rank_16", "16"), ("dora", "DoRA")])
def test_what_spoils_a_replica_reaches_only_the_first(world: World, kind: str, said: str) -> None:
    good = write_adapter(world.mount / "good", seed=1)
    write_broken(world.mount / "bad", kind)
    with world.proxy() as proxy:
        assert proxy.load("good-v1", MOUNT / "good").status_code == 200
        with Traffic(proxy, {"good-v1": good}) as traffic:
            answer = proxy.load("bad-v2", MOUNT / "bad")
            traffic.wait_more(10)
        assert answer.status_code == 500, answer.text
        assert said in answer.json()["error"]["message"]
        assert [result["status"] for result in answer.json()["replicas"]] == ["failed", "failed"]
        assert world.asked("bad-v2") == [1, 0]
        assert_held_by_none(world.replicas, "bad-v2")
        assert proxy.completion("bad-v2").status_code == 404
        assert proxy.states() == ["ready", "ready"]
        assert models_of(proxy) == ["sim", "good-v1"]


def test_another_one_takes_over_when_the_first_dies(world: World) -> None:
    write_adapter(world.mount / "unseen", seed=1)
    world.replicas[0].set_faults(late={"seconds": 60})
    with world.proxy() as proxy, ThreadPoolExecutor(1) as pool:
        loading = pool.submit(proxy.load, "unseen-v1", MOUNT / "unseen")
        wait_until(lambda: world.asked("unseen-v1")[0] > 0, what="the first is asked")
        world.replicas[0].kill()
        answer = loading.result()
        assert answer.status_code == 200, answer.text
        assert proxy.complete("unseen-v1") == right_tokens(world.mount / "unseen")
        world.replicas[0].restart()
        proxy.wait_states("ready", "ready")
        wait_quiet(proxy, *world.replicas)


def test_a_policy_that_no_replica_lists_is_not_believed(world: World, adapter: Adapters) -> None:
    with world.proxy(PROXY_VERIFY="list") as proxy:
        world.replicas[1].set_faults(load_error={"status": 200, "body": "Success, and forgot it", "name": "liar-v1"})
        answer = proxy.load("liar-v1", adapter(1))
        assert answer.status_code == 500
        assert "did not list it" in answer.json()["error"]["message"]
        assert_held_by_none(world.replicas, "liar-v1")


def test_a_full_replica_does_not_hold_up_a_load(world: World, adapter: Adapters) -> None:
    with world.proxy(PROXY_VERIFY_S="0.3") as proxy, world.replicas[1].in_flight(n=4):
        wait_until(lambda: world.replicas[1].running() == 4, what="it is full")
        answer = proxy.load("prompt-v1", adapter(1))
        assert answer.status_code == 200, answer.text
        assert "the probe has not been answered within 0.3 s" in proxy.log()
        assert world.replicas[1].running() == 4, "still full"


def test_replicas_that_disagree_about_one_policy_are_reported(world: World, adapter: Adapters) -> None:
    with world.proxy() as proxy:
        world.replicas[1].set_faults(wrong_weights="of somebody else")
        assert proxy.load("odd-v1", adapter(1)).status_code == 200
        assert "nats a token on the same prompt" in proxy.log()
        world.replicas[1].clear_faults()
        assert proxy.load("even-v2", adapter(2)).status_code == 200
        assert proxy.log().count("nats a token") == 1
        assert_served_by_all(world.replicas, "even-v2", adapter(2))
        assert upstream_of(world.replicas[0], "even-v2") == upstream_of(world.replicas[1], "even-v2")
