"""Base weights from a checkpoint: one replica after the other or all at once, and never half of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from proxy.artifacts.checkpoint import INDEX
from proxy.contract import RELOAD_PATH
from proxy.simulator.adapters import Geometry
from proxy.simulator.checkpoints import write_checkpoint
from proxy.simulator.tokens import base_weights, checkpoint_weights
from tests.simulated.checks import PROMPT, Traffic, right_tokens, wait_quiet
from tests.support.proxies import RunningProxy
from tests.support.replicas import SimulatedReplica, simulators, wait_until

Checkpoints = Callable[[int], Path]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoints:
    """Return a function that writes the checkpoint of a version. Version 0 is what the replicas are started with."""

    def of_version(version: int) -> Path:
        directory = tmp_path / f"run-v{version}"
        return directory if directory.exists() else write_checkpoint(directory, seed=version, shards=1 + version % 2)

    return of_version


@pytest.fixture
def replicas(checkpoint: Checkpoints) -> Iterator[list[SimulatedReplica]]:
    with simulators(3, model=str(checkpoint(0))) as replicas:
        yield replicas


@pytest.fixture(params=["rolling", "together"])
def mode(request: pytest.FixtureRequest) -> str:
    mode: str = request.param
    return mode


@pytest.fixture
def proxy(replicas: list[SimulatedReplica], mode: str) -> Iterator[RunningProxy]:
    urls = (replica.url for replica in replicas)
    with RunningProxy(*urls, PROXY_RELOAD=mode, PROXY_WAIT_READY_S="5") as proxy:
        yield proxy


def reload(proxy: RunningProxy, path: Path, **fields: Any) -> httpx2.Response:
    return proxy.client.post(RELOAD_PATH, json={"name": path.name, "path": str(path), **fields})


def error_of(answer: httpx2.Response, status: int) -> str:
    assert answer.status_code == status, answer.text
    return str(answer.json()["error"]["message"])


def labels(replicas: list[SimulatedReplica]) -> list[str]:
    return [replica.state()["weight_version"] for replica in replicas]


def serves(replica: SimulatedReplica, path: Path) -> bool:
    return replica.complete(prompt=PROMPT) == right_tokens(checkpoint_weights(path))


def rpcs(replica: SimulatedReplica) -> int:
    count: int = replica.state()["calls"].get("POST /collective_rpc", 0)
    return count


def test_every_replica_serves_the_checkpoint_and_answers_tell_its_version(
    replicas: list[SimulatedReplica], proxy: RunningProxy, checkpoint: Checkpoints
) -> None:
    model = str(checkpoint(0))
    for version in (1, 2):
        for replica in replicas:
            assert replica.complete(prompt=PROMPT)  # its KV is cached now
        report = reload(proxy, checkpoint(version)).raise_for_status().json()
        assert report["status"] == "live" and report["warnings"] == []
        assert {one["status"] for one in report["replicas"]} == {"reloaded"}
        assert labels(replicas) == [f"{version}~run-v{version}"] * 3
        proxy.wait_states("ready", "ready", "ready")
        assert all(serves(replica, checkpoint(version)) for replica in replicas), "KV of the old weights was used"
        answer = proxy.completion(model)
        assert answer.headers["X-Policy-Version"] == str(version)
    assert [replica.state()["paused"] for replica in replicas] == [None, None, None]
    again = reload(proxy, checkpoint(2)).raise_for_status().json()
    assert [rpcs(replica) for replica in replicas] == [2, 2, 2], "once is enough"
    assert again["version"] == "2~run-v2"


@pytest.mark.parametrize("mode", ["rolling"], indirect=True)
def test_rolling_no_rollout_is_of_two_versions_and_none_is_lost(
    replicas: list[SimulatedReplica], proxy: RunningProxy, checkpoint: Checkpoints
) -> None:
    model = str(checkpoint(0))
    right = {0: base_weights(model)} | {version: checkpoint_weights(checkpoint(version)) for version in (1, 2)}

    def ask(seed: int) -> int:
        answer = proxy.completion(model, seed=seed, max_tokens=40).raise_for_status()
        tokens = answer.json()["choices"][0]["token_ids"]
        of = [version for version, weights in right.items() if tokens == right_tokens(weights, seed=seed, count=40)]
        assert len(of) == 1, f"an answer of no version: {answer.headers}"
        assert answer.headers.get("X-Policy-Version", "0") == str(of[0])
        return of[0]

    with ThreadPoolExecutor(12) as pool:
        rollouts = [pool.submit(ask, seed) for seed in range(60)]
        for version in (1, 2):
            reload(proxy, checkpoint(version)).raise_for_status()
            rollouts += [pool.submit(ask, 1000 * version + seed) for seed in range(60)]
        seen = [rollout.result() for rollout in rollouts]
    assert set(seen) >= {0, 2}
    assert set(seen[-30:]) == {2}
    wait_quiet(proxy, *replicas)


@pytest.mark.parametrize("mode", ["together"], indirect=True)
def test_together_what_is_in_flight_goes_on_and_tells_both_versions(
    replicas: list[SimulatedReplica], proxy: RunningProxy, checkpoint: Checkpoints
) -> None:
    reload(proxy, checkpoint(1)).raise_for_status()
    proxy.wait_states("ready", "ready", "ready")
    with ThreadPoolExecutor(6) as pool:
        rollouts = [pool.submit(proxy.completion, str(checkpoint(0)), seed=s, max_tokens=150) for s in range(6)]
        wait_until(lambda: proxy.inflight() == 6, what="they are in flight")
        reload(proxy, checkpoint(2)).raise_for_status()
        answers = [rollout.result() for rollout in rollouts]
    assert {answer.status_code for answer in answers} == {200}
    assert {answer.headers["X-Policy-Version"] for answer in answers} == {"1,2"}
    wait_quiet(proxy, *replicas)


def _truncated(path: Path) -> None:
    file = sorted(path.glob("*.safetensors"))[-1]
    file.write_bytes(file.read_bytes()[:-100])


def _without_a_shard(path: Path) -> None:
    sorted(path.glob("*.safetensors"))[-1].unlink()


def _without_a_config(path: Path) -> None:
    (path / "config.json").unlink()


def _of_another_kind(path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]}))


def _of_another_size(path: Path) -> None:
    for file in [*path.glob("*.safetensors"), *path.glob(INDEX)]:
        file.unlink()
    write_checkpoint(path, seed=9, geometry=Geometry(hidden=64))


def _without_a_layer(path: Path) -> None:
    for file in [*path.glob("*.safetensors"), *path.glob(INDEX)]:
        file.unlink()
    write_checkpoint(path, seed=9, geometry=Geometry(layers=2))


@pytest.mark.parametrize("mode", ["rolling"], indirect=True)
@pytest.mark.parametrize(
    ("spoil", "status", "said"),
    [
        (_truncated, 409, "truncated"),
        (_without_a_shard, 409, "cannot be read"),
        (_without_a_config, 409, "config.json"),
        (_of_another_kind, 400, "LlamaForCausalLM"),
        (_of_another_size, 400, "has shape"),
        (_without_a_layer, 400, "it lacks model.layers.2"),
    ],
)
def test_a_bad_checkpoint_is_refused_before_any_replica_is_touched(
    replicas: list[SimulatedReplica],
    proxy: RunningProxy,
    checkpoint: Checkpoints,
    spoil: Callable[[Path], None],
    status: int,
    said: str,
) -> None:
    spoil(checkpoint(1))
    assert said in error_of(reload(proxy, checkpoint(1)), status)
    assert [rpcs(replica) for replica in replicas] == [0, 0, 0]
    assert labels(replicas) == ["default"] * 3
    assert proxy.states() == ["ready"] * 3
    assert proxy.complete(str(checkpoint(0))) == right_tokens(base_weights(str(checkpoint(0))))


@pytest.mark.parametrize("mode", ["rolling"], indirect=True)
def test_what_cannot_be_asked_for_is_refused(
    replicas: list[SimulatedReplica], proxy: RunningProxy, checkpoint: Checkpoints
) -> None:
    assert "absolute" in error_of(reload(proxy, Path("run-v1")), 400)
    assert "'..'" in error_of(reload(proxy, checkpoint(1) / ".." / "run-v1"), 400)
    assert "path" in error_of(proxy.client.post(RELOAD_PATH, json={"name": "x"}), 400)
    assert "name" in error_of(reload(proxy, checkpoint(1), name="a b"), 400)


def test_a_replica_that_fails_serves_nothing_and_the_others_go_on(
    replicas: list[SimulatedReplica], proxy: RunningProxy, checkpoint: Checkpoints
) -> None:
    model = str(checkpoint(0))
    replicas[1].set_faults(weights_error=True)
    report = reload(proxy, checkpoint(1)).raise_for_status().json()
    assert {one["replica"]: one["status"] for one in report["replicas"]} == {
        replicas[0].url: "reloaded", replicas[1].url: "failed", replicas[2].url: "reloaded",
    }  # fmt: skip
    proxy.wait_states("ready", "quarantined", "ready")
    with Traffic(proxy, {model: checkpoint_weights(checkpoint(1))}) as traffic:
        traffic.wait_more(40)
    assert set(traffic.by_replica) == {"0", "2"}
    replicas[1].clear_faults()
    replicas[1].kill()
    replicas[1].restart()
    proxy.wait_states("ready", "ready", "ready")
    assert serves(replicas[1], checkpoint(1))


@pytest.mark.parametrize("mode", ["rolling"], indirect=True)
def test_a_checkpoint_that_the_first_replica_cannot_read_goes_no_further(
    replicas: list[SimulatedReplica], proxy: RunningProxy, checkpoint: Checkpoints
) -> None:
    model = str(checkpoint(0))
    replicas[0].set_faults(weights_error=True)
    assert replicas[0].url in error_of(reload(proxy, checkpoint(1)), 500)
    assert [rpcs(replica) for replica in replicas] == [1, 0, 0]
    proxy.wait_states("quarantined", "ready", "ready")
    with Traffic(proxy, {model: base_weights(model)}) as traffic:
        traffic.wait_more(40)
    replicas[0].clear_faults()
    reload(proxy, checkpoint(2)).raise_for_status()
    proxy.wait_states("ready", "ready", "ready")
    assert all(serves(replica, checkpoint(2)) for replica in replicas)


def test_a_replica_killed_in_the_middle_is_reloaded_when_it_is_back(
    replicas: list[SimulatedReplica], proxy: RunningProxy, checkpoint: Checkpoints
) -> None:
    replicas[1].set_faults(weights_hang=True)
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(reload, proxy, checkpoint(1))
        wait_until(lambda: rpcs(replicas[1]) == 1, what="it has begun")
        replicas[1].kill()
        report = pending.result().raise_for_status().json()
    assert {one["replica"]: one["status"] for one in report["replicas"]}[replicas[1].url] == "left"
    replicas[1].restart()
    proxy.wait_states("ready", "ready", "ready")
    assert all(serves(replica, checkpoint(1)) for replica in replicas)
    assert labels(replicas) == ["1~run-v1"] * 3


def test_a_replica_that_restarts_or_comes_new_is_reloaded_before_it_serves(
    replicas: list[SimulatedReplica], proxy: RunningProxy, checkpoint: Checkpoints
) -> None:
    model = str(checkpoint(0))
    reload(proxy, checkpoint(1)).raise_for_status()
    with Traffic(proxy, {model: checkpoint_weights(checkpoint(1))}) as traffic:
        replicas[0].kill()
        replicas[0].restart()
        proxy.wait_states("ready", "ready", "ready")
        with simulators(1, model=model) as [late]:
            proxy.client.post("/proxy/replicas", json={"url": late.url}).raise_for_status()
            traffic.wait_more(60)
            assert serves(late, checkpoint(1))
            proxy.client.request("DELETE", "/proxy/replicas", json={"url": late.url}).raise_for_status()
    assert labels(replicas) == ["1~run-v1"] * 3


def test_a_restarted_proxy_knows_the_version_and_is_told_the_path_again(
    replicas: list[SimulatedReplica], proxy: RunningProxy, checkpoint: Checkpoints
) -> None:
    reload(proxy, checkpoint(1)).raise_for_status()
    proxy.kill()
    replicas[0].kill()
    replicas[0].restart()
    proxy.start()
    proxy.wait_states("quarantined", "ready", "ready")
    assert proxy.completion(str(checkpoint(0))).headers["X-Policy-Version"] == "1"
    reload(proxy, checkpoint(1)).raise_for_status()
    proxy.wait_states("ready", "ready", "ready")
    assert [rpcs(replica) for replica in replicas] == [1, 1, 1]


@pytest.mark.parametrize("mode", ["rolling"], indirect=True)
def test_a_path_that_the_proxy_does_not_see_is_taken_on_trust_and_said_so(
    replicas: list[SimulatedReplica], proxy: RunningProxy
) -> None:
    said = error_of(reload(proxy, Path("/nowhere/run-v1")), 500)
    assert replicas[0].url in said
    proxy.wait_states("quarantined", "ready", "ready")
