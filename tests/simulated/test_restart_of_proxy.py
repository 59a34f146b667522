"""The proxy restarts: it takes over what the replicas hold before it calls itself ready, and forgets nothing (P10)."""

from __future__ import annotations

import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.simulated.checks import (
    Traffic,
    WaitingProxy,
    assert_served_by_all,
    held,
    models_of,
    right_tokens,
    wait_quiet,
)
from tests.simulated.conftest import Adapters
from tests.support.proxies import RunningProxy
from tests.support.replicas import simulators, wait_until


def test_it_adopts_what_all_replicas_hold(adapter: Adapters) -> None:
    with simulators(2) as replicas:
        urls = [replica.url for replica in replicas]
        with RunningProxy(*urls) as proxy:
            for version in (7, 8):
                assert proxy.load(f"run-v{version}", adapter(version)).status_code == 200
            proxy.process.send_signal(signal.SIGKILL)
            proxy.process.wait()
        with RunningProxy(*urls) as proxy:
            # Healthy means adopted: there is no moment in which a policy that is served is unknown.
            assert models_of(proxy) == ["sim", "run-v7", "run-v8"]
            with Traffic(proxy, {f"run-v{version}": adapter(version) for version in (7, 8)}) as traffic:
                traffic.wait_more(20)
            policy = proxy.policy("run-v8")
            assert (policy["version"], policy["state"], policy["path"]) == (8, "live", str(adapter(8)))
            assert proxy.unload("run-v7").status_code == 200
            assert proxy.load("run-v9", adapter(9)).status_code == 200
            wait_until(lambda: "run-v7" not in held(replicas[0]), what="the old one is unloaded")
            assert proxy.complete("run-v9") == right_tokens(adapter(9))
            wait_quiet(proxy, *replicas)


def test_what_one_replica_holds_reaches_the_others(adapter: Adapters) -> None:
    with simulators(3) as replicas:
        assert replicas[1].load("half-v1", adapter(1)).status_code == 200
        assert replicas[2].load("half-v2", adapter(2)).status_code == 200
        with RunningProxy(*(replica.url for replica in replicas)) as proxy:
            proxy.wait_states("ready", "ready", "ready")
            for seed in (1, 2):
                assert_served_by_all(replicas, f"half-v{seed}", adapter(seed))
                assert proxy.complete(f"half-v{seed}") == right_tokens(adapter(seed))


