"""Merged policies over the real proxy: one is served at a time, by all, and only what nobody needs leaves the store."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from proxy.artifacts.manifest import MANIFEST_FILE, read_manifest
from proxy.simulator.adapters import lora_config, lora_tensors
from proxy.simulator.checkpoints import write_checkpoint
from proxy.simulator.tokens import checkpoint_weights
from tests.simulated.checks import PROMPT, Traffic, models_of, right_tokens, wait_quiet
from tests.support.merged import dora, merging_by_seed
from tests.support.proxies import RunningProxy
from tests.support.replicas import SimulatedReplica, simulators
from trainer_client import (
    AnnounceError,
    EarlierPublishError,
    Merging,
    Policy,
    Progress,
    ReloadReport,
    RewindError,
    SettingsError,
    TrainerClient,
    UnservableError,
)

MakeClient = Callable[..., TrainerClient]


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(write_checkpoint(tmp_path / "base", seed=0))


@pytest.fixture
def replicas(model: str) -> Iterator[list[SimulatedReplica]]:
    with simulators(2, model=model) as replicas, merging_by_seed():
        yield replicas


@pytest.fixture
def proxy(replicas: list[SimulatedReplica]) -> Iterator[RunningProxy]:
    with RunningProxy(*(replica.url for replica in replicas), PROXY_WAIT_READY_S="5") as proxy:
        yield proxy


@pytest.fixture
def client(proxy: RunningProxy, tmp_path: Path) -> Iterator[MakeClient]:
    """Return a function that makes clients of one run and one store, closed at the end."""
    clients: list[TrainerClient] = []
    (tmp_path / "scratch").mkdir()

    def make(run: str = "dora", **options: Any) -> TrainerClient:
        options = {"max_staleness": 1, "on_unservable": "merge", "retry_timeout_s": 10, **options}
        merging = Merging(scratch=tmp_path / "scratch")
        clients.append(TrainerClient(proxy.url, store=tmp_path / "store", run=run, merging=merging, **options))
        return clients[-1]

    yield make
    for one in clients:
        one.close()
    assert list((tmp_path / "scratch").iterdir()) == [], "what was merged is left over"


def stored(tmp_path: Path, run: str = "dora") -> list[int]:
    """Return the versions in the store."""
    manifests = (tmp_path / "store" / run).glob(f"*/{MANIFEST_FILE}")
    return sorted(read_manifest(path.parent).version for path in manifests)


def serves(replica: SimulatedReplica, policy: Policy) -> bool:
    return replica.complete(prompt=PROMPT) == right_tokens(checkpoint_weights(policy.path))


def reloads(replicas: list[SimulatedReplica]) -> list[int]:
    return [replica.state()["calls"].get("POST /collective_rpc", 0) for replica in replicas]


def test_every_replica_serves_the_newest_under_the_base_models_name(
    replicas: list[SimulatedReplica], proxy: RunningProxy, client: MakeClient, model: str, tmp_path: Path
) -> None:
    publisher = client()
    for seed in (1, 2, 3):
        policy = publisher.publish(dora(seed), step=seed)
        assert (policy.model, policy.version, policy.served_as) == (model, seed, model)
        assert isinstance(policy.report, ReloadReport)
        assert {one.status for one in policy.report.replicas} == {"reloaded"}
        assert all(serves(replica, policy) for replica in replicas)
        assert proxy.completion(policy.model).headers["X-Policy-Version"] == str(seed)
        with Traffic(proxy, {policy.model: checkpoint_weights(policy.path)}) as traffic:
            traffic.wait_more(10)
    assert stored(tmp_path) == [3]
    assert publisher.metrics()["lora_sync/policies_live"] == 1
    wait_quiet(proxy, *replicas)


def test_the_same_bytes_again_are_the_same_policy_and_are_read_once(
    replicas: list[SimulatedReplica], client: MakeClient
) -> None:
    publisher = client()
    first = publisher.publish(dora(1), step=1)
    again = publisher.publish(dora(1), step=1)
    assert again.name == first.name
    assert reloads(replicas) == [1, 1]


def test_adapters_of_before_are_unloaded_and_later_ones_are_merged_too(
    replicas: list[SimulatedReplica], proxy: RunningProxy, client: MakeClient, model: str, tmp_path: Path
) -> None:
    listed: list[list[str]] = []

    def look(progress: Progress) -> None:
        if progress.doing == "loading on every replica":
            listed.append(models_of(proxy))

    publisher = client(tell=look)
    adapter = publisher.publish((lora_tensors(rank=8, seed=1), lora_config(rank=8)), step=1)
    assert (adapter.model, models_of(proxy)) == (adapter.name, [model, adapter.name])
    merged = publisher.publish(dora(2), step=2)
    assert listed == [[model], [model]], "replicas would apply it to the merged weights"
    plain = (lora_tensors(rank=8, seed=3), lora_config(rank=8))
    with pytest.raises(UnservableError, match=f"since {merged.name} that is the policy itself, merged"):
        publisher.publish(plain, step=3, on_unservable="raise")
    assert publisher.publish(plain, step=3).model == model
    publisher.close()
    with client() as restarted:
        assert restarted.publish(plain, step=4).model == model, "it knows from the store"
    assert models_of(proxy) == [model]
    assert stored(tmp_path) == [3]


def test_a_restarted_trainer_goes_on_with_the_numbers_and_refuses_lower_steps(client: MakeClient) -> None:
    with client() as first:
        first.publish(dora(1), step=10)
    restarted = client()
    with pytest.raises(RewindError, match="step 9 is before step 10"):
        restarted.publish(dora(2), step=9)
    assert restarted.publish(dora(2), step=11).version == 2


def test_every_so_many_versions_are_kept(replicas: list[SimulatedReplica], client: MakeClient, tmp_path: Path) -> None:
    publisher = client(keep_every=2)
    for seed in range(1, 6):
        publisher.publish(dora(seed), step=seed)
    assert stored(tmp_path) == [2, 4, 5]
    assert publisher.gc(min_age_s=0) == []


def test_in_the_background_they_keep_their_order_and_tell_their_failures(
    replicas: list[SimulatedReplica], client: MakeClient, tmp_path: Path
) -> None:
    publisher = client()
    futures = [publisher.publish(dora(seed), step=seed, wait=False) for seed in (1, 2, 3)]
    policies = [future.result(20) for future in futures]
    assert [policy.version for policy in policies] == [1, 2, 3]
    for replica in replicas:
        replica.set_faults(weights_error=True)
    failed = publisher.publish(dora(4), step=4, wait=False)
    assert isinstance(failed.exception(20), AnnounceError)
    for replica in replicas:
        replica.clear_faults()
    with pytest.raises(EarlierPublishError, match="was reloaded on no replica"):
        publisher.publish(dora(5), step=5)
    assert publisher.current is not None and publisher.current.version == 5
    assert serves(replicas[1], publisher.current)


def test_what_no_replica_could_read_is_told_and_may_be_published_again(
    replicas: list[SimulatedReplica], proxy: RunningProxy, client: MakeClient, tmp_path: Path
) -> None:
    publisher = client()
    first = publisher.publish(dora(1), step=1)
    for replica in replicas:
        replica.set_faults(weights_error=True)
    with pytest.raises(AnnounceError, match="on purpose") as caught:
        publisher.publish(dora(2), step=2)
    assert isinstance(caught.value.report, ReloadReport)
    assert caught.value.report.status == "failed"
    assert stored(tmp_path) == [1, 2]
    assert publisher.gc(min_age_s=0) == [], "the replicas that have not been told still have the first one"
    for replica in replicas:
        replica.clear_faults()
    policy = publisher.publish(dora(2), step=2)
    assert policy.version == 2
    proxy.wait_states("quarantined", "ready")  # what breaks off tears the first server's model for good
    replicas[0].kill()
    replicas[0].restart()
    proxy.wait_states("ready", "ready")
    assert all(serves(replica, policy) for replica in replicas)
    assert stored(tmp_path) == [2]
    assert not first.path.exists()


def test_one_replica_that_cannot_read_it_is_told_and_the_policy_is_live(
    replicas: list[SimulatedReplica], proxy: RunningProxy, client: MakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = client()
    publisher.publish(dora(1), step=1)
    replicas[1].set_faults(weights_error=True)
    with caplog.at_level(logging.WARNING):
        policy = publisher.publish(dora(2), step=2)
    assert f"{replicas[1].url} failed, and serves nothing before it has {policy.name}" in caplog.text
    assert proxy.complete(policy.model) == right_tokens(checkpoint_weights(policy.path))


def test_a_replica_that_restarts_finds_the_newest_in_the_store(
    replicas: list[SimulatedReplica], proxy: RunningProxy, client: MakeClient
) -> None:
    publisher = client()
    for seed in (1, 2):
        policy = publisher.publish(dora(seed), step=seed)
    replicas[0].kill()
    proxy.wait_states("down", "ready")
    publisher.gc(min_age_s=0)
    replicas[0].restart()
    proxy.wait_states("ready", "ready")
    assert serves(replicas[0], policy)


def test_a_restarted_proxy_is_told_again(
    replicas: list[SimulatedReplica], proxy: RunningProxy, client: MakeClient, tmp_path: Path
) -> None:
    publisher = client()
    publisher.publish(dora(1), step=1)
    proxy.stop()
    proxy.start()
    assert publisher.gc(min_age_s=0) == []
    policy = publisher.publish(dora(2), step=2)
    assert all(serves(replica, policy) for replica in replicas)
    assert stored(tmp_path) == [2]


def test_another_run_is_never_touched(replicas: list[SimulatedReplica], client: MakeClient, tmp_path: Path) -> None:
    theirs = client("other").publish(dora(7), step=1)
    ours = client()
    ours.publish(dora(1), step=1)
    ours.publish(dora(2), step=2)
    ours.gc(min_age_s=0)
    assert theirs.path.exists()
    assert (stored(tmp_path, "other"), stored(tmp_path)) == ([1], [2])


def test_an_alias_is_refused_where_it_would_mean_the_base_model(client: MakeClient, tmp_path: Path) -> None:
    publisher = client()
    with pytest.raises(SettingsError, match=r"alias 'mine' cannot be had .*use_dora is set"):
        publisher.publish(dora(1), step=1, alias="mine")
    assert stored(tmp_path) == []
    plain = (lora_tensors(rank=8, seed=1), lora_config(rank=8))
    assert publisher.publish(plain, step=1, alias="mine").alias == "mine"


def test_a_broken_adapter_is_not_merged(client: MakeClient, tmp_path: Path) -> None:
    tensors, config = dora(1)
    next(iter(tensors.values()))[0, 0] = float("nan")
    with pytest.raises(UnservableError, match="NaN"):
        client().publish((tensors, config), step=1)
    assert stored(tmp_path) == []


def test_a_proxy_with_an_admin_key_is_given_it(
    replicas: list[SimulatedReplica], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    urls = (replica.url for replica in replicas)
    with RunningProxy(*urls, PROXY_ADMIN_KEY="secret") as proxy:

        def publish(**options: Any) -> Policy:
            store = tmp_path / "store"
            with TrainerClient(
                proxy.url, store=store, run="dora", max_staleness=1, on_unservable="merge", **options
            ) as client:
                return client.publish(dora(1), step=1)

        monkeypatch.delenv("PROXY_ADMIN_KEY", raising=False)
        with pytest.raises(AnnounceError, match="send PROXY_ADMIN_KEY as a bearer token"):
            publish()
        assert serves(replicas[0], publish(admin_key="secret"))
        monkeypatch.setenv("PROXY_ADMIN_KEY", "secret")
        assert serves(replicas[1], publish())
