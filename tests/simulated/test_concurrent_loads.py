"""Several loads at once, of one name or of many: one set of weights for each name, whoever comes first (P1)."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

import pytest

from tests.simulated.checks import Traffic, assert_served_by_all, held, right_tokens, together, wait_quiet
from tests.simulated.conftest import Adapters
from tests.support.proxies import RunningProxy
from tests.support.replicas import SimulatedReplica, wait_until


def _loads_of(replica: SimulatedReplica) -> int:
    return int(replica.state()["calls"].get("POST /v1/load_lora_adapter", 0))


def test_identical_announcements_are_one_load(
    pair: list[SimulatedReplica], proxy: RunningProxy, adapter: Adapters
) -> None:
    before = [_loads_of(replica) for replica in pair]
    answers = together(*[lambda: proxy.load("same", adapter(1))] * 8)
    assert [answer.status_code for answer in answers] == [200] * 8
    assert [_loads_of(replica) for replica in pair] == [count + 1 for count in before]
    assert proxy.load("same", adapter(1)).status_code == 200
    assert_served_by_all(pair, "same", adapter(1))


def test_one_name_with_different_weights_means_the_last_of_them(
    pair: list[SimulatedReplica], proxy: RunningProxy, adapter: Adapters
) -> None:
    answers = together(*[lambda s=seed: proxy.load("contested", adapter(s)) for seed in (1, 2, 3)])
    assert [answer.status_code for answer in answers] == [200] * 3, "nobody uses it, so each takes the name over"
    wait_until(lambda: all(len(replica.models()) == 2 + ("same" in held(replica)) for replica in pair), what="one left")
    last = Path(proxy.policy("contested")["path"])
    assert_served_by_all(pair, "contested", last)
    assert proxy.complete("contested") == right_tokens(last)


def test_identical_announcements_fail_together_and_the_next_one_tries_again(
    pair: list[SimulatedReplica], proxy: RunningProxy, adapter: Adapters
) -> None:
    pair[1].set_faults(load_error={"status": 500, "attempts": 1, "name": "second-chance"})
    try:
        answers = together(*[lambda: proxy.load("second-chance", adapter(1))] * 2)
    finally:
        pair[1].clear_faults()
    assert sorted(answer.status_code for answer in answers) == [500, 500]
    assert proxy.load("second-chance", adapter(1)).status_code == 200
    assert_served_by_all(pair, "second-chance", adapter(1))


def test_many_names_at_once(pair: list[SimulatedReplica], proxy: RunningProxy, adapter: Adapters) -> None:
    names = {f"many-{seed}": adapter(seed) for seed in range(10)}
    answers = together(*[lambda n=n, d=d: proxy.load(n, d) for n, d in names.items()])
    assert [answer.status_code for answer in answers] == [200] * 10
    for name, directory in names.items():
        assert_served_by_all(pair, name, directory)
    with Traffic(proxy, names) as traffic:
        traffic.wait_more(40)
    for name in names:
        assert proxy.unload(name).status_code == 200
    wait_quiet(proxy, *pair)


@pytest.mark.parametrize(
    "name", ["org/run-v1", "naïve ☃ v1", "a%2Fb", "with space", "quote'\"\\", "x" * 300, "-v3", "..", "?#&"]
)
def test_odd_names(pair: list[SimulatedReplica], proxy: RunningProxy, adapter: Adapters, name: str) -> None:
    assert proxy.load(name, adapter(1)).status_code == 200
    assert proxy.complete(name) == right_tokens(adapter(1))
    assert_served_by_all(pair, name, adapter(1))
    shown = proxy.client.get(f"/proxy/policies/{quote(name, safe='')}")
    if name == "..":  # clients themselves resolve it, whatever is quoted
        shown = next(p for p in proxy.client.get("/proxy/policies").json()["policies"] if p["name"] == name)
    else:
        shown = shown.json()
    assert (shown["name"], shown["state"], len(shown["held_by"])) == (name, "live", 2)
    assert proxy.unload(name).status_code == 200
    wait_until(lambda: not any(name in held(replica) for replica in pair), what="it is unloaded")