def test_what_no_longer_loads_is_retired_and_keeps_nobody_out(adapter: Adapters, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    shutil.copytree(adapter(1), gone)
    with simulators(2) as replicas:
        assert replicas[0].load("gone-v1", gone).status_code == 200
        assert replicas[0].load("good-v2", adapter(2)).status_code == 200
        shutil.rmtree(gone)
        with RunningProxy(*(replica.url for replica in replicas)) as proxy:
            proxy.wait_states("ready", "ready")
            wait_until(lambda: proxy.policy("gone-v1")["state"] in ("retired", "failed"), what="it is retired")
            assert_served_by_all(replicas, "good-v2", adapter(2))
            assert proxy.completion("gone-v1").status_code == 404
            wait_until(lambda: "gone-v1" not in held(replicas[0]), what="it is unloaded")


def test_one_name_from_two_paths_becomes_one_of_them(adapter: Adapters) -> None:
    with simulators(2) as replicas:
        for replica, seed in zip(replicas, (1, 2), strict=True):
            assert replica.load("split-v1", adapter(seed)).status_code == 200
        with RunningProxy(*(replica.url for replica in replicas)) as proxy:
            proxy.wait_states("ready", "ready")
            path = Path(proxy.policy("split-v1")["path"])
            assert_served_by_all(replicas, "split-v1", path)
            with Traffic(proxy, {"split-v1": path}) as traffic:
                traffic.wait_more(20)


def test_of_two_generations_of_a_name_the_newer_one_is_served(adapter: Adapters) -> None:
    """As when the proxy was killed after a replica had missed an unload: both are found, in any order."""
    names = [f"twice-v{number}" for number in range(1, 9)]
    with simulators(2, max_loras=16, max_cpu_loras=32) as replicas:
        for number, name in enumerate(names):
            older, newer = replicas if number % 2 else replicas[::-1]
            assert older.load(f"{name}~00000001", adapter(1)).status_code == 200
            assert newer.load(f"{name}~00000002", adapter(2)).status_code == 200
        with RunningProxy(*(replica.url for replica in replicas)) as proxy:
            proxy.wait_states("ready", "ready")
            assert sorted(models_of(proxy)) == ["sim", *names]
            assert [proxy.complete(name) for name in names] == [right_tokens(adapter(2))] * len(names)
            for replica in replicas:
                wait_until(lambda r=replica: not [n for n in r.models() if n.endswith("1")], what="the older are gone")  # type: ignore[misc]


def test_an_older_generation_never_follows_a_newer_one_that_was_unloaded(adapter: Adapters) -> None:
    """As when a replica that has slept through everything wakes up: its policy is nobody's any more."""
    with simulators(2) as replicas:
        replicas[1].hang()
        assert replicas[0].load("late-v1~00000002", adapter(2)).status_code == 200
        with WaitingProxy(*(replica.url for replica in replicas), PROXY_STALL_S="0.5") as proxy:
            wait_until(lambda: proxy.states()[0] == "ready", what="the first one is ready")
            assert proxy.complete("late-v1") == right_tokens(adapter(2))
            assert proxy.unload("late-v1").status_code == 200
            wait_until(lambda: proxy.policy("late-v1")["state"] == "retired", what="it is retired")
            replicas[1].unhang()
            assert replicas[1].load("late-v1~00000001", adapter(1)).status_code == 200
            proxy.wait_states("ready", "ready")
            wait_until(lambda: "late-v1" not in held(replicas[1]), what="what nobody wants is unloaded")
            assert proxy.completion("late-v1").status_code == 404


def test_a_sync_that_begins_while_it_looks_around_works(adapter: Adapters) -> None:
    """TRL repeats none of these calls: a proxy that is killed between two syncs must not end its run."""
    with simulators(2) as replicas:
        for replica in replicas:
            assert replica.load("run-v1", adapter(1)).status_code == 200
        with WaitingProxy(*(replica.url for replica in replicas)) as proxy:
            assert proxy.client.post("/pause?mode=keep").status_code == 200
            assert proxy.load("run-v2", adapter(2)).status_code == 200
            assert proxy.client.post("/resume").status_code == 200
            proxy.process.send_signal(signal.SIGKILL)
            proxy.process.wait()
        with WaitingProxy(*(replica.url for replica in replicas)) as proxy:
            assert proxy.unload("run-v1").status_code == 200
            wait_until(lambda: "run-v1" not in held(replicas[1]), what="the oldest is unloaded")
            assert proxy.complete("run-v2") == right_tokens(adapter(2))


def test_rollouts_that_come_while_it_looks_around_wait(adapter: Adapters) -> None:
    """The first replica that it sees is one that has lost everything: what others hold is found a moment later."""
    with simulators(4) as replicas:
        for version in range(1, 7):
            for replica in replicas[1:]:
                assert replica.load(f"run-v{version}", adapter(version)).status_code == 200
        with WaitingProxy(*(replica.url for replica in replicas)) as proxy:

            def ask(seed: int) -> list[str]:
                version = 1 + seed % 6
                answers = [proxy.completion(f"run-v{version}") for _ in range(5)]
                return [answer.text for answer in answers if answer.status_code != 200]

            with ThreadPoolExecutor(12) as pool:
                assert list(pool.map(ask, range(12))) == [[]] * 12
            assert proxy.completion("run-v9").status_code == 404


def test_it_is_killed_in_the_middle_of_a_load(adapter: Adapters) -> None:
    with simulators(2) as replicas:
        urls = [replica.url for replica in replicas]
        replicas[1].set_faults(late={"seconds": 60})
        with RunningProxy(*urls) as proxy, ThreadPoolExecutor(1) as pool:
            loading = pool.submit(proxy.load, "run-v1", adapter(1))
            wait_until(lambda: "run-v1" in held(replicas[0]), what="half of the fleet holds it")
            proxy.process.send_signal(signal.SIGKILL)
            proxy.process.wait()
            assert loading.exception() is not None
        replicas[1].clear_faults()
        with WaitingProxy(*urls) as proxy:
            proxy.wait_states("ready", "ready")
            # The trainer announces it again, whatever has become of it.
            answer = proxy.load("run-v1", adapter(1))
            if answer.status_code == 400:
                assert "already been loaded" in answer.text
            assert proxy.complete("run-v1") == right_tokens(adapter(1))
            assert_served_by_all(replicas, "run-v1", adapter(1))


def test_an_unload_that_was_promised_but_not_done_keeps_no_slot(adapter: Adapters) -> None:
    with (
        simulators(2, max_loras=2) as replicas,
        RunningProxy(*(replica.url for replica in replicas)) as proxy,
        ThreadPoolExecutor(1) as pool,
    ):
        for version in (1, 2):
            assert proxy.load(f"run-v{version}", adapter(version)).status_code == 200
        pool.submit(proxy.completion, "run-v1", max_tokens=3000)
        wait_until(lambda: proxy.inflight() == 1, what="a rollout keeps the unload waiting")
        assert proxy.unload("run-v1").status_code == 200
        assert proxy.policy("run-v1")["state"] == "retiring"
        proxy.kill()
        proxy.start()
        assert all("run-v1" in held(replica) for replica in replicas), "the promise has been forgotten"
        assert proxy.load("run-v3", adapter(3)).status_code == 200
        assert models_of(proxy) == ["sim", "run-v2", "run-v3"]
        with Traffic(proxy, {f"run-v{version}": adapter(version) for version in (2, 3)}) as traffic:
            traffic.wait_more(20)
        assert_served_by_all(replicas, "run-v3", adapter(3))
        wait_quiet(proxy, *replicas)
