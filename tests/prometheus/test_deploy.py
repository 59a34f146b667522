"""What deploy/ ships works: Debian's Prometheus scrapes a running proxy, every panel shows data, every alert fires."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest
from ruamel.yaml import YAML

from proxy.simulator.adapters import write_adapter
from tests.support.metrics import documented
from tests.support.prometheus import DASHBOARD, DEPLOY, Prometheus, panel_queries, program, rules
from tests.support.proxies import RunningProxy
from tests.support.replicas import SimulatedReplica, simulators, wait_until

LONG = {"prompt": [1, 2, 3], "max_tokens": 4000, "stream": True}
"""Forty seconds of a simulator's time."""


def test_promtool_finds_nothing_wrong() -> None:
    done = subprocess.run(
        [program("promtool"), "check", "config", "--lint=all", "--lint-fatal", str(DEPLOY / "prometheus.yml")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_queries_name_documented_metrics_only() -> None:
    known = {row.name for row in documented()}
    text = DASHBOARD.read_text() + (DEPLOY / "rules.yml").read_text()
    named = {re.sub(r"_(bucket|count|sum)$", "", name) for name in re.findall(r"\blora_sync_\w+", text)}
    assert named - known == set()


def test_the_dashboard_is_one_that_grafana_takes() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    assert [variable["name"] for variable in dashboard["templating"]["list"]] == ["datasource", "instance"]
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24 and panel["description"] and panel["targets"], panel["title"]
        assert all(target["datasource"]["uid"] == "${datasource}" for target in panel["targets"])
        # What Grafana's own types (@grafana/schema 13.2.3) ask for beside what they leave open.
        legend = panel["options"].get("legend", {"showLegend": True, "calcs": []})
        assert legend["showLegend"] and legend["calcs"] == [], panel["title"]
        if panel["type"] == "timeseries":
            assert {"legend", "tooltip"} <= panel["options"].keys(), panel["title"]
        for other in panels:
            assert other is panel or not _overlap(place, other["gridPos"]), (panel["title"], other["title"])


def _overlap(a: dict[str, int], b: dict[str, int]) -> bool:
    beside = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
    return not beside and a["y"] < b["y"] + b["h"] and b["y"] < a["y"] + a["h"]


@pytest.mark.parametrize(("key", "health"), [("the-key, another", "up"), ("", "up"), ("wrong", "down")])
def test_compose_gives_prometheus_the_key(tmp_path: Path, key: str, health: str) -> None:
    (script,) = YAML(typ="safe").load(DEPLOY.parent / "compose.yaml")["services"]["prometheus"]["command"]
    script = script.partition("exec ")[0].replace("$$", "$")
    script = script.replace("/tmp", str(tmp_path)).replace("/config/", f"{DEPLOY}/")
    subprocess.run(["sh", "-ec", script], env={"PROXY_API_KEY": key, "PATH": "/usr/bin:/bin"}, check=True)
    config = (tmp_path / "prometheus.yml").read_text().replace("proxy:8000", "localhost:8000")
    keys = {"PROXY_API_KEY": "the-key" if key else ""}
    with (
        SimulatedReplica() as replica,
        RunningProxy(replica.url, **keys) as proxy,
        Prometheus(f"127.0.0.1:{proxy.port}", tmp_path, config) as prometheus,
    ):
        wanted = {"lora-sync-proxy": health, "vllm": health}
        wait_until(lambda: prometheus.scrapes() == wanted, limit_s=15, what=f"both scrapes are {health}")


@contextmanager
def traffic(proxy: RunningProxy, *models: str) -> Iterator[None]:
    """Keep rollouts of these policies going, whatever becomes of them."""
    stop = threading.Event()

    def work(model: str) -> None:
        with httpx2.Client(base_url=proxy.url, timeout=15, trust_env=False) as client:
            while not stop.is_set():
                for prompt in range(4):
                    body = {"model": model, "prompt": [prompt] * 96, "max_tokens": 4}
                    try:
                        client.post("/v1/completions", json=body)
                    except httpx2.HTTPError:
                        stop.wait(0.1)

    threads = [threading.Thread(target=work, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


@pytest.mark.timeout(400)
def test_every_panel_has_data_and_every_alert_fires_when_it_should(tmp_path: Path) -> None:
    program("prometheus")
    adapters = [write_adapter(tmp_path / f"v{version}", seed=version) for version in range(5)]
    with (
        simulators(2, max_loras=3) as replicas,
        RunningProxy(*(r.url for r in replicas), PROXY_UNLOAD_WAIT_S="600", PROXY_START_WAIT_S="0") as proxy,
        Prometheus(f"127.0.0.1:{proxy.port}", tmp_path) as prometheus,
    ):
        fired: set[str] = set()

        def fires(name: str) -> None:
            prometheus.wait_firing(name)
            fired.add(name)

        # In peace: both jobs are scraped, and nothing fires.
        replicas[0].set_faults(late={"attempts": 1})
        for version in (1, 2):
            assert proxy.load(f"v{version}", adapters[version]).status_code == 200
        with traffic(proxy, "v1", "v2", "sim"):
            reported = "lora_sync:prefix_hit_ratio:reported"
            wait_until(lambda: (prometheus.value(reported) or 0) > 0.5, limit_s=30, what="prompts are found in caches")
            assert prometheus.scrapes() == {"lora-sync-proxy": "up", "vllm": "up"}
            assert prometheus.value("vllm:lora_requests_info") is None
            assert prometheus.firing() == set()

            replicas[0].set_faults(late=None, load_error={"status": 400})
            assert proxy.load("v3", adapters[3]).status_code == 500
            fires("LoraSyncSyncFailing")
            replicas[0].clear_faults()

            replicas[0].set_faults(abort_answers=True)
            wait_until(
                lambda: bool(prometheus.value("sum(rate(lora_sync_failed_tries_total[6s])) > 0")),
                limit_s=30,
                what="aborts are caught",
            )
            for replica in replicas:
                replica.set_faults(abort_answers=False, generations_status=500)
            fires("LoraSyncRolloutsLost")
            for replica in replicas:
                replica.clear_faults()

        with caches_emptied(proxy, replicas):
            fires("LoraSyncHitRateFell")

        with proxy.client.stream("POST", "/v1/completions", json={"model": "v1", **LONG}):
            assert proxy.unload("v2").status_code == 200
            for version in (3, 4):
                wait_until(lambda v=version: proxy.load(f"v{v}", adapters[v]).status_code == 200, what="it is loaded")  # type: ignore[misc]
                proxy.unload("v3")
            fires("LoraSyncStalenessAboveLimit")
            fires("LoraSyncInFlightStuck")

        with held_up(proxy):
            fires("LoraSyncLoopLag")

        replicas[0].kill()
        fires("LoraSyncReplicaNotReady")

        assert [(title, query) for title, query in panel_queries() if not prometheus.has_data(query)] == []

        proxy.kill()
        fires("LoraSyncProxyDown")
        assert fired == set(rules())
        proxy.start(healthy=False)


@contextmanager
def caches_emptied(proxy: RunningProxy, replicas: list[SimulatedReplica]) -> Iterator[None]:
    """Send one rollout after the other, and empty the replicas' prefix caches between them behind the proxy's back."""
    stop = threading.Event()

    def work() -> None:
        with httpx2.Client(timeout=15, trust_env=False) as client:
            while not stop.is_set():
                body = {"model": "v1", "prompt": [9] * 96, "max_tokens": 4}
                client.post(f"{proxy.url}/v1/completions", json=body)
                for replica in replicas:
                    client.post(f"{replica.url}/reset_prefix_cache")

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@contextmanager
def held_up(proxy: RunningProxy) -> Iterator[None]:
    """Stop the proxy's process again and again, for as long as a busy machine might."""
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            proxy.process.send_signal(signal.SIGSTOP)
            time.sleep(0.3)
            proxy.process.send_signal(signal.SIGCONT)
            stop.wait(0.3)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
