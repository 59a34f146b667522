"""kill -9 of the proxy while it unloads, and while it pauses: the next one goes on from what it finds (P10)."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from tests.simulated.checks import Traffic, assert_held_by_none, held, models_of, right_tokens, wait_quiet
from tests.simulated.conftest import Adapters
from tests.support.proxies import RunningProxy
from tests.support.replicas import simulators, wait_until

pytestmark = pytest.mark.timeout(60)  # the proxy starts twice


def restarted_in(proxy: RunningProxy, begin: Callable[[], object], reached: Callable[[], bool]) -> None:
    """Begin a call, kill the proxy once it is `reached`, and start the next one."""
    with ThreadPoolExecutor(1) as pool:
        begun = pool.submit(begin)
        wait_until(reached, what="it is under way")
        proxy.kill()
        begun.exception()
    proxy.start()


def test_a_policy_that_some_have_unloaded_comes_back_whole_and_can_be_unloaded_again(adapter: Adapters) -> None:
    with simulators(2) as pair, RunningProxy(*(r.url for r in pair)) as proxy:
        for version in (1, 2):
            assert proxy.load(f"kept-v{version}", adapter(version)).status_code == 200
        pair[1].set_faults(unload_delay_s=4)  # it is carried out even though its caller is gone
        restarted_in(proxy, lambda: proxy.unload("kept-v1"), lambda: "kept-v1" not in held(pair[0]))
        pair[1].clear_faults()
        wanted = ["kept-v1", "kept-v2", "sim"]  # in the order in which they are found, which is either
        wait_until(lambda: sorted(models_of(proxy)) == wanted, what="what one still lists is adopted")
        with Traffic(proxy, {"kept-v1": adapter(1), "kept-v2": adapter(2)}) as traffic:
            traffic.wait_more(20)
        assert proxy.unload("kept-v1").status_code == 200
        wait_until(lambda: not any("kept-v1" in held(replica) for replica in pair), what="it is unloaded")
        assert_held_by_none(pair, "kept-v1")
        assert proxy.complete("kept-v2") == right_tokens(adapter(2))
        wait_quiet(proxy, *pair)


def test_a_pause_that_some_have_carried_out_is_told_and_ended_by_resume(adapter: Adapters) -> None:
    with simulators(2) as pair, RunningProxy(*(r.url for r in pair), PROXY_PAUSE="real") as proxy:
        assert proxy.load("kept-v1", adapter(1)).status_code == 200
        pair[1].freeze()
        try:
            restarted_in_pause = ThreadPoolExecutor(1)
            begun = restarted_in_pause.submit(proxy.client.post, "/pause?mode=keep")
            wait_until(lambda: bool(pair[0].client.get("/is_paused").json()["is_paused"]), what="one is paused")
            proxy.kill()
            assert isinstance(begun.exception(), httpx2.TransportError)
            restarted_in_pause.shutdown()
        finally:
            pair[1].thaw()
        proxy.start()
        wait_until(lambda: "/resume" in proxy.client.get("/health").text or "resume" in proxy.log(), what="it is told")
        assert proxy.client.post("/resume").status_code == 200
        for replica in pair:
            assert not replica.client.get("/is_paused").json()["is_paused"]
        with Traffic(proxy, {"kept-v1": adapter(1)}) as traffic:
            wait_until(lambda: set(traffic.by_replica) == {"0", "1"}, what="both serve again")
        wait_quiet(proxy, *pair)
