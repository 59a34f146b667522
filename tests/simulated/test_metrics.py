"""What /metrics says after a scripted run, and that docs/metrics.md lists exactly that."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import httpx2
import pytest

from tests.simulated.checks import wait_quiet
from tests.simulated.conftest import Adapters
from tests.support.metrics import Scrape, documented
from tests.support.proxies import RunningProxy
from tests.support.replicas import SimulatedReplica, simulators, wait_until
from tests.support.tiny_model import REPO
from trainer_client import TrainerClient

PROMPT = [7] * 64


def scrape(proxy: RunningProxy) -> Scrape:
    return Scrape(proxy.client.get("/metrics").text)


def test_a_scripted_run_is_counted_as_it_was(adapter: Adapters) -> None:
    with simulators(2, max_loras=4) as pair, RunningProxy(*(replica.url for replica in pair)) as proxy:
        for version in (1, 2, 3):
            assert proxy.load(f"run-v{version}", adapter(version)).status_code == 200
        assert proxy.load("run-v3", adapter(3)).status_code == 200  # known already
        for version, count in ((1, 2), (3, 5)):
            for _ in range(count):
                proxy.complete(f"run-v{version}", prompt=PROMPT)
        proxy.complete("sim", prompt=PROMPT)
        assert proxy.client.post("/v1/completions", content=b"{").status_code == 400
        assert proxy.completion("sim", max_tokens=0).status_code == 400
        assert proxy.completion("run-v9").status_code == 404
        assert proxy.client.post("/tokenize", json={"prompt": "not a rollout"}).status_code == 200
        proxy.unload("run-v1")
        wait_until(lambda: proxy.policy("run-v1")["files_deletable"], what="it is unloaded everywhere")
        seen = scrape(proxy)
        # Every rollout once, by how it ended.
        answers = {s.labels["outcome"]: s.value for s in seen.samples if s.name == "lora_sync_answers_total"}
        assert answers == {"answered": 8, "bad_request": 1, "refused": 1, "unknown_policy": 1}
        # Every try, by route and staleness.
        tries: Counter[tuple[str, str]] = Counter()
        for sample in seen.samples:
            if sample.name == "lora_sync_rollouts_total":
                tries[sample.labels["outcome"], sample.labels["staleness"]] += int(sample.value)
        assert tries == {("answered", "2"): 2, ("answered", "0"): 5, ("answered", "none"): 1, ("refused", "none"): 1}
        assert seen.sum("lora_sync_rollouts_total", route="affinity") == proxy.stats()["router"]["affinity"] == 5
        assert seen.sum("lora_sync_rollouts_total") == sum(replica["routed"] for replica in proxy.replicas()) - 1
        # The histograms hold what was answered.
        for name in ("rollout", "first_byte", "overhead"):
            assert seen.sum(f"lora_sync_{name}_seconds_count") == 8
        parts = [seen.sum(f"lora_sync_{name}_seconds_sum") for name in ("overhead", "first_byte", "rollout")]
        assert 0 < parts[0] < parts[1] <= parts[2]
        for moment in ("start", "end"):
            assert seen.sum("lora_sync_staleness_versions_count", at=moment) == 7
            assert seen.sum("lora_sync_staleness_versions_sum", at=moment) == 4
        assert seen.sum("lora_sync_generated_tokens_total") == 8 * 8
        assert seen.sum("lora_sync_answer_bytes_total") > 8 * 100
        # What routing expected of the prefix cache, and what the replicas tell.
        assert seen.sum("lora_sync_reported_prompt_tokens_total") == 8 * len(PROMPT)
        assert seen.sum("lora_sync_predicted_cached_tokens_total") > 0
        real = seen.sum("lora_sync_reported_cached_tokens_total")
        assert 0.5 < real / seen.sum("lora_sync_predicted_cached_tokens_total") < 1.5
        assert seen.sum("lora_sync_prefix_index_pieces") == proxy.stats()["router"]["tracked_blocks"] > 0
        # Policies and syncs.
        assert seen.sum("lora_sync_current_version", run="") == 3
        assert seen.sum("lora_sync_policies", state="live") == 2
        assert seen.sum("lora_sync_policy_slots") == 4
        assert seen.sum("lora_sync_announcements_total", outcome="live") == 3
        assert seen.sum("lora_sync_announcements_total", outcome="known") == 1
        for phase in ("check", "name", "gate", "slot", "load", "verify", "commit"):
            assert seen.sum("lora_sync_load_phase_seconds_count", phase=phase) == 3
        for replica in ("0", "1"):
            assert seen.sum("lora_sync_replica_load_seconds_count", replica=replica, phase="verify") == 3
            assert seen.sum("lora_sync_load_tries_total", replica=replica) == 3
            assert seen.sum("lora_sync_replica_state", replica=replica, state="ready") == 1
            assert seen.sum("lora_sync_replica_state", replica=replica) == 1
            assert seen.sum("lora_sync_replica_policies", replica=replica) == 2
            assert seen.sum("lora_sync_replica_joins_total", replica=replica) == 1
        assert seen.sum("lora_sync_events_total", kind="policy.live") == 3
        assert seen.sum("lora_sync_in_flight") == 0
        assert seen.sum("lora_sync_loop_lag_seconds_count") > 0


def test_what_goes_wrong_is_counted(adapter: Adapters) -> None:
    with simulators(2) as pair, RunningProxy(*(replica.url for replica in pair)) as proxy:
        pair[0].set_faults(late={"attempts": 2})
        assert proxy.load("run-v1", adapter(1)).status_code == 200
        pair[0].set_faults(late=None, load_error={"status": 400})
        assert proxy.load("run-v2", adapter(2)).status_code == 500
        pair[0].set_faults(load_error=None, abort_answers=True)
        for seed in range(4):
            proxy.complete("run-v1", prompt=[seed] * 40)
        pair[0].clear_faults()
        with pytest.raises(httpx2.ReadTimeout):
            proxy.client.post(
                "/v1/completions", json={"model": "run-v1", "prompt": [1], "max_tokens": 2000}, timeout=0.3
            )
        assert proxy.client.post("/pause?mode=wait").status_code == 200
        assert scrape(proxy).sum("lora_sync_pause_intended") == 1
        assert proxy.client.post("/resume").status_code == 200
        wait_quiet(proxy, *pair)
        seen = scrape(proxy)
        assert seen.sum("lora_sync_events_total", kind="load.late", replica="0") == 2
        assert seen.sum("lora_sync_load_tries_total", replica="0") > seen.sum("lora_sync_load_tries_total", replica="1")
        assert seen.sum("lora_sync_events_total", kind="policy.failed", level="warning") == 1
        assert seen.sum("lora_sync_announcements_total", outcome="load_failed") == 1
        assert seen.sum("lora_sync_load_phase_seconds_count", phase="rollback") == 1
        caught = seen.sum("lora_sync_failed_tries_total", replica="0", cause="aborted")
        assert caught == seen.sum("lora_sync_rollouts_total", outcome="failed") > 0
        assert seen.sum("lora_sync_answers_total", outcome="client_gone") == 1
        assert seen.sum("lora_sync_rollouts_total", outcome="cancelled") == 1
        for replica in ("0", "1"):
            assert seen.sum("lora_sync_paused_seconds_total", replica=replica) > 0
        assert seen.sum("lora_sync_pause_intended") == 0


def test_rollouts_in_flight_show_by_replica_and_by_staleness(adapter: Adapters) -> None:
    with simulators(1, max_loras=4) as (replica,), RunningProxy(replica.url) as proxy:
        assert proxy.load("run-v1", adapter(1)).status_code == 200
        body = {"model": "run-v1", "prompt": [1, 2, 3], "max_tokens": 2000, "stream": True}
        with proxy.client.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            assert scrape(proxy).sum("lora_sync_policy_in_flight", staleness="0") == 1
            for version in (2, 3):
                assert proxy.load(f"run-v{version}", adapter(version)).status_code == 200
            seen = scrape(proxy)
            assert seen.sum("lora_sync_in_flight", replica="0") == 1
            assert seen.sum("lora_sync_policy_in_flight", staleness="2") == 1
            assert seen.sum("lora_sync_policy_in_flight") == 1
            assert seen.sum("lora_sync_stalest_in_flight_versions") == 2
            assert seen.sum("lora_sync_load_tokens", replica="0") > 0
        wait_quiet(proxy, replica)
        assert scrape(proxy).sum("lora_sync_stalest_in_flight_versions") == 0


def test_an_announced_policy_tells_its_run_and_step(adapter: Adapters, tmp_path: Path) -> None:
    with (
        simulators(1) as (replica,),
        RunningProxy(replica.url) as proxy,
        TrainerClient(proxy.url, store=tmp_path, run="math", max_staleness=2) as client,
    ):
        client.publish(adapter(1), step=40)
        client.publish(adapter(2), step=44)
        seen = scrape(proxy)
        assert seen.sum("lora_sync_current_version", run="math") == 2
        assert seen.sum("lora_sync_current_step", run="math") == 44
        assert 0 <= seen.sum("lora_sync_current_age_seconds", run="math") < 60


def test_the_page_lists_every_metric_as_it_is(pair: list[SimulatedReplica], adapter: Adapters, tmp_path: Path) -> None:
    with (
        RunningProxy(*(replica.url for replica in pair)) as proxy,
        TrainerClient(proxy.url, store=tmp_path, run="page", max_staleness=2) as client,
    ):
        policy = client.publish(adapter(1), step=1)
        pair[0].set_faults(abort_answers=True)
        for seed in range(4):
            proxy.complete(policy.name, prompt=[seed] * 40)
        pair[0].clear_faults()
        body = {"model": policy.name, "prompt": [1], "max_tokens": 2000, "stream": True}
        with proxy.client.stream("POST", "/v1/completions", json=body):
            seen = scrape(proxy)
    rows = {row.name: row for row in documented()}
    assert seen.types == {name: row.type for name, row in rows.items()}
    assert seen.labels() == {name: {row.labels} for name, row in rows.items()}


def test_the_kinds_of_events_on_the_page_exist(pair: list[SimulatedReplica]) -> None:
    page = (REPO / "docs" / "metrics.md").read_text()
    told = set(re.findall(r"`((?:policy|replica|load|pause)\.\w+)`", page))
    code = "\n".join(path.read_text() for path in (REPO / "proxy").rglob("*.py"))
    states = {"policy.failed", "replica.down", "replica.joining", "replica.ready", "replica.quarantined"}
    outcomes = {"load.late", "load.torn", "load.unknown"}
    assert {kind for kind in told if f'"{kind}"' not in code} == states | outcomes
    assert all(text in code for text in ('f"policy.{state}"', 'f"replica.{state}"', 'f"load.{outcome}"'))


def test_no_prompt_no_token_no_policy_is_in_it(pair: list[SimulatedReplica], adapter: Adapters) -> None:
    with RunningProxy(*(replica.url for replica in pair), HF_TOKEN="hf_secret") as proxy:
        assert proxy.load("nameless-v1", adapter(1)).status_code == 200
        proxy.complete("nameless-v1", prompt="a private prompt")
        text = json.dumps(scrape(proxy).text)
        assert not any(word in text for word in ("nameless", "private", "hf_secret"))
