"""What can go wrong in a sync, on two real vLLM replicas that each have a mount of their own."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

from proxy.contract import LOAD_PATH
from proxy.fleet import names
from proxy.simulator.adapters import write_adapter
from tests.support.adapters import write_broken
from tests.support.mounts import MOUNT
from tests.support.proxies import RunningProxy
from tests.support.replicas import VllmReplica, wait_until
from tests.vllm.traffic import PATIENCE_S, VllmTraffic, ask, assert_sampled_by_their_policies

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

SLOTS = 6

Write = Callable[..., Path]


@dataclass
class World:
    """Two replicas, the mount of each, and a directory in which the proxy sees nothing of either."""

    replicas: list[VllmReplica]
    mounts: list[Path]
    elsewhere: Path

    def proxy(self, **settings: str) -> RunningProxy:
        return RunningProxy(*(replica.url for replica in self.replicas), cwd=self.elsewhere, **settings)

    def assert_serve(self, name: str, directory: Path) -> None:
        """Ask every replica itself, and hold its answer against the weights in `directory`."""
        for replica in self.replicas:
            upstream = next(known for known in replica.models() if names.decode(known)[0] == name)
            rollouts = [ask(replica.client, upstream, directory, seed=seed) for seed in range(3)]
            assert_sampled_by_their_policies(rollouts, write_adapter(self.elsewhere / "another", seed=99))

    def held(self) -> list[set[str]]:
        """Return what each replica holds, by the names that clients use."""
        return [{names.decode(known)[0] for known in list(replica.models())[1:]} for replica in self.replicas]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Start both together."""
    mounts = [tmp_path_factory.mktemp(f"mount-{index}") for index in range(2)]
    pair = [VllmReplica(max_loras=SLOTS, max_cpu_loras=2 * SLOTS, cwd=mount) for mount in mounts]
    with ExitStack() as stack:
        for replica in pair:
            stack.callback(replica.stop)
        with ThreadPoolExecutor() as threads:
            list(threads.map(VllmReplica.start, pair))
        yield World(pair, mounts, tmp_path_factory.mktemp("elsewhere"))


@pytest.fixture
def world(started: World) -> Iterator[World]:
    """The replicas, which hold nothing, run nothing and are not paused when a test begins."""
    yield started
    for replica in started.replicas:
        replica.client.post("/abort_requests", json={}).raise_for_status()
        replica.client.post("/resume").raise_for_status()
        for name in list(replica.models())[1:]:
            replica.unload(name)


def _loads(replica: VllmReplica) -> int:
    return replica.log.read_text(errors="replace").count(f"POST {LOAD_PATH}")


def _wait(condition: Callable[[], bool], what: str) -> None:
    wait_until(condition, limit_s=PATIENCE_S, what=what)


def _wait_quiet(proxy: RunningProxy) -> None:
    _wait(lambda: proxy.inflight() == 0, "nothing is in flight")


def test_late_on_one_of_two(world: World) -> None:
    good = write_adapter(world.mounts[0] / "late", seed=1)
    with world.proxy() as proxy, ThreadPoolExecutor(1) as pool:
        loading = pool.submit(proxy.load, "late-v1", MOUNT / "late")
        _wait(lambda: "No adapter found" in proxy.log(), "the second does not see it yet")
        assert world.held() == [{"late-v1"}, set()]
        assert "late-v1" not in [entry["id"] for entry in proxy.client.get("/v1/models").json()["data"]]
        shutil.copytree(good, world.mounts[1] / "late")
        assert loading.result().status_code == 200
        world.assert_serve("late-v1", good)
        with VllmTraffic(proxy, {"late-v1": good}) as traffic:
            traffic.wait_more(10)
        _wait_quiet(proxy)


@pytest.mark.parametrize(
    "kind", ["no_weights", "truncated", "half_header", "empty_weights", "bad_config", "empty_config", "no_config"]
)
def test_torn_on_one_of_two(world: World, kind: str) -> None:
    good = write_adapter(world.mounts[0] / f"torn-{kind}", seed=1)
    torn = write_broken(world.mounts[1] / f"torn-{kind}", kind, seed=1)
    with world.proxy() as proxy, ThreadPoolExecutor(1) as pool:
        loading = pool.submit(proxy.load, "torn-v1", MOUNT / f"torn-{kind}")
        _wait(lambda: len(proxy.replicas()) == 2 and _outcome(proxy, 1) in ("late", "torn"), "the second sees half")
        assert _outcome(proxy, 1) == ("late" if kind == "no_config" else "torn")
        for file in good.iterdir():  # whole, one file after the other
            shutil.copy(file, torn / f".{file.name}")
            (torn / f".{file.name}").rename(torn / file.name)
        answer = loading.result()
        assert answer.status_code == 200, answer.text
        world.assert_serve("torn-v1", good)
        _wait_quiet(proxy)


