"""One sync after the other on a fleet of one, two and eight, with rollouts all the while."""

from __future__ import annotations

import pytest

from tests.simulated.checks import Traffic, assert_served_by_all, held, models_of, wait_quiet
from tests.simulated.conftest import Adapters
from tests.support.proxies import RunningProxy
from tests.support.replicas import simulators, wait_until

WINDOW = 2


@pytest.mark.timeout(60)
@pytest.mark.parametrize("count", [1, 2, 8])
def test_a_window_of_policies_moves_on(adapter: Adapters, count: int) -> None:
    with simulators(count, max_loras=WINDOW + 1) as replicas, RunningProxy(*(r.url for r in replicas)) as proxy:
        assert proxy.load("run-v1", adapter(1)).status_code == 200
        with Traffic(proxy, {"run-v1": adapter(1)}, threads=8) as traffic:
            traffic.wait_more(5)
            for version in range(2, 6):
                assert proxy.client.post("/pause?mode=keep").status_code == 200
                assert proxy.load(f"run-v{version}", adapter(version)).status_code == 200
                assert proxy.client.post("/resume").status_code == 200
                assert_served_by_all(replicas, f"run-v{version}", adapter(version))
                traffic.serve(f"run-v{version}", adapter(version))
                traffic.weights.pop(f"run-v{version - WINDOW}", None)
                traffic.wait_more(10)
                proxy.unload(f"run-v{version - WINDOW}")
            wait_until(lambda: len(traffic.by_replica) == count, what="every replica is used")
        live = ["run-v4", "run-v5"]
        assert models_of(proxy) == ["sim", *live]
        wait_until(lambda: all(held(r).keys() == {"sim", *live} for r in replicas), what="the old ones are unloaded")
        assert proxy.client.get("/get_world_size").json() == {"world_size": count}
        wait_quiet(proxy, *replicas)
