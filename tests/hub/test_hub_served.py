"""From the trainer to three replicas, each with a mount of its own that remembers for 30 s what it did not find."""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from proxy.artifacts.manifest import MANIFEST_FILE
from proxy.contract import LOAD_PATH, LoadReport, ReloadReport
from proxy.simulator.adapters import lora_config, lora_tensors, write_adapter
from proxy.simulator.tokens import checkpoint_weights
from tests.hub.conftest import BUCKET
from tests.hub.hub_process import TOKEN
from tests.hub.mount import WITHOUT_FUSE, BucketMount
from tests.hub.offline_hub import OfflineHub
from tests.simulated.checks import PROMPT, Traffic, held, models_of, right_tokens, wait_quiet
from tests.support.merged import dora, merging_by_seed
from tests.support.mounts import MOUNT
from tests.support.proxies import RunningProxy
from tests.support.replicas import SimulatedReplica, wait_until
from tests.support.stores import put
from trainer_client import Policy, TrainerClient
from trainer_client.stores import open_store

pytestmark = [
    pytest.mark.skipif(WITHOUT_FUSE is not None, reason=str(WITHOUT_FUSE)),
    pytest.mark.timeout(60),  # eight processes to start
]

STORE = f"hf://buckets/{BUCKET}"


@dataclass
class World:
    """Three replicas and the proxy, each with its own mount of the bucket; `mount` is the proxy's, and a TRL's."""

    hub: OfflineHub
    replicas: list[SimulatedReplica]
    proxy: RunningProxy
    mount: Path
    run: str = ""
    """A name for each test: nobody has looked for it before."""
    loads_before: tuple[int, ...] = (0, 0, 0)

    def client(self) -> TrainerClient:
        return TrainerClient(
            self.proxy.url, store=STORE, mount=MOUNT, endpoint=self.hub.url, run=self.run, max_staleness=1
        )

    def loads(self) -> list[int]:
        """Return how often each replica was asked to load anything in this test."""
        now = (replica.state()["calls"].get(f"POST {LOAD_PATH}", 0) for replica in self.replicas)
        return [count - before for count, before in zip(now, self.loads_before, strict=True)]