def _outcome(proxy: RunningProxy, index: int) -> str:
    """Return what a replica has answered to the load of the one policy under way."""
    return next((str(missing["outcome"]) for missing in proxy.replicas()[index]["missing"].values()), "")


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("nan", "NaN or infinite"),
        ("missing_b", "no lora_B"),
        ("rank_in_weights_16", "its rank asks for"),
        ("rank_16", "rank 16 is above 8"),
        ("dora", "DoRA"),
    ],
)
def test_what_the_proxy_sees_to_be_unservable_reaches_no_replica(
    world: World, tmp_path: Path, kind: str, said: str
) -> None:
    with world.proxy() as proxy:
        before = [_loads(replica) for replica in world.replicas]
        answer = proxy.load("bad-v1", write_broken(tmp_path / "bad", kind))
        assert answer.status_code == 400
        assert said in answer.json()["error"]["message"]
        assert [_loads(replica) for replica in world.replicas] == before
        assert world.held() == [set(), set()]


@pytest.mark.parametrize("kind", ["nan", "foreign_module", "missing_b", "rank_16", "dora"])
def test_what_only_replicas_see_to_be_unservable_reaches_one_of_them(world: World, tmp_path: Path, kind: str) -> None:
    steady = write_adapter(tmp_path / "steady", seed=1)
    for mount in world.mounts:
        write_broken(mount / f"bad-{kind}", kind)
    with world.proxy() as proxy:
        assert proxy.load("steady-v1", steady).status_code == 200
        before = _loads(world.replicas[1])
        with VllmTraffic(proxy, {"steady-v1": steady}, threads=2) as traffic:
            traffic.wait_more(4)
            answer = proxy.load("bad-v2", MOUNT / f"bad-{kind}")
            assert answer.status_code == 500, answer.text
            traffic.wait_more(4)
        assert _loads(world.replicas[1]) == before, "the second has not been told"
        assert world.held() == [{"steady-v1"}] * 2
        assert proxy.completion("bad-v2").status_code == 404
        _wait_quiet(proxy)


def test_a_final_failure_on_one_is_taken_back_from_the_other(world: World, tmp_path: Path) -> None:
    steady = write_adapter(tmp_path / "steady", seed=1)
    write_adapter(world.mounts[0] / "half-good", seed=2)
    write_broken(world.mounts[1] / "half-good", "dora")
    with world.proxy() as proxy:
        assert proxy.load("steady-v1", steady).status_code == 200
        with VllmTraffic(proxy, {"steady-v1": steady}) as traffic:
            traffic.wait_more(4)
            answer = proxy.load("half-v2", MOUNT / "half-good")
            assert answer.status_code == 500, answer.text
            assert "DoRA" in answer.json()["error"]["message"]
            told = {result["replica"]: result["status"] for result in answer.json()["replicas"]}
            assert told == {world.replicas[0].url: "rolled_back", world.replicas[1].url: "failed"}
            assert world.held() == [{"steady-v1"}] * 2
            traffic.wait_more(4)
        assert proxy.states() == ["ready", "ready"]
        _wait_quiet(proxy)


def _sync(proxy: RunningProxy, name: str, path: Path) -> None:
    """Sync as TRL does."""
    assert proxy.client.post("/pause?mode=keep").status_code == 200
    assert proxy.load(name, path, load_inplace=False).status_code == 200
    assert proxy.client.post("/resume").status_code == 200


def test_found_paused_then_a_run(world: World, tmp_path: Path) -> None:
    for replica in world.replicas:  # as a run leaves them that dies in the middle of a sync
        replica.client.post("/pause?mode=keep").raise_for_status()
    adapters = {
        f"trl-policy-v{version}": write_adapter(tmp_path / f"v{version}", seed=version) for version in (1, 2, 3)
    }
    with world.proxy() as proxy:
        assert proxy.client.get("/is_paused").json() == {"is_paused": True}
        assert proxy.client.get("/health").status_code == 200
        info = proxy.client.get("/server_info?config_format=json").json()["vllm_config"]
        assert info["lora_config"]["max_loras"] == SLOTS
        assert info["parallel_config"]["data_parallel_size"] == 1
        assert proxy.client.get("/v1/models").json()["data"][0]["max_model_len"] > 0
        rollouts = []
        for name, directory in adapters.items():
            _sync(proxy, name, directory)
            rollouts += [ask(proxy.client, name, directory, seed=seed) for seed in range(6)]
        assert proxy.client.get("/is_paused").json() == {"is_paused": False}
        assert_sampled_by_their_policies(rollouts)
        assert {rollout.replica for rollout in rollouts} == {"0", "1"}
        _wait_quiet(proxy)


