"""Base weights from a checkpoint: one replica after the other or all at once, and never half of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from proxy.artifacts.checkpoint import INDEX
from proxy.contract import RELOAD_PATH
from proxy.simulator.adapters import Geometry
from proxy.simulator.checkpoints import write_checkpoint
from proxy.simulator.tokens import base_weights, checkpoint_weights
from tests.simulated.checks import PROMPT, Traffic, assert_served_by_all, right_tokens, wait_quiet
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
def settings() -> dict[str, str]:
    return {}


@pytest.fixture
def proxy(replicas: list[SimulatedReplica], mode: str, settings: dict[str, str]) -> Iterator[RunningProxy]:
    urls = (replica.url for replica in replicas)
    with RunningProxy(*urls, PROXY_RELOAD=mode, PROXY_WAIT_READY_S="5", **settings) as proxy:
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
    report = reload(proxy, checkpoint(2)).raise_for_status().json()
    said = {one["replica"]: one["message"] for one in report["replicas"]}
    assert "restart it" in said[replicas[0].url], "vLLM reads nothing more once it has broken off in the middle"
    proxy.wait_states("quarantined", "ready", "ready")
    replicas[0].kill()
    replicas[0].restart()
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


@pytest.mark.parametrize("settings", [{"PROXY_LORA_LOAD_TIMEOUT_S": "1"}])
def test_a_path_where_replicas_find_nothing_costs_one_of_them_until_the_next_reload(
    replicas: list[SimulatedReplica], proxy: RunningProxy, checkpoint: Checkpoints
) -> None:
    said = error_of(reload(proxy, Path("/nowhere/run-v1")), 500)
    assert replicas[0].url in said and "Repo id" in said
    proxy.wait_states("quarantined", "ready", "ready")
    assert labels(replicas) == ["updating", "default", "default"]
    assert [replica.state()["paused"] for replica in replicas] == ["keep", None, None], "a generation would kill it"
    assert proxy.complete(str(checkpoint(0))) == right_tokens(base_weights(str(checkpoint(0))))
    reload(proxy, checkpoint(1)).raise_for_status()
    proxy.wait_states("ready", "ready", "ready")
    assert all(serves(replica, checkpoint(1)) for replica in replicas)


def test_a_mount_that_lags_behind_is_waited_for(
    replicas: list[SimulatedReplica], proxy: RunningProxy, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    late = tmp_path / "mount" / "run-v1"
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(reload, proxy, late)
        wait_until(lambda: rpcs(replicas[0]) >= 2, what="it has been asked again")
        checkpoint(1).rename(tmp_path / "run-v1-whole")
        late.parent.mkdir()
        (tmp_path / "run-v1-whole").rename(late)
        report = pending.result().raise_for_status().json()
    assert {one["status"] for one in report["replicas"]} == {"reloaded"}
    assert "nobody has checked it" in report["warnings"][0]
    proxy.wait_states("ready", "ready", "ready")
    assert all(serves(replica, late) for replica in replicas)


@contextmanager
def reading(proxy: RunningProxy, replica: SimulatedReplica, path: Path) -> Iterator[Future[httpx2.Response]]:
    """Hold a reload up while this replica reads; it goes on when the block ends."""
    replica.set_faults(weights_hang=True)
    before = rpcs(replica)
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(reload, proxy, path)
        try:
            wait_until(lambda: rpcs(replica) == before + 1, what="it reads")
            yield pending
        finally:
            replica.clear_faults()


@pytest.mark.parametrize("mode", ["rolling"], indirect=True)
def test_while_one_reads_the_old_version_and_the_new_one_are_served(
    replicas: list[SimulatedReplica], proxy: RunningProxy, checkpoint: Checkpoints
) -> None:
    with reading(proxy, replicas[1], checkpoint(1)) as pending:
        proxy.wait_states("ready", "quarantined", "ready")
        wait_until(lambda: _versions_served(proxy) == {"0", "1"}, what="both versions are served")
        assert proxy.states() == ["ready", "quarantined", "ready"]
        assert "being reloaded" in proxy.replicas()[1]["reason"]
    assert {one["status"] for one in pending.result().raise_for_status().json()["replicas"]} == {"reloaded"}


def _versions_served(proxy: RunningProxy) -> set[str]:
    model = proxy.replicas()[0]["models"][0]
    answers = [proxy.completion(model, prompt=[seed] * 64) for seed in range(12)]
    return {answer.headers["X-Policy-Version"] for answer in answers}


@pytest.mark.parametrize("settings", [{"PROXY_CALL_STALL_S": "0.3", "PROXY_STALL_S": "0.3"}])
def test_a_checkpoint_may_take_longer_to_read_than_any_other_call(
    replicas: list[SimulatedReplica], proxy: RunningProxy, checkpoint: Checkpoints
) -> None:
    with reading(proxy, replicas[1], checkpoint(1)) as pending:
        asked = replicas[1].state()["calls"]["GET /health"]
        wait_until(lambda: replicas[1].state()["calls"]["GET /health"] >= asked + 6, what="it is asked for its health")
    assert {one["status"] for one in pending.result().raise_for_status().json()["replicas"]} == {"reloaded"}


@pytest.mark.parametrize("settings", [{"PROXY_RELOAD_TIMEOUT_S": "0.5", "PROXY_CALL_TIMEOUT_S": "2"}])
def test_a_replica_that_reads_for_too_long_is_reloaded_when_it_answers_again(
    replicas: list[SimulatedReplica], proxy: RunningProxy, checkpoint: Checkpoints
) -> None:
    with reading(proxy, replicas[1], checkpoint(1)) as pending:
        report = pending.result().raise_for_status().json()
        assert {one["replica"]: one["status"] for one in report["replicas"]}[replicas[1].url] == "failed"
        proxy.wait_states("ready", "quarantined", "ready")
    proxy.wait_states("ready", "ready", "ready")
    assert all(serves(replica, checkpoint(1)) for replica in replicas)


def test_a_caller_that_leaves_does_not_leave_half_a_reload(
    replicas: list[SimulatedReplica], proxy: RunningProxy, checkpoint: Checkpoints
) -> None:
    replicas[1].set_faults(weights_hang=True)
    body = {"name": checkpoint(1).name, "path": str(checkpoint(1))}
    with pytest.raises(httpx2.ReadTimeout):
        proxy.client.post(RELOAD_PATH, json=body, timeout=0.5)
    with ThreadPoolExecutor(1) as pool:
        again = pool.submit(reload, proxy, checkpoint(1))
        replicas[1].clear_faults()
        report = again.result().raise_for_status().json()
    assert {one["status"] for one in report["replicas"]} == {"reloaded"}
    proxy.wait_states("ready", "ready", "ready")
    assert all(serves(replica, checkpoint(1)) for replica in replicas)
    assert [rpcs(replica) for replica in replicas] == [1, 1, 1], "the second call found it done"


def test_what_else_changes_base_weights_is_refused_meanwhile(
    replicas: list[SimulatedReplica], proxy: RunningProxy, checkpoint: Checkpoints
) -> None:
    with reading(proxy, replicas[0], checkpoint(1)) as pending:
        assert "still under way" in error_of(reload(proxy, checkpoint(2)), 409)
        assert "still under way" in error_of(proxy.client.post("/start_weight_update", json={}), 409)
        label = proxy.client.post("/update_weight_version", json={"new_version": "mine"})
        assert "still under way" in error_of(label, 409)
    assert pending.result().status_code == 200
    assert labels(replicas) == ["1~run-v1"] * 3


def test_an_adapter_that_is_loaded_meanwhile_is_served_by_all(
    replicas: list[SimulatedReplica], proxy: RunningProxy, checkpoint: Checkpoints, adapter: Callable[[int], Path]
) -> None:
    for replica in replicas:
        replica.set_faults(load_delay_s=0.5)
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(proxy.load, "math-v1", adapter(1))
        wait_until(lambda: proxy.policy("math-v1").get("state") == "loading", what="it loads")
        reload(proxy, checkpoint(1)).raise_for_status()
        assert loading.result().status_code == 200
    proxy.wait_states("ready", "ready", "ready")
    assert_served_by_all(replicas, "math-v1", adapter(1))
    assert all(serves(replica, checkpoint(1)) for replica in replicas)


@pytest.mark.parametrize("settings", [{"PROXY_PAUSE": "real"}])
def test_within_a_real_pause_nobody_waits_for_rollouts_that_stand_still(
    replicas: list[SimulatedReplica], proxy: RunningProxy, checkpoint: Checkpoints
) -> None:
    model = str(checkpoint(0))
    with ThreadPoolExecutor(6) as pool:
        frozen = [pool.submit(proxy.completion, model, seed=seed, max_tokens=200) for seed in range(6)]
        wait_until(lambda: proxy.inflight() == 6, what="they are in flight")
        proxy.client.post("/pause?mode=keep").raise_for_status()
        reload(proxy, checkpoint(1)).raise_for_status()
        assert [replica.state()["paused"] for replica in replicas] == ["keep"] * 3
        assert not any(one.done() for one in frozen)
        proxy.client.post("/resume").raise_for_status()
        assert {one.result().status_code for one in frozen} == {200}
    proxy.wait_states("ready", "ready", "ready")
    assert proxy.complete(model) == right_tokens(checkpoint_weights(checkpoint(1)))
    wait_quiet(proxy, *replicas)


def test_a_pause_that_a_client_asks_for_meanwhile_lasts(
    replicas: list[SimulatedReplica], proxy: RunningProxy, checkpoint: Checkpoints, mode: str
) -> None:
    with reading(proxy, replicas[0], checkpoint(1)) as pending, ThreadPoolExecutor(1) as pool:
        pausing = pool.submit(proxy.client.post, "/pause?mode=abort")
        wait_until(lambda: replicas[1].state()["paused"] == "abort", what="the others are paused")
        if mode == "together":
            assert "finish that first" in error_of(proxy.client.post("/resume"), 409)
        replicas[0].clear_faults()
        assert pausing.result().status_code == 200
        pending.result().raise_for_status()
    assert proxy.client.get("/is_paused").json() == {"is_paused": True}
    proxy.wait_states("ready", "ready", "ready")
    wait_until(lambda: all(replica.state()["paused"] for replica in replicas), what="all are paused")
    proxy.client.post("/resume").raise_for_status()
    assert [replica.state()["paused"] for replica in replicas] == [None] * 3
    assert proxy.complete(str(checkpoint(0))) == right_tokens(checkpoint_weights(checkpoint(1)))


def test_a_resume_meanwhile_lets_nobody_generate_on_half_a_checkpoint(
    replicas: list[SimulatedReplica], proxy: RunningProxy, checkpoint: Checkpoints, mode: str
) -> None:
    proxy.client.post("/pause?mode=keep").raise_for_status()
    with reading(proxy, replicas[0], checkpoint(1)) as pending:
        assert proxy.client.post("/resume").status_code == (200 if mode == "rolling" else 409)
    pending.result().raise_for_status()
    told = [call["path"] for call in replicas[0].state()["control"]]
    assert "/resume" not in told[: told.index("/collective_rpc") + 2], told
    if mode == "together":
        proxy.client.post("/resume").raise_for_status()
    proxy.wait_states("ready", "ready", "ready")
    assert [replica.state()["paused"] for replica in replicas] == [None] * 3


def test_a_proxy_killed_in_the_middle_serves_nothing_torn_and_is_told_again(
    replicas: list[SimulatedReplica], proxy: RunningProxy, checkpoint: Checkpoints, mode: str
) -> None:
    model = str(checkpoint(0))
    with pytest.raises(httpx2.TransportError), reading(proxy, replicas[1], checkpoint(1)) as pending:
        wait_until(lambda: replicas[0].state()["weight_version"] == "1~run-v1", what="another one has it")
        proxy.kill()
        pending.result()
    proxy.start()
    if mode == "rolling":
        proxy.wait_states("ready", "quarantined", "quarantined")
        with Traffic(proxy, {model: checkpoint_weights(checkpoint(1))}) as traffic:
            traffic.wait_more(20)
        assert replicas[1].state()["paused"] == "keep", "a generation would kill it"
    reload(proxy, checkpoint(1)).raise_for_status()
    proxy.wait_states("ready", "ready", "ready")
    if mode == "together":  # its own pause outlived it
        proxy.client.post("/resume").raise_for_status()
    wait_until(lambda: not any(replica.state()["paused"] for replica in replicas), what="nobody is paused")
    assert all(serves(replica, checkpoint(1)) for replica in replicas)


def test_a_proxy_that_is_told_again_what_all_have_can_reload_who_loses_it(
    replicas: list[SimulatedReplica], proxy: RunningProxy, checkpoint: Checkpoints
) -> None:
    reload(proxy, checkpoint(1)).raise_for_status()
    proxy.kill()
    proxy.start()
    proxy.wait_states("ready", "ready", "ready")
    reload(proxy, checkpoint(1)).raise_for_status()
    replicas[0].kill()
    replicas[0].restart()
    wait_until(lambda: rpcs(replicas[0]) == 1, what="it is reloaded")
    proxy.wait_states("ready", "ready", "ready")
    assert serves(replicas[0], checkpoint(1))


@pytest.mark.parametrize("mode", ["rolling"], indirect=True)
def test_who_takes_the_place_of_a_replica_that_was_removed_meanwhile_is_not_taken_for_it(
    replicas: list[SimulatedReplica], proxy: RunningProxy, checkpoint: Checkpoints
) -> None:
    with simulators(1, model=str(checkpoint(0))) as [late], reading(proxy, replicas[1], checkpoint(1)) as pending:
        proxy.client.request("DELETE", "/proxy/replicas", json={"url": replicas[1].url}).raise_for_status()
        proxy.client.post("/proxy/replicas?wait=false", json={"url": late.url}).raise_for_status()
        report = pending.result().raise_for_status().json()
        assert {one["replica"]: one["status"] for one in report["replicas"]}[replicas[1].url] == "left"
        proxy.wait_states("ready", "ready", "ready")
        assert serves(late, checkpoint(1)) and rpcs(late) == 1
        told = [call["path"] for call in late.state()["control"]]
        assert told[:3] == ["/update_weight_version", "/pause?mode=keep", "/collective_rpc"]
        proxy.client.request("DELETE", "/proxy/replicas", json={"url": late.url}).raise_for_status()


@pytest.mark.parametrize("mode", ["rolling"], indirect=True)
def test_a_server_that_takes_no_such_calls_serves_on(checkpoint: Checkpoints, mode: str) -> None:
    model = str(checkpoint(0))
    with simulators(2, model=model, dev_mode=False) as pair, RunningProxy(*(r.url for r in pair)) as proxy:
        said = error_of(reload(proxy, checkpoint(1)), 500)
        assert "/update_weight_version: 404" in said and pair[1].url not in said
        proxy.wait_states("ready", "ready")
        assert proxy.complete(model) == right_tokens(base_weights(model))


def test_a_repair_of_what_is_gone_holds_up_no_reload(
    replicas: list[SimulatedReplica], proxy: RunningProxy, checkpoint: Checkpoints
) -> None:
    reload(proxy, checkpoint(1)).raise_for_status()
    checkpoint(1).rename(checkpoint(1).with_name("kept"))
    replicas[0].kill()
    replicas[0].restart()
    wait_until(lambda: rpcs(replicas[0]) == 1, what="it has been tried")
    assert proxy.states()[0] == "quarantined"
    reload(proxy, checkpoint(2)).raise_for_status()
    proxy.wait_states("ready", "ready", "ready")
    assert all(serves(replica, checkpoint(2)) for replica in replicas)
