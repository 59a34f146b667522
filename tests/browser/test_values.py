"""After a scripted run, what the page shows is what the API says."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from tests.browser.conftest import OpenPage, shoot, up_to_date
from tests.browser.rows import chips, figures, number, rows
from tests.simulated.checks import wait_quiet
from tests.support.proxies import RunningProxy
from tests.support.replicas import simulators, wait_until


def test_the_page_shows_what_the_api_says(open_page: OpenPage, adapter: Callable[[int], Path]) -> None:
    with (
        simulators(3, max_loras=4) as replicas,
        RunningProxy(*(replica.url for replica in replicas), PROXY_LORA_LOAD_TIMEOUT_S="3") as proxy,
    ):
        page = open_page(proxy)
        assert figures(page)["current"] == "base model"
        for version in (1, 2, 3):
            assert proxy.load(f"math-v{version}", adapter(version)).status_code == 200
            for prompt in range(6):
                for seed in range(3):
                    proxy.complete(f"math-v{version}", prompt=[prompt] * 200, max_tokens=20, seed=seed, temperature=1)
        proxy.unload("math-v1").raise_for_status()
        wait_until(lambda: proxy.policy("math-v1")["state"] == "retired", what="the first policy has gone")
        replicas[1].set_faults(load_error={"status": 500, "body": {"error": {"message": "no space left on device"}}})
        assert proxy.load("math-v4", adapter(4)).status_code == 500
        wait_quiet(proxy, *replicas)
        up_to_date(page)

        by_url = {upstream["url"]: upstream for upstream in proxy.stats()["upstreams"]}
        fleet = rows(page, "replicas")
        for row, replica in zip(fleet, proxy.replicas(), strict=True):
            assert replica["url"] == f"http://{row['name']}"
            assert row["word"] == replica["state"] == "ready"
            assert number(row["inflight"]) == replica["inflight"] == 0
            assert number(row["routed"]) == replica["routed"] == by_url[replica["url"]]["routed"] > 0
            assert chips(page, replica["url"]) == ["v2", "v3"]
            assert row["kv"].endswith(" of 262,144 tokens")
            for kind, told in (("reported", row["hits"]), ("predicted", row["predicted"])):
                hits = replica["prefix_cache"][kind]
                assert hits["prompt_tokens"] > 0
                assert f"{100 * hits['cached_tokens'] / hits['prompt_tokens']:.1f} %" in told
        assert sum(number(row["routed"]) for row in fleet) == 54

        known = {policy["name"]: policy for policy in proxy.client.get("/proxy/policies").json()["policies"]}
        assert [row["name"] for row in rows(page, "policies")] == ["math-v3", "math-v2"]
        for row in rows(page, "policies"):
            policy = known[row["name"]]
            assert (row["word"], number(row["version"])) == (policy["state"], policy["version"])
            assert number(row["leases"]) == policy["leases"] == 0
            assert row["held"] == f"{len(policy['held_by'])} of 3"

        syncs = {row["name"]: row for row in rows(page, "syncs")}
        assert list(syncs) == ["math-v4", "math-v3", "math-v2", "math-v1"]
        assert [row["word"] for row in syncs.values()] == ["failed", "served", "served", "served"]
        assert "no space left on device" in syncs["math-v4"]["text"] and "taking back" in syncs["math-v4"]["text"]
        for name, row in syncs.items():
            assert row["seconds"] == _duration(sum(known[name]["phases"].values()))

        router = proxy.stats()["router"]
        shown = figures(page)
        assert shown["ready"] == "3 of 3"
        assert shown["current"] == "v3"
        assert shown["slots"] == "2 of 4"
        assert shown["inflight"] == "0"
        placed = router["affinity"] + router["spilled"] + router["unmatched"]
        assert shown["affinity"] == f"{100 * router['affinity'] / placed:.1f} %"
        assert router["affinity"] > 0

        (last, *_) = rows(page, "events")
        assert last["message"]
        assert any("no space left on device" in row["message"] for row in rows(page, "events"))
        shoot(page, "values")


def test_the_charts_follow_the_rollouts(open_page: OpenPage, adapter: Callable[[int], Path]) -> None:
    with simulators(2) as replicas, RunningProxy(*(replica.url for replica in replicas)) as proxy:
        assert proxy.load("math-v1", adapter(1)).status_code == 200
        page = open_page(proxy)
        for seed in range(40):
            proxy.complete("math-v1", prompt=[7] * 300, max_tokens=10, seed=seed)
        page.wait("Number(document.querySelector('[data-field=rollouts]').textContent) > 0")
        page.wait("Number(document.querySelector('[data-field=tokens]').textContent.replace(',', '')) > 0")
        names = page.evaluate("[...document.querySelectorAll('.plot')].map((plot) => plot.getAttribute('aria-label'))")
        assert len(names) == 6
        hits = next(name for name in names if name.startswith("Prompt tokens found in a cache (%)"))
        assert re.search(r"predicted: now 9\d.*reported: now 9\d", hits), "39 of 40 prompts had been sent there before"
        again = open_page(proxy)
        told = again.evaluate("document.querySelector('.plot').getAttribute('aria-label')")
        assert "nothing yet" not in told, "what was before the page was opened is shown, too"


def test_where_the_rollouts_of_a_policy_are_and_how_full_each_replica_is(
    open_page: OpenPage, adapter: Callable[[int], Path]
) -> None:
    with simulators(2) as replicas, RunningProxy(*(replica.url for replica in replicas)) as proxy, ExitStack() as open_:
        assert proxy.load("math-v1", adapter(1)).status_code == 200
        page = open_page(proxy)
        for seed in range(3):
            body = {"model": "math-v1", "prompt": [seed] * 2000, "max_tokens": 2000, "stream": True}
            open_.enter_context(proxy.client.stream("POST", "/v1/completions", json=body))
        up_to_date(page)
        (policy,) = proxy.client.get("/proxy/policies").json()["policies"]
        assert sum(policy["in_flight"].values()) == policy["leases"] == 3
        (row,) = rows(page, "policies")
        for url, count in policy["in_flight"].items():
            assert f"{count} on {url.removeprefix('http://')}" in row["shares"]
        usage = max(replica.metric("vllm:kv_cache_usage_perc") for replica in replicas)
        assert usage > 0.005
        shown = "[...document.querySelectorAll('[data-field=kv]')].map((kv) => parseFloat(kv.textContent.slice(3)))"
        page.wait(f"{shown}.some((percent) => percent >= {100 * usage - 0.1})")


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 0.9995 else f"{round(seconds * 1000)} ms"
