"""PROXY_STORAGE: no replica is asked for a policy before the Hub lists its files whole. Without any mount: replicas see
the files at once, so that whoever asked them too early would be served."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest
from huggingface_hub import HfApi

from proxy.artifacts.digest import WEIGHTS_FILE
from proxy.artifacts.manifest import MANIFEST_FILE
from proxy.contract import LOAD_PATH
from proxy.simulator.adapters import write_adapter
from tests.hub.conftest import BUCKET
from tests.hub.faults import Answer
from tests.hub.hub_process import TOKEN
from tests.hub.offline_hub import OfflineHub
from tests.simulated.checks import assert_held_by_none, models_of, right_tokens, wait_quiet
from tests.support.mounts import MOUNT
from tests.support.proxies import RunningProxy
from tests.support.replicas import SimulatedReplica, wait_until
from tests.support.stores import put
from trainer_client import TrainerClient
from trainer_client.stores import open_store


@dataclass
class World:
    """Two replicas and the Hub. `lora` is where they see what the bucket's folder `lora` will hold."""

    hub: OfflineHub
    api: HfApi
    replicas: list[SimulatedReplica]
    lora: Path
    asked_before: int = 0
    """Loads that the replicas were asked for by earlier tests."""

    def proxy(self, *, cwd: Path | None = None, mount: Path | None = None, **settings: str) -> RunningProxy:
        storage = f"hf://buckets/{BUCKET}/lora={mount or self.lora}"
        environment = {"PROXY_STORAGE": storage, **self.hub.environment(), **settings}
        return RunningProxy(*(replica.url for replica in self.replicas), cwd=cwd, **environment)

    def upload(self, directory: Path, *, without: tuple[str, ...] = ()) -> None:
        """Put what is in a directory below `lora` into the bucket."""
        files = [path for path in directory.iterdir() if path.name not in without]
        to = directory.relative_to(self.lora)
        self.api.batch_bucket_files(BUCKET, add=[(path, f"lora/{to}/{path.name}") for path in files])

    def asked(self) -> int:
        """Return how often a replica was asked to load anything."""
        asked: int = sum(replica.state()["calls"].get(f"POST {LOAD_PATH}", 0) for replica in self.replicas)
        return asked - self.asked_before

    def heads(self) -> int:
        """Return how often the Hub was asked for a file."""
        return sum(call.startswith("HEAD") for call in self.hub.calls)


@pytest.fixture(scope="module")
def replicas() -> Iterator[list[SimulatedReplica]]:
    with SimulatedReplica(max_loras=64, max_cpu_loras=128) as one, SimulatedReplica(max_loras=64) as two:
        yield [one, two]


@pytest.fixture
def world(hub: OfflineHub, api: HfApi, replicas: list[SimulatedReplica], tmp_path: Path) -> Iterator[World]:
    (tmp_path / "lora").mkdir()
    world = World(hub, api, replicas, tmp_path / "lora")
    world.asked_before = world.asked()
    yield world
    for replica in replicas:
        for name in list(replica.models())[1:]:
            replica.unload(name)


def _not_landed(answer: httpx2.Response) -> str:
    assert (answer.status_code, answer.headers["X-Proxy-Error"]) == (500, "not_landed"), answer.text
    message: str = answer.json()["error"]["message"]
    assert TOKEN not in answer.text
    return message


def test_nobody_is_asked_before_the_hub_lists_every_file(world: World) -> None:
    directory = write_adapter(world.lora / "trl-policy-v1", seed=1)
    with world.proxy() as proxy, ThreadPoolExecutor(1) as pool:
        loading = pool.submit(proxy.load, "trl-policy-v1", directory)
        world.upload(directory, without=(WEIGHTS_FILE,))
        asked = world.heads()
        wait_until(lambda: world.heads() > asked + 5, what="the weights are asked for")
        assert world.asked() == 0
        world.upload(directory)
        answer = loading.result()
        assert answer.status_code == 200, answer.text
        assert world.asked() == 2
        assert proxy.policy("trl-policy-v1")["phases"]["gate"] > 0
        assert proxy.complete("trl-policy-v1") == right_tokens(directory)
        wait_quiet(proxy, *world.replicas)


def test_what_a_run_before_has_left_at_the_path_is_not_taken_for_the_new_one(world: World) -> None:
    directory = write_adapter(world.lora / "trl-policy-v1", seed=1)
    world.upload(directory)
    shutil.rmtree(directory)
    write_adapter(directory, seed=2)
    with world.proxy() as proxy, ThreadPoolExecutor(1) as pool:
        loading = pool.submit(proxy.load, "trl-policy-v1", directory)
        wait_until(lambda: world.heads() > 5, what="the Hub is asked again and again")
        assert world.asked() == 0
        world.upload(directory)
        assert loading.result().status_code == 200
        assert proxy.complete("trl-policy-v1") == right_tokens(directory)


def test_too_late_is_a_clear_error_and_nothing_is_live(world: World) -> None:
    directory = write_adapter(world.lora / "trl-policy-v1", seed=1)
    with world.proxy(PROXY_LORA_LOAD_TIMEOUT_S="1") as proxy:
        world.upload(directory, without=(WEIGHTS_FILE,))
        message = _not_landed(proxy.load("trl-policy-v1", directory))
        assert f"the Hub does not list the files in hf://buckets/{BUCKET}/lora/trl-policy-v1 whole" in message
        assert f"{WEIGHTS_FILE} is not there" in message
        assert "adapter_config.json" not in message
        assert world.asked() == 0
        assert models_of(proxy) == ["sim"]
        assert_held_by_none(world.replicas, "trl-policy-v1")
        world.upload(directory)
        assert proxy.load("trl-policy-v1", directory).status_code == 200


