"""A replica that hangs holds its rollouts for PROXY_STALL_S at most; one that is only slow keeps them (P6)."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.simulated.checks import right_tokens, wait_quiet
from tests.simulated.conftest import Adapters
from tests.simulated.flaky import FlakyReplica
from tests.support.proxies import RunningProxy
from tests.support.replicas import SimulatedReplica, simulators, wait_until

STALL_S = 2.0
ROLLOUT_S = 3.0
"""A rollout and whatever a busy machine adds; PROXY_CALL_TIMEOUT_S, which must not count here, is 30."""

LONG = 200

Act = Callable[[SimulatedReplica], None]

HANGS: dict[str, tuple[Act, Act]] = {
    "its engine stands still": (SimulatedReplica.hang, SimulatedReplica.unhang),
    "its server stands still": (SimulatedReplica.freeze, SimulatedReplica.thaw),
}


def spread(replicas: list[SimulatedReplica], **settings: str) -> RunningProxy:
    """Return a proxy that gives each replica its turn, though the rollouts are all of one group."""
    return RunningProxy(*(replica.url for replica in replicas), PROXY_ROUTING="round_robin", **settings)


@pytest.mark.parametrize("how", HANGS)
def test_its_rollouts_move(adapter: Adapters, how: str) -> None:
    hang, unhang = HANGS[how]
    with simulators(2) as pair, spread(pair, PROXY_STALL_S=str(STALL_S)) as proxy:
        assert proxy.load("policy-v1", adapter(1)).status_code == 200
        with ThreadPoolExecutor(8) as pool:
            sent = [pool.submit(proxy.complete, "policy-v1", seed=seed, max_tokens=LONG) for seed in range(8)]
            wait_until(lambda: all(r.state()["in_flight"] for r in pair), what="both have some")
            hang(pair[0])
            hung_at = time.monotonic()
            for seed, one in enumerate(sent):
                assert one.result() == right_tokens(adapter(1), seed=seed, count=LONG)
            assert time.monotonic() - hung_at < STALL_S + ROLLOUT_S
            assert proxy.states() == ["down", "ready"]
        unhang(pair[0])
        proxy.wait_states("ready", "ready")
        wait_quiet(proxy, *pair)


def test_so_do_those_that_wait_for_a_connection_to_it(adapter: Adapters) -> None:
    with simulators(2) as pair, spread(pair, PROXY_STALL_S="1", PROXY_CONN_LIMIT="1") as proxy:
        assert proxy.load("policy-v1", adapter(1)).status_code == 200
        with ThreadPoolExecutor(6) as pool:
            sent = [pool.submit(proxy.complete, "policy-v1", seed=seed, max_tokens=LONG) for seed in range(6)]
            wait_until(lambda: proxy.inflight() == 6, what="all are there, most without a connection")
            pair[0].freeze()
            try:
                for seed, one in enumerate(sent):
                    assert one.result() == right_tokens(adapter(1), seed=seed, count=LONG)
            finally:
                pair[0].thaw()
        wait_quiet(proxy, *pair)


def test_one_whose_rollouts_get_answers_is_slow_and_keeps_them() -> None:
    with FlakyReplica() as slow, RunningProxy(slow.url, PROXY_STALL_S="0.6") as proxy:
        slow.spoil("GET /is_paused", "hangs")
        asked = slow.calls.count("GET /is_paused")
        while slow.calls.count("GET /is_paused") < asked + 3:  # each of these has hung for as long as it may
            assert proxy.completion("sim").status_code == 200
            assert proxy.states() == ["ready"]
        wait_until(lambda: proxy.states() == ["down"], what="nobody hears of it any more")
        slow.heal()
        proxy.wait_states("ready")
