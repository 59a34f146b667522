"""A managed policy has a client's own name beside its own: it means the policy from the commit until it is given up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from proxy.artifacts.check import inspect_directory
from proxy.artifacts.manifest import Manifest, write_manifest
from proxy.simulator.adapters import write_adapter
from tests.simulated.checks import held, right_tokens, wait_quiet
from tests.simulated.conftest import Adapters
from tests.support.proxies import RunningProxy
from tests.support.replicas import SimulatedReplica, simulators, wait_until
from tests.support.stores import manifest_of

ALIAS = "trl-policy-v7"

Publish = Callable[[int], Manifest]


@pytest.fixture
def replicas() -> Iterator[list[SimulatedReplica]]:
    with simulators(2) as replicas:
        yield replicas


@pytest.fixture
def proxy(replicas: list[SimulatedReplica]) -> Iterator[RunningProxy]:
    with RunningProxy(*(replica.url for replica in replicas)) as proxy:
        yield proxy


@pytest.fixture
def publish(tmp_path: Path) -> Publish:
    """Return a function that publishes the adapter of a seed as the version with that number."""

    def of_seed(seed: int) -> Manifest:
        directory = write_adapter(tmp_path / f"v{seed}", seed=seed)
        manifest = manifest_of(inspect_directory(directory), run="math", version=seed)
        write_manifest(directory, manifest)
        return manifest

    return of_seed


def with_alias(manifest: Manifest, directory: Path, alias: str = ALIAS) -> Manifest:
    """Publish it again with an alias in its manifest, as TrainerClient does."""
    manifest = manifest.model_copy(update={"alias": alias})
    write_manifest(directory, manifest)
    return manifest


def announce(proxy: RunningProxy, manifest: Manifest, directory: Path, *, alias: str = ALIAS) -> httpx2.Response:
    policy = {**_wire(manifest), "alias": alias}
    return proxy.load(manifest.name, directory, policy=policy)


def test_it_routes_and_is_given_up_with_its_unload(
    replicas: list[SimulatedReplica], proxy: RunningProxy, publish: Publish, tmp_path: Path
) -> None:
    first = publish(1)
    answer = announce(proxy, first, tmp_path / "v1")
    assert answer.status_code == 200, answer.text
    asked = proxy.completion(ALIAS)
    assert asked.json()["choices"][0]["token_ids"] == right_tokens(tmp_path / "v1")
    assert asked.json()["model"] == ALIAS, "the client is answered by the name that it used"
    assert proxy.complete(first.name) == right_tokens(tmp_path / "v1")
    assert proxy.policy(ALIAS)["name"] == first.name
    assert proxy.unload(ALIAS).status_code == 200
    refused = proxy.completion(ALIAS)
    assert (refused.status_code, refused.headers["X-Proxy-Error"]) == (404, "unknown_policy")
    # The policy has an owner of its own, who has not unloaded it.
    assert proxy.complete(first.name) == right_tokens(tmp_path / "v1")
    assert all(first.name in held(replica) for replica in replicas)
    assert proxy.unload(ALIAS).status_code == 404
    wait_quiet(proxy, *replicas)


def test_it_moves_on_to_the_next_policy_that_has_it(
    replicas: list[SimulatedReplica], proxy: RunningProxy, publish: Publish, tmp_path: Path
) -> None:
    first, second = publish(1), publish(2)
    assert announce(proxy, first, tmp_path / "v1").status_code == 200
    replicas[1].set_faults(late={"seconds": 60})
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(announce, proxy, second, tmp_path / "v2")
        wait_until(lambda: second.name in held(replicas[0]), what="half of the fleet holds the second")
        assert proxy.complete(ALIAS) == right_tokens(tmp_path / "v1"), "it means the first until the commit"
        replicas[1].clear_faults()
        assert loading.result().status_code == 200
    assert proxy.complete(ALIAS) == right_tokens(tmp_path / "v2")
    assert proxy.complete(first.name) == right_tokens(tmp_path / "v1")
    assert proxy.unload(first.name).status_code == 200
    assert proxy.complete(ALIAS) == right_tokens(tmp_path / "v2")
    assert proxy.unload(second.name).status_code == 200
    wait_until(lambda: proxy.completion(ALIAS).status_code == 404, what="it has gone with its policy")
    wait_quiet(proxy, *replicas)


def test_announced_as_a_policy_of_its_own_it_leaves_the_other_alone(
    replicas: list[SimulatedReplica], proxy: RunningProxy, publish: Publish, tmp_path: Path, adapter: Adapters
) -> None:
    first = publish(1)
    assert announce(proxy, first, tmp_path / "v1").status_code == 200
    assert proxy.load(ALIAS, adapter(5)).status_code == 200
    assert proxy.complete(ALIAS) == right_tokens(adapter(5))
    assert proxy.complete(first.name) == right_tokens(tmp_path / "v1")
    assert proxy.policy(first.name)["state"] == "live"
    assert proxy.unload(ALIAS).status_code == 200
    assert proxy.complete(first.name) == right_tokens(tmp_path / "v1")
    wait_until(lambda: all(ALIAS not in held(replica) for replica in replicas), what="its own policy is unloaded")
    wait_quiet(proxy, *replicas)


@pytest.mark.parametrize("alias", ["sim", "with~tilde"])
def test_what_cannot_be_one(proxy: RunningProxy, publish: Publish, tmp_path: Path, alias: str) -> None:
    answer = announce(proxy, publish(1), tmp_path / "v1", alias=alias)
    assert answer.status_code == 400
    assert alias in answer.json()["error"]["message"]


def test_a_live_policy_that_is_announced_again_has_the_new_one_as_well(
    replicas: list[SimulatedReplica], proxy: RunningProxy, publish: Publish, tmp_path: Path
) -> None:
    first, second = publish(1), publish(2)
    for manifest in (first, second):
        assert announce(proxy, manifest, tmp_path / f"v{manifest.version}").status_code == 200
    assert announce(proxy, first, tmp_path / "v1", alias="another").status_code == 200
    assert proxy.complete("another") == right_tokens(tmp_path / "v1")
    assert proxy.complete(ALIAS) == right_tokens(tmp_path / "v2")
    assert announce(proxy, second, tmp_path / "v2", alias="a third").status_code == 200
    for alias in (ALIAS, "a third"):
        assert proxy.complete(alias) == right_tokens(tmp_path / "v2")
        assert proxy.unload(alias).status_code == 200
    assert proxy.complete(second.name) == right_tokens(tmp_path / "v2"), "an alias that is given up retires nobody"
    wait_quiet(proxy, *replicas)


def test_a_restarted_proxy_knows_them_from_the_manifests(
    replicas: list[SimulatedReplica], proxy: RunningProxy, publish: Publish, tmp_path: Path
) -> None:
    """Version 1 and 3 had the same alias: a training went on from a checkpoint, and counts again."""
    published = [with_alias(publish(seed), tmp_path / f"v{seed}", f"trl-policy-v{seed % 2}") for seed in (1, 2, 3)]
    for seed, manifest in enumerate(published, start=1):
        assert manifest.announcement().alias == manifest.alias
        assert proxy.load(manifest.name, tmp_path / f"v{seed}", policy=_wire(manifest)).status_code == 200
    proxy.stop()
    proxy.start()
    assert proxy.complete("trl-policy-v1") == right_tokens(tmp_path / "v3")
    assert proxy.complete("trl-policy-v0") == right_tokens(tmp_path / "v2")
    assert proxy.policy(published[0].name)["state"] == "live"
    wait_quiet(proxy, *replicas)


def _wire(manifest: Manifest) -> dict[str, Any]:
    return manifest.announcement().model_dump(mode="json")