def test_a_bucket_that_is_not_there_is_told_at_once(world: World) -> None:
    directory = write_adapter(world.lora / "trl-policy-v1", seed=1)
    with world.proxy(PROXY_STORAGE=f"hf://buckets/tester/none={world.lora}") as proxy:
        assert "hf buckets create tester/none" in _not_landed(proxy.load("trl-policy-v1", directory))
        assert world.asked() == 0


def test_the_hub_gets_the_token_that_the_replicas_get(world: World, tmp_path: Path) -> None:
    directory = write_adapter(world.lora / "trl-policy-v1", seed=1)
    world.upload(directory)
    (tmp_path / "token").write_text(TOKEN)
    with world.proxy(HF_TOKEN="", PROXY_TOKEN_FILE=str(tmp_path / "token")) as proxy:
        assert proxy.load("trl-policy-v1", directory).status_code == 200
        (tmp_path / "token").write_text("hf_wrong")
        message = _not_landed(proxy.load("trl-policy-v2", write_adapter(world.lora / "trl-policy-v2", seed=2)))
        assert "the token has no access to it (HTTP 401)" in message
        assert "hf_wrong" not in message + proxy.log()


def test_the_hubs_troubles_and_limits_only_delay(world: World) -> None:
    directory = write_adapter(world.lora / "trl-policy-v1", seed=1)
    world.upload(directory)
    with world.proxy() as proxy:
        world.hub.set_faults(
            answers=[
                Answer(503, "GET */tree/*", times=2),
                Answer(429, "GET */tree/*", times=1, retry_after_s=2),
            ]
        )
        assert proxy.load("trl-policy-v1", directory).status_code == 200
        assert proxy.policy("trl-policy-v1")["phases"]["gate"] >= 2
        assert sum("/tree/" in call for call in world.hub.calls) == 4


def test_listings_that_are_stale_hold_it_as_long(world: World) -> None:
    directory = write_adapter(world.lora / "trl-policy-v1", seed=1)
    with world.proxy() as proxy:
        world.hub.set_faults(stale_listing_s=1.0)
        world.upload(directory)
        assert proxy.load("trl-policy-v1", directory).status_code == 200
        assert proxy.policy("trl-policy-v1")["phases"]["gate"] > 0.7


def test_a_proxy_that_sees_no_files_waits_for_those_of_an_adapter(world: World, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    directory = write_adapter(world.lora / "trl-policy-v1", seed=1)
    with SimulatedReplica(cwd=world.lora, max_loras=4) as replica, ThreadPoolExecutor(1) as pool:
        world.replicas = [replica]
        with world.proxy(cwd=elsewhere, mount=MOUNT) as proxy:
            loading = pool.submit(proxy.load, "trl-policy-v1", MOUNT / "trl-policy-v1")
            world.upload(directory, without=(WEIGHTS_FILE,))
            asked = world.heads()
            wait_until(lambda: world.heads() > asked + 3, what="the weights are asked for")
            assert f"POST {LOAD_PATH}" not in replica.state()["calls"]
            world.upload(directory)
            assert loading.result().status_code == 200
            assert proxy.complete("trl-policy-v1") == right_tokens(directory)


def test_a_managed_policy_written_through_the_mount_is_held_too(world: World) -> None:
    adapter = write_adapter(world.lora.parent / "adapter", seed=1)
    with (
        world.proxy() as proxy,
        TrainerClient(proxy.url, store=world.lora, run="run", max_staleness=1) as client,
    ):
        future = client.publish(adapter, step=1, wait=False)
        wait_until(lambda: world.heads() > 5, what="the Hub is asked")
        assert world.asked() == 0
        (written,) = (world.lora / "run").glob("run-v1-*")
        world.upload(written, without=(MANIFEST_FILE,))
        asked = world.heads()
        wait_until(lambda: world.heads() > asked + 3, what="the manifest is asked for")
        assert world.asked() == 0
        world.upload(written)
        policy = future.result(10)
        assert policy.report.phases["gate"] > 0
        assert proxy.complete(policy.model) == right_tokens(adapter)


def test_what_is_live_is_answered_without_the_hub(world: World, hub_of_this_process: OfflineHub) -> None:
    store = open_store(f"hf://buckets/{BUCKET}/lora", run="run", mount=world.lora)
    manifest = put(store, version=1)
    path = write_adapter(store.path_of(manifest.name), seed=1)
    announced = {"policy": manifest.announcement().model_dump()}
    with world.proxy() as proxy:
        assert proxy.load(manifest.name, path, **announced).json()["status"] == "live"
        world.hub.set_faults(answers=[Answer(503)])
        again = proxy.load(manifest.name, path, **announced)
        assert (again.status_code, again.json()["replicas"]) == (200, [])
        assert world.asked() == 2


def test_a_client_that_leaves_meanwhile_leaves_nothing(world: World) -> None:
    directory = write_adapter(world.lora / "trl-policy-v1", seed=1)
    with world.proxy() as proxy:
        with pytest.raises(httpx2.ReadTimeout):
            proxy.client.post(LOAD_PATH, json={"lora_name": "trl-policy-v1", "lora_path": str(directory)}, timeout=0.5)
        world.upload(directory)
        assert world.asked() == 0
        assert proxy.load("trl-policy-v1", directory).status_code == 200
        assert world.asked() == 2


def test_what_lies_elsewhere_is_loaded_at_once(world: World, tmp_path: Path) -> None:
    directory = write_adapter(tmp_path / "lora-elsewhere", seed=1)
    with world.proxy() as proxy:
        assert proxy.load("trl-policy-v1", directory).status_code == 200
        assert not any("/tree/" in call for call in world.hub.calls)