def test_the_same_name_with_other_bytes_at_the_same_path(world: World, tmp_path: Path) -> None:
    kept = [write_adapter(tmp_path / f"kept-{seed}", seed=seed) for seed in (1, 2, 3)]
    path = tmp_path / "trl-policy-v41"
    rollouts = []
    with world.proxy() as proxy:
        for directory in kept:
            path.mkdir(exist_ok=True)
            for file in directory.iterdir():
                shutil.copy(file, path / f".{file.name}")
                (path / f".{file.name}").rename(path / file.name)
            _sync(proxy, "trl-policy-v41", path)
            # The same prompts every time: what is left of them in a prefix cache must not be used.
            for _ in range(2):
                rollouts += [ask(proxy.client, "trl-policy-v41", directory, seed=seed) for seed in range(6)]
        _wait(lambda: world.held() == [{"trl-policy-v41"}] * 2, "one generation is left")
        _wait(lambda: all(len(replica.models()) == 2 for replica in world.replicas), "one generation is left")
        _wait_quiet(proxy)
    assert_sampled_by_their_policies(rollouts)


def test_added_in_the_middle_of_a_run_and_removed_again(world: World, tmp_path: Path) -> None:
    adapters = {f"run-v{version}": write_adapter(tmp_path / f"v{version}", seed=version) for version in (1, 2)}
    url = world.replicas[1].url
    with RunningProxy(world.replicas[0].url, cwd=world.elsewhere) as proxy:
        for name, directory in adapters.items():
            assert proxy.load(name, directory).status_code == 200
        with VllmTraffic(proxy, adapters) as traffic:
            traffic.wait_more(6)
            answer = proxy.client.post("/proxy/replicas", json={"url": url}, timeout=PATIENCE_S)
            assert (answer.status_code, answer.json()["state"]) == (200, "ready")
            assert world.held() == [set(adapters)] * 2
            _wait(lambda: traffic.by_replica["1"] > 3, "it is used")
            answer = proxy.client.request("DELETE", "/proxy/replicas", json={"url": url}, timeout=PATIENCE_S)
            assert answer.status_code == 200
            traffic.wait_more(6)
        assert len(proxy.replicas()) == 1
        _wait_quiet(proxy)


def test_an_unload_waits_for_a_long_rollout(world: World, tmp_path: Path) -> None:
    old, new = (write_adapter(tmp_path / f"v{version}", seed=version) for version in (1, 2))
    # Sixteen sequences run at once, and their KV fits: on the CPU, vLLM 0.32 dies when it resumes a preempted one that
    # has a seed ("CPU Generator does not use offset").
    body: dict[str, Any] = {"max_tokens": 900, "n": 64, "temperature": 1, "ignore_eos": True}
    with world.proxy() as proxy, ThreadPoolExecutor(1) as pool:
        assert proxy.load("run-v1", old).status_code == 200
        client = httpx2.Client(base_url=proxy.url, timeout=300, trust_env=False)
        began = time.monotonic()
        long = pool.submit(client.post, "/v1/completions", json={"model": "run-v1", "prompt": [100, 200], **body})
        _wait(lambda: proxy.inflight() == 1, "it is in flight")
        assert proxy.unload("run-v1").status_code == 200
        assert proxy.policy("run-v1")["state"] == "retiring"
        # The next policy comes and serves meanwhile, and the old one stays where its rollout needs it.
        _sync(proxy, "run-v2", new)
        assert_sampled_by_their_policies([ask(proxy.client, "run-v2", new, seed=seed) for seed in range(4)])
        assert world.held() == [{"run-v1", "run-v2"}] * 2
        assert not long.done()
        answer = long.result()
        print(f"a rollout of {time.monotonic() - began:.0f} s")
        client.close()
        assert answer.status_code == 200, answer.text[:500]
        choices = answer.json()["choices"]
        assert [choice["finish_reason"] for choice in choices] == ["length"] * 64
        _wait(lambda: world.held() == [{"run-v2"}] * 2, "the old one is unloaded")
        assert proxy.policy("run-v1")["files_deletable"]
        _wait_quiet(proxy)


def test_restarted_empty_in_the_middle_of_a_run(world: World, tmp_path: Path) -> None:
    adapters = {f"run-v{version}": write_adapter(tmp_path / f"v{version}", seed=version) for version in (1, 2)}
    with world.proxy() as proxy:
        for name, directory in adapters.items():
            assert proxy.load(name, directory).status_code == 200
        with VllmTraffic(proxy, adapters) as traffic:
            traffic.wait_more(6)
            world.replicas[1].kill_engine()
            with suppress(httpx2.TransportError):
                world.replicas[1].stop()
            wait_until(lambda: proxy.states() == ["ready", "down"], limit_s=PATIENCE_S, what="it is out")
            adapters["run-v3"] = write_adapter(tmp_path / "v3", seed=3)
            assert proxy.load("run-v3", adapters["run-v3"]).status_code == 200
            traffic.adapters["run-v3"] = adapters["run-v3"]
            world.replicas[1].start()
            wait_until(lambda: proxy.states() == ["ready", "ready"], limit_s=PATIENCE_S, what="it is back")
            assert world.held() == [set(adapters)] * 2
            routed = proxy.replicas()[1]["routed"]
            _wait(lambda: proxy.replicas()[1]["routed"] > routed + 4, "it is used again")
        for name, directory in adapters.items():
            world.assert_serve(name, directory)
        _wait_quiet(proxy)
