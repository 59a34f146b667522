"""The trainer's side over the real proxy: publish, retire, delete only what nobody needs, and go on after a restart."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from proxy.artifacts.manifest import MANIFEST_FILE, read_manifest
from tests.simulated.checks import PROMPT, Traffic, assert_served_by_all, held, models_of, right_tokens, wait_quiet
from tests.simulated.conftest import Adapters
from tests.support.proxies import RunningProxy
from tests.support.replicas import SimulatedReplica, simulators, wait_until
from trainer_client import AnnounceError, TrainerClient, waiting

MAX_STALENESS = 1


@pytest.fixture(scope="module")
def replicas() -> Iterator[list[SimulatedReplica]]:
    with simulators(2, max_loras=MAX_STALENESS + 2, max_cpu_loras=2 * (MAX_STALENESS + 2)) as replicas:
        yield replicas


@pytest.fixture(scope="module")
def proxy(replicas: list[SimulatedReplica]) -> Iterator[RunningProxy]:
    with RunningProxy(*_urls(replicas)) as proxy:
        yield proxy


@pytest.fixture(autouse=True)
def empty(replicas: list[SimulatedReplica], proxy: RunningProxy) -> Iterator[None]:
    """Unload what a test has left, so that the next one finds every slot free."""
    yield
    for replica in replicas:
        replica.clear_faults()
    for name in models_of(proxy)[1:]:
        assert proxy.unload(name).status_code == 200
    wait_until(lambda: all(held(replica).keys() == {"sim"} for replica in replicas), what="the replicas are empty")


def _client(proxy: RunningProxy, store: Path, run: str = "math-r1") -> TrainerClient:
    return TrainerClient(proxy.url, store=store, run=run, max_staleness=MAX_STALENESS, retry_timeout_s=10)


def test_a_load_from_where_no_replica_sees_the_store_says_so_soon(
    replicas: list[SimulatedReplica], adapter: Adapters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "FIRST_S", 0.5)
    told: list[str] = []
    with (
        RunningProxy(*_urls(replicas), PROXY_LORA_LOAD_TIMEOUT_S="2") as proxy,
        TrainerClient(
            proxy.url,
            store=tmp_path,
            mount="/wrong",
            run="math-r1",
            max_staleness=MAX_STALENESS,
            tell=lambda progress: told.append(progress.waits_for),
        ) as client,
        pytest.raises(AnnounceError, match="was not loaded"),
    ):
        client.publish(adapter(1), step=0)
    (said,) = filter(None, told)
    assert replicas[0].url in said or replicas[1].url in said
    assert "No adapter found for /wrong/math-r1/math-r1-v1-" in said and "is that where they see the store" in said


def _urls(replicas: list[SimulatedReplica]) -> list[str]:
    return [replica.url for replica in replicas]


def test_every_policy_is_served_by_all_and_old_ones_go(
    replicas: list[SimulatedReplica], proxy: RunningProxy, adapter: Adapters, tmp_path: Path
) -> None:
    with _client(proxy, tmp_path) as client:
        first = client.publish(adapter(1), step=0)
        published = [first]
        with Traffic(proxy, {first.model: first.path}) as traffic:
            for step in range(1, 6):
                policy = client.publish(adapter(1 + step), step=step)
                published.append(policy)
                assert {replica.status for replica in policy.report.replicas} == {"loaded"}
                assert_served_by_all(replicas, policy.name, policy.path)
                assert proxy.complete(policy.model) == right_tokens(adapter(1 + step))
                traffic.serve(policy.model, policy.path)
                traffic.wait_more(5)
                for old in published[:-1]:
                    traffic.weights.pop(old.model, None)
                traffic.wait_more(1)
        assert [policy.version for policy in published] == [1, 2, 3, 4, 5, 6]
        assert models_of(proxy) == ["sim", *(policy.name for policy in published[-2:])]
        # One more publication looks after what was still needed at the last one.
        client.publish(adapter(9), step=9)
        left = {path.name for path in (tmp_path / "math-r1").iterdir() if path.is_dir()}
        assert published[0].name not in left
        assert {policy.name for policy in published[-1:]} <= left
        wait_quiet(proxy, *replicas)


def test_files_stay_as_long_as_a_rollout_needs_them(
    replicas: list[SimulatedReplica], proxy: RunningProxy, adapter: Adapters, tmp_path: Path
) -> None:
    with _client(proxy, tmp_path) as client, ThreadPoolExecutor(1) as pool:
        first = client.publish(adapter(1), step=1)
        pending = pool.submit(proxy.complete, first.model, max_tokens=120)
        wait_until(lambda: proxy.inflight() == 1, what="the rollout is in flight")
        for step in (2, 3):
            client.publish(adapter(step), step=step)
        assert proxy.policy(first.name)["state"] == "retiring"
        assert (first.path / MANIFEST_FILE).exists()
        assert pending.result() == right_tokens(adapter(1), count=120)
        wait_until(lambda: proxy.policy(first.name)["files_deletable"], what="nobody needs it")
        client.publish(adapter(4), step=4)
        assert not first.path.exists()


def test_the_same_bytes_again_are_the_same_policy(
    replicas: list[SimulatedReplica], proxy: RunningProxy, adapter: Adapters, tmp_path: Path
) -> None:
    with _client(proxy, tmp_path) as client:
        first = client.publish(adapter(1), step=1)
        loads = [replica.state()["loads"] for replica in replicas]
        again = client.publish(adapter(1), step=1)
        assert again.name == first.name
        assert [replica.state()["loads"] for replica in replicas] == loads


def test_the_proxy_restarts_in_between(adapter: Adapters, tmp_path: Path) -> None:
    with simulators(2, max_loras=MAX_STALENESS + 2) as replicas:
        with RunningProxy(*_urls(replicas)) as proxy, _client(proxy, tmp_path) as client:
            names = [client.publish(adapter(step), step=step).name for step in (1, 2)]
            proxy.stop()
            with ThreadPoolExecutor(1) as pool:
                # Published while nobody listens: the client waits for the proxy to be back.
                pending = pool.submit(client.publish, adapter(3), step=3)
                wait_until(lambda: len(list((tmp_path / "math-r1").glob("*-v3-*"))) == 1, what="the files are there")
                proxy.start(healthy=False)
                policy = pending.result()
            assert policy.version == 3
            assert models_of(proxy) == ["sim", names[1], policy.name]
            assert_served_by_all(replicas, policy.name, policy.path)
            assert proxy.complete(names[1]) == right_tokens(adapter(2))
        # A new process of the trainer goes on where the old one stopped.
        with RunningProxy(*_urls(replicas)) as proxy, _client(proxy, tmp_path) as client:
            assert client.publish(adapter(4), step=4).version == 4


def test_a_failed_load_may_be_published_again(
    replicas: list[SimulatedReplica], proxy: RunningProxy, adapter: Adapters, tmp_path: Path
) -> None:
    with _client(proxy, tmp_path) as client:
        replicas[1].set_faults(load_error={"status": 500})
        with pytest.raises(AnnounceError) as caught:
            client.publish(adapter(1), step=1)
        assert replicas[1].url in str(caught.value)
        report = caught.value.report
        assert report is not None
        assert {result.replica: result.status for result in report.replicas} == {
            replicas[0].url: "rolled_back",
            replicas[1].url: "failed",
        }
        replicas[1].clear_faults()
        policy = client.publish(adapter(1), step=1)
        assert policy.version == 1
        assert_served_by_all(replicas, policy.name, policy.path)


def test_a_managed_path_is_held_to_its_manifest(
    replicas: list[SimulatedReplica], proxy: RunningProxy, adapter: Adapters, tmp_path: Path
) -> None:
    with _client(proxy, tmp_path) as client:
        policy = client.publish(adapter(1), step=1)
        announcement = {"run": "math-r1", "version": 2, "step": 2, "digest": "0" * 64}
        answer = proxy.load("math-r1-v2-00000000", policy.path, policy=announcement)
        assert answer.status_code == 409
        assert "is not what was announced" in answer.json()["error"]["message"]
        (policy.path / MANIFEST_FILE).unlink()
        assert proxy.unload(policy.name).status_code == 200
        wait_until(lambda: proxy.policy(policy.name)["state"] == "retired", what="it is retired")
        announcement = {"run": "math-r1", "version": 1, "step": 1, "digest": policy.digest}
        answer = proxy.load(policy.name, policy.path, policy=announcement)
        assert answer.status_code == 409
        assert "is missing" in answer.json()["error"]["message"]


def test_the_window_needs_no_more_slots_than_the_client_asks_for(
    replicas: list[SimulatedReplica], proxy: RunningProxy, adapter: Adapters, tmp_path: Path
) -> None:
    with _client(proxy, tmp_path) as client:
        assert client.max_loras == MAX_STALENESS + 2
        with ThreadPoolExecutor(1) as pool:
            for step in range(1, 8):
                policy = client.publish(adapter(step % 7), step=step)
                pending = pool.submit(proxy.complete, policy.model, prompt=PROMPT, max_tokens=20)
                assert pending.result() == right_tokens(adapter(step % 7), count=20)
                assert all(len(held(replica)) - 1 <= client.max_loras for replica in replicas)


def test_checkpoints_keep_their_files_but_no_slot(
    replicas: list[SimulatedReplica], proxy: RunningProxy, adapter: Adapters, tmp_path: Path
) -> None:
    with TrainerClient(proxy.url, store=tmp_path, run="math-r1", max_staleness=1, keep_every=2) as client:
        policies = [client.publish(adapter(step), step=step) for step in range(1, 7)]
        wait_until(lambda: proxy.policy(policies[3].name)["files_deletable"], what="version 4 is unloaded")
        assert client.publish(adapter(7), step=7).version == 7
        assert models_of(proxy)[1:] == [policies[5].name, client.current.name if client.current else None]
    kept = {read_manifest(path.parent).version for path in (tmp_path / "math-r1").glob(f"*/{MANIFEST_FILE}")}
    assert {2, 4, 6, 7} <= kept
    assert not {1, 3} & kept


def test_policies_travel_while_rollouts_and_training_go_on(
    replicas: list[SimulatedReplica], proxy: RunningProxy, adapter: Adapters, tmp_path: Path
) -> None:
    with _client(proxy, tmp_path) as client:
        first = client.publish(adapter(1), step=1)
        with Traffic(proxy, {first.model: first.path}) as traffic:
            future = client.publish(adapter(2), step=2, wait=False)
            traffic.wait_more(5)
            second = future.result(10)
            assert_served_by_all(replicas, second.name, second.path)
            assert proxy.complete(second.model) == right_tokens(adapter(2))
        with client.paused("wait"):
            assert all(replica.client.get("/is_paused").json()["is_paused"] for replica in replicas)
        assert not any(replica.client.get("/is_paused").json()["is_paused"] for replica in replicas)
        wait_quiet(proxy, *replicas)


def test_a_run_that_has_ended_is_cleaned_up_from_the_shell(
    proxy: RunningProxy, adapter: Adapters, tmp_path: Path
) -> None:
    with _client(proxy, tmp_path, run="ended") as client:
        client.publish(adapter(1), step=1)
    with _client(proxy, tmp_path, run="going-on") as client:
        stays = client.publish(adapter(2), step=1)
    assert "live" in _lora_sync("policies", "--proxy", proxy.url)
    _lora_sync("policies", "--proxy", proxy.url, "--retire", "ended")
    wait_until(lambda: models_of(proxy) == ["sim", stays.name], what="only the run that goes on is live")
    assert ": adapter" in _lora_sync("check", str(adapter(1)), "--proxy", proxy.url)


def _lora_sync(*arguments: str) -> str:
    command = [sys.executable, "-c", "from trainer_client.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=15).stdout