@pytest.fixture(scope="module")
def lasting_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Mounts, replicas and proxy for the whole module, since there are eight processes. Ask for `world`."""
    root = tmp_path_factory.mktemp("mounts")
    with ExitStack() as stack:
        hub = stack.enter_context(OfflineHub())
        hub.api().create_bucket(BUCKET)
        environment = stack.enter_context(pytest.MonkeyPatch.context())
        environment.setenv("HF_TOKEN", TOKEN)
        replicas = []
        for number in range(3):
            mount = stack.enter_context(BucketMount(hub, BUCKET, root / f"replica-{number}", read_only=True))
            replicas.append(stack.enter_context(SimulatedReplica(cwd=mount, max_loras=3, max_lora_rank=64)))
        mount = stack.enter_context(BucketMount(hub, BUCKET, root / "proxy", flush_debounce_s=0.2))
        urls = (replica.url for replica in replicas)
        settings = {"PROXY_STORAGE": f"{STORE}={MOUNT}", "PROXY_LORA_LOAD_TIMEOUT_S": "10", **hub.environment()}
        proxy = stack.enter_context(RunningProxy(*urls, cwd=mount, **settings))
        yield World(hub, replicas, proxy, mount)


@pytest.fixture
def world(lasting_world: World, request: pytest.FixtureRequest) -> Iterator[World]:
    """Return a world without faults in which nothing is loaded."""
    world = lasting_world
    world.run = f"run-{zlib.crc32(request.node.name.encode()):08x}"
    world.loads_before = (0, 0, 0)
    world.loads_before = tuple(world.loads())
    yield world
    world.hub.set_faults(landing_s=0.0, landing_of={}, refused={})
    for name in models_of(world.proxy)[1:]:
        world.proxy.unload(name)
    wait_until(lambda: all(held(r).keys() == {"sim"} for r in world.replicas), what="the replicas are empty")


def _publish(client: TrainerClient, step: int) -> Policy:
    return client.publish((lora_tensors(rank=4, seed=step), lora_config(rank=4)), step=step)


def _written(root: Path, step: int) -> Path:
    return write_adapter(root / f"step-{step}", seed=step, rank=4)


@pytest.mark.parametrize("landing_s", [0.0, 1.0])
def test_what_is_published_is_served_by_all_at_their_first_look(world: World, tmp_path: Path, landing_s: float) -> None:
    world.hub.set_faults(landing_s=landing_s)
    with world.client() as client:
        published = [_publish(client, step) for step in (1, 2, 3)]
        assert world.loads() == [3, 3, 3], "one look each: none came too early"
        for policy in published:
            assert isinstance(policy.report, LoadReport)
            assert {replica.attempts for replica in policy.report.replicas} == {1}
        for policy in published[1:]:
            assert world.proxy.complete(policy.model) == right_tokens(_written(tmp_path, policy.step))
        assert models_of(world.proxy) == ["sim", *(policy.name for policy in published[1:])]
        wait_quiet(world.proxy, *world.replicas)


def test_a_manifest_that_is_late_on_the_proxys_own_mount_is_no_reason_to_refuse(world: World) -> None:
    world.hub.set_faults(landing_of={f"*/{MANIFEST_FILE}": 3600.0})
    with world.client() as client:
        policy = _publish(client, step=1)
        assert not (world.mount / world.run / policy.name / MANIFEST_FILE).exists()
        assert world.loads() == [1, 1, 1]


def test_a_proxy_that_has_looked_too_early_lets_the_hub_decide(world: World, tmp_path: Path) -> None:
    # its own mount remembers for 30 s that there was no folder of the run, and no replica's does
    assert not (world.mount / world.run).exists()
    with world.client() as client:
        policy = _publish(client, step=1)
        assert world.loads() == [1, 1, 1]
        assert world.proxy.complete(policy.model) == right_tokens(_written(tmp_path, 1))


def test_what_the_manifest_says_otherwise_is_refused_all_the_same(world: World) -> None:
    store = open_store(STORE, run=world.run, mount=MOUNT, endpoint=world.hub.url)
    manifest = put(store, version=1)
    announced = {**manifest.announcement().model_dump(), "step": 7}
    answer = world.proxy.load(manifest.name, store.path_of(manifest.name), policy=announced)
    assert (answer.status_code, answer.headers["X-Proxy-Error"]) == (409, "manifest"), answer.text
    assert "step 7 was announced, its manifest has 1" in answer.json()["error"]["message"]
    assert world.loads() == [0, 0, 0]


def test_a_trl_that_writes_through_the_mount_is_served_at_the_replicas_first_look(world: World, tmp_path: Path) -> None:
    world.hub.set_faults(landing_s=1.0)
    served = {}
    with ExitStack() as stack:
        for version in (1, 2, 3):
            name, adapter = f"{world.run}-v{version}", _written(tmp_path, version)
            # as TRL does: written beside, renamed, announced at once
            shutil.copytree(adapter, world.mount / f".{name}", copy_function=shutil.copyfile)
            (world.mount / f".{name}").rename(world.mount / name)
            answer = world.proxy.load(name, MOUNT / name)
            assert answer.status_code == 200, answer.text
            assert world.proxy.policy(name)["phases"]["gate"] > 1
            served[name] = adapter
            if version == 1:
                traffic = stack.enter_context(Traffic(world.proxy, dict(served)))
            traffic.serve(name, adapter)
            traffic.wait_more(10)
        assert world.loads() == [3, 3, 3]
    wait_quiet(world.proxy, *world.replicas)


def test_weights_that_never_land_are_a_clear_error_and_nothing_is_live(world: World, tmp_path: Path) -> None:
    world.hub.set_faults(refused={"*.safetensors": None})
    name = f"{world.run}-v1"
    shutil.copytree(_written(tmp_path, 1), world.mount / name, copy_function=shutil.copyfile)
    answer = world.proxy.load(name, MOUNT / name)
    assert answer.status_code == 500, answer.text
    assert "adapter_model.safetensors is not there" in answer.json()["error"]["message"]
    assert world.loads() == [0, 0, 0]
    assert models_of(world.proxy) == ["sim"]


def test_merged_weights_go_the_same_way_and_the_newest_stay(world: World) -> None:
    world.hub.set_faults(landing_s=0.5)
    with world.client() as client, merging_by_seed():
        for seed in (1, 2):
            policy = client.publish(dora(seed), step=seed, on_unservable="merge")
            assert isinstance(policy.report, ReloadReport)
            assert ([one.status for one in policy.report.replicas], policy.report.warnings) == (
                ["reloaded"] * 3,
                ("the proxy cannot see the base model, so that nobody has compared it",) * (seed == 1),
            )
            seen = world.mount / world.run / policy.name
            expected = right_tokens(checkpoint_weights(seen))
            assert [replica.complete(prompt=PROMPT) for replica in world.replicas] == [expected] * 3
            assert world.proxy.complete(policy.model) == expected
        listed = world.hub.api().list_bucket_tree(BUCKET, f"{world.run}/", recursive=True)
        assert {entry.path.split("/")[1] for entry in listed} == {policy.name}
