"""PROXY_DISCOVER: replicas in a file or behind a host name join and leave by themselves, and a failed look changes
nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from proxy.demo.processes import free_port
from tests.simulated.checks import Traffic, WaitingProxy, assert_served_by_all, right_tokens, wait_quiet
from tests.simulated.conftest import Adapters
from tests.support.metrics import Scrape
from tests.support.name_server import NameServer, why_not
from tests.support.proxies import RunningProxy
from tests.support.replicas import SimulatedReplica, simulators, wait_until

QUICKLY = {"PROXY_DISCOVER_EVERY_S": "0.1"}
NAME = "vllm.replicas.test"


def _urls(proxy: RunningProxy) -> list[str]:
    return [replica["url"] for replica in proxy.replicas()]


def _replace(path: Path, *lines: str) -> None:
    """Replace the file at once, as one who is careful does."""
    new = path.with_suffix(".new")
    new.write_text("".join(f"{line}\n" for line in lines))
    new.rename(path)


def _fails(proxy: RunningProxy) -> float:
    return Scrape(proxy.client.get("/metrics").text).sum("lora_sync_lookups_total", outcome="failed")


@pytest.fixture
def listed(tmp_path: Path) -> Path:
    return tmp_path / "replicas"


@pytest.fixture
def replicas() -> Iterator[list[SimulatedReplica]]:
    with simulators(3) as replicas:
        yield replicas


def test_a_fleet_that_starts_empty_grows_and_shrinks(
    listed: Path, replicas: list[SimulatedReplica], adapter: Adapters
) -> None:
    with WaitingProxy(PROXY_DISCOVER=f"file:{listed}", PROXY_WAIT_READY_S="10", **QUICKLY) as proxy:
        health = proxy.client.get("/health")
        assert health.status_code == 503 and "the fleet has no replica" in health.text
        with ThreadPoolExecutor(2) as pool:
            # A proxy that was restarted: its clients know nothing of that, and TRL repeats no control call.
            early, load = pool.submit(proxy.complete, "sim"), pool.submit(proxy.load, "policy-v1", adapter(1))
            wait_until(lambda: _fails(proxy) > 1, what="it looks for the file")
            assert proxy.log().count("discovery.failed") == 1, "said once, however often"
            listed.write_text(f"# two of them\n{replicas[0].url}\n{replicas[1].url}  # the other\n")
            assert early.result() == right_tokens("base:sim")
            assert load.result().status_code == 200, load.result().text
        proxy.wait_states("ready", "ready")
        assert proxy.client.get("/health").status_code == 200
        with Traffic(proxy, {"policy-v1": adapter(1)}) as traffic:
            traffic.wait_more(10)
            _replace(listed, replicas[0].url, replicas[2].url)
            wait_until(lambda: _urls(proxy) == [replicas[0].url, replicas[2].url], what="one leaves, one comes")
            proxy.wait_states("ready", "ready")
            assert_served_by_all([replicas[0], replicas[2]], "policy-v1", adapter(1))
            traffic.wait_more(20)
        wait_quiet(proxy, *replicas)


def test_one_that_vanishes_keeps_its_rollouts(
    listed: Path, replicas: list[SimulatedReplica], adapter: Adapters
) -> None:
    _replace(listed, *(replica.url for replica in replicas[:2]))
    with WaitingProxy(PROXY_DISCOVER=f"file:{listed}", **QUICKLY) as proxy, ThreadPoolExecutor(8) as pool:
        proxy.wait_states("ready", "ready")
        assert proxy.load("policy-v1", adapter(1)).status_code == 200
        pending = [pool.submit(proxy.completion, "policy-v1", max_tokens=150, prompt=[seed]) for seed in range(8)]
        wait_until(lambda: all(replica.state()["in_flight"] > 1 for replica in replicas[:2]), what="both have some")
        _replace(listed, replicas[0].url)
        proxy.wait_states("ready", "draining")
        assert "does not list it any more" in proxy.replicas()[1]["reason"]
        for seed, one in enumerate(pending):
            answer = one.result()
            assert answer.json()["choices"][0]["token_ids"] == right_tokens(adapter(1), prompt=[seed], count=150)
        assert {one.result().headers["X-Proxy-Upstream"] for one in pending} == {"0", "1"}
        assert proxy.stats()["router"]["retried"] == 0
        proxy.wait_states("ready")


@pytest.mark.parametrize(
    "spoil", [Path.unlink, lambda p: p.write_text(""), lambda p: p.write_text("http://127.0.0.1:9")]
)
def test_a_file_that_is_not_whole_changes_nothing(
    listed: Path, replicas: list[SimulatedReplica], spoil: Callable[[Path], object]
) -> None:
    _replace(listed, replicas[0].url)
    with WaitingProxy(PROXY_DISCOVER=f"file:{listed}", **QUICKLY) as proxy:
        proxy.wait_states("ready")
        spoil(listed)
        wait_until(lambda: _fails(proxy) > 2, what="it has looked")
        assert (_urls(proxy), proxy.states()) == ([replicas[0].url], ["ready"])
        assert proxy.log().count("discovery.failed") == 1
        _replace(listed, replicas[1].url)
        wait_until(lambda: _urls(proxy) == [replicas[1].url], what="it follows again")
        assert "can be read again" in proxy.log()


def test_replicas_that_are_listed_elsewhere_do_not_wait_for_a_list_that_fails(listed: Path) -> None:
    with SimulatedReplica() as static, RunningProxy(static.url, PROXY_DISCOVER=f"file:{listed}") as proxy:
        assert proxy.complete("sim") == right_tokens("base:sim")
        assert proxy.log().count("discovery.failed") == 1


def test_what_was_listed_or_decided_elsewhere_is_not_touched(listed: Path, replicas: list[SimulatedReplica]) -> None:
    static, added, found = (replica.url for replica in replicas)
    _replace(listed, static, found)
    with RunningProxy(static, PROXY_DISCOVER=f"file:{listed}", **QUICKLY) as proxy:
        wait_until(lambda: _urls(proxy) == [static, found], what="it is found")
        assert proxy.client.post("/proxy/replicas", json={"url": added}).status_code == 200
        assert proxy.client.request("DELETE", "/proxy/replicas", json={"url": found}).status_code == 200
        other = f"http://127.0.0.1:{free_port()}"
        _replace(listed, found, other)
        wait_until(lambda: other in _urls(proxy), what="it has looked again")
        assert _urls(proxy) == [static, added, other], "the removed one stays away"
        _replace(listed, "# nobody")
        wait_until(lambda: other not in _urls(proxy), what="it has looked again")
        assert _urls(proxy) == [static, added]
        _replace(listed, found)
        wait_until(lambda: found in _urls(proxy), what="it is new again")


@pytest.fixture
def name_server() -> Iterator[NameServer]:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with NameServer(NAME) as server:
        yield server


def test_every_address_of_a_name_is_a_replica(name_server: NameServer, adapter: Adapters) -> None:
    with (
        SimulatedReplica(host="127.0.0.2") as first,
        SimulatedReplica(host="127.0.0.3", port=int(first.url.rpartition(":")[2])) as second,
    ):
        port = first.url.rpartition(":")[2]
        name_server.addresses = ["127.0.0.2"]
        proxy = WaitingProxy(PROXY_DISCOVER=f"dns:{NAME}:{port}", **QUICKLY)
        proxy.within = name_server.within()
        with proxy:
            proxy.wait_states("ready")
            assert proxy.load("policy-v1", adapter(1)).status_code == 200
            name_server.addresses = ["127.0.0.3", "127.0.0.2"]
            proxy.wait_states("ready", "ready")
            assert _urls(proxy) == [first.url, second.url]
            assert_served_by_all([first, second], "policy-v1", adapter(1))
            name_server.broken = True
            wait_until(lambda: _fails(proxy) > 1, what="it has failed")
            name_server.broken, name_server.addresses = False, []
            wait_until(lambda: _fails(proxy) > 3, what="it has failed otherwise")
            assert proxy.states() == ["ready", "ready"], "a name server that fails moves nobody"
            assert proxy.log().count("discovery.failed") == 1
            name_server.addresses = ["127.0.0.3", "::1"]
            wait_until(lambda: _urls(proxy) == [second.url, f"http://[::1]:{port}"], what="it follows again")
