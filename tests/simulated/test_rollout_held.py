"""A rollout whose tries are used up is held: being in the wrong place several times does not lose it (P6)."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

from proxy.dataplane.retry import AGAIN_S
from tests.simulated.checks import right_tokens, wait_quiet
from tests.simulated.conftest import Adapters, Serving
from tests.support.proxies import RunningProxy
from tests.support.replicas import SimulatedReplica, simulators, wait_until


def _with_it(replicas: list[SimulatedReplica]) -> list[SimulatedReplica]:
    return [replica for replica in replicas if replica.is_running() and replica.state()["in_flight"]]


def test_it_is_answered_by_whoever_is_left(serving: Serving, pair: list[SimulatedReplica], adapter: Adapters) -> None:
    with serving("held-v1", 1, PROXY_RETRIES="0") as proxy:
        pair[0].set_faults(abort_answers=True)
        for seed in range(2):
            assert proxy.complete("held-v1", prompt=[seed, 1], seed=seed) == right_tokens(
                adapter(1), prompt=[seed, 1], seed=seed
            )
        assert proxy.stats()["router"]["retried"] > 0


def test_it_waits_while_too_many_are_out_and_goes_on_when_one_is_back(adapter: Adapters) -> None:
    with simulators(4) as replicas, RunningProxy(*(r.url for r in replicas), PROXY_RETRIES="1") as proxy:
        assert proxy.load("held-v1", adapter(1)).status_code == 200
        with ThreadPoolExecutor(1) as pool:
            pending = pool.submit(proxy.completion, "held-v1", max_tokens=200)
            dead: list[SimulatedReplica] = []
            for _ in range(2):
                wait_until(lambda: bool(_with_it(replicas)), what="a replica has it")
                (victim,) = _with_it(replicas)
                victim.kill()
                dead.append(victim)
            wait_until(lambda: sorted(proxy.states()) == ["down", "down", "ready", "ready"], what="both are down")
            alive = [replica for replica in replicas if replica not in dead]
            later = time.monotonic() + 1.5 * AGAIN_S
            while time.monotonic() < later:
                assert not _with_it(alive), "a third replica has it while two are out"
            dead[0].restart()
            answer = pending.result()
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["token_ids"] == right_tokens(adapter(1), count=200)
        wait_quiet(proxy, *alive, dead[0])


def test_it_is_held_no_longer_than_any_other(serving: Serving, pair: list[SimulatedReplica]) -> None:
    with serving("held-v2", 2, PROXY_RETRIES="1", PROXY_WAIT_READY_S="0.2") as proxy:
        for replica in pair:
            replica.set_faults(abort_answers=True)
        answer = proxy.completion("held-v2")
        assert (answer.status_code, answer.headers["X-Proxy-Error"]) == (503, "aborted")


def test_one_that_a_replica_failed_inside_is_not_held(serving: Serving, pair: list[SimulatedReplica]) -> None:
    with serving("held-v3", 3, PROXY_RETRIES="1") as proxy:
        for replica in pair:
            replica.set_faults(generations_status=500)
        assert proxy.completion("held-v3").status_code == 500
