"""PROXY_DISCOVER=jobs: through the real huggingface_hub: replicas that are Jobs join, leave and say how they stand."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from huggingface_hub import HfApi, JobInfo, JobStage

from tests.hub.hub_process import TOKEN, USER
from tests.hub.offline_hub import OfflineHub
from tests.simulated.checks import BASE, WaitingProxy, right_tokens
from tests.support.metrics import Scrape
from tests.support.proxies import RunningProxy
from tests.support.replicas import wait_until

LABELS = {"run": "math", "role": "replica"}
_REPLICA = ["python", "-m", "proxy.simulator", "--port", "8000"]


@pytest.fixture
def hub() -> Iterator[OfflineHub]:
    with OfflineHub() as hub:
        yield hub


def _run(api: HfApi, **options: Any) -> JobInfo:
    options = {"labels": LABELS, "expose": [8000], **options}
    return api.run_job(image="vllm/vllm-openai", command=_REPLICA, **options)


def _url(job: JobInfo) -> str:
    assert job.status.expose_urls
    return job.status.expose_urls[0]


def _proxy(hub: OfflineHub, **environment: str) -> WaitingProxy:
    environment = {"PROXY_DISCOVER_EVERY_S": "0.1", **hub.environment(), **environment}
    return WaitingProxy(PROXY_DISCOVER="jobs:run=math,role=replica", **environment)


def _urls(proxy: RunningProxy) -> list[str]:
    return [replica["url"] for replica in proxy.replicas()]


def _fails(proxy: RunningProxy) -> float:
    return Scrape(proxy.client.get("/metrics").text).sum("lora_sync_lookups_total", outcome="failed")


def test_jobs_come_and_go(hub: OfflineHub) -> None:
    api = hub.api()
    with _proxy(hub) as proxy:
        first = _run(api)
        _run(api, labels={"run": "math", "role": "trainer"})
        _run(api, labels={"run": "other", "role": "replica"})
        proxy.wait_states("ready")
        assert proxy.complete("sim") == right_tokens(BASE)
        second = _run(api)
        proxy.wait_states("ready", "ready")
        assert _urls(proxy) == [_url(first), _url(second)]
        assert proxy.replicas()[1]["about"] == f"its Job {second.id} is RUNNING"
        api.cancel_job(job_id=first.id)
        wait_until(lambda: _urls(proxy) == [_url(second)], what="it has left")
        assert f"its Job {first.id} is CANCELED" in proxy.log()
        assert TOKEN not in proxy.log()


def test_a_job_that_starts_and_one_that_dies_say_so(hub: OfflineHub) -> None:
    hub.set_faults(scheduling_s=2)
    api = hub.api()
    with _proxy(hub) as proxy:
        job = _run(api)
        said = f"its Job {job.id} is SCHEDULING"
        wait_until(lambda: any(said in replica["reason"] for replica in proxy.replicas()), what="it says why")
        proxy.wait_states("ready")
        hub.kill_job(job.id)
        wait_until(lambda: not proxy.replicas(), what="it has left")
        assert f"its Job {job.id} is ERROR: Job failed with exit code" in proxy.log()


@pytest.mark.timeout(60)  # huggingface_hub asks six times within 23 s before it says so
@pytest.mark.parametrize("status", [500, 429])
def test_a_hub_that_fails_moves_nobody(hub: OfflineHub, status: int) -> None:
    api = hub.api()
    with _proxy(hub, PROXY_DISCOVER_EVERY_S="0.2") as proxy:
        job = _run(api)
        proxy.wait_states("ready")
        hub.set_faults(answers=[{"status": status, "calls": f"GET /api/jobs/{USER}", "retry_after_s": 1}])
        wait_until(lambda: _fails(proxy) > 0, limit_s=40, what="it has failed")
        assert (_urls(proxy), proxy.states()) == ([_url(job)], ["ready"])
        assert proxy.complete("sim") == right_tokens(BASE)
        assert proxy.log().count("discovery.failed") == 1
        hub.set_faults(answers=[])
        second = _run(api)
        wait_until(lambda: _urls(proxy) == [_url(job), _url(second)], what="it follows again")


def test_a_token_that_the_hub_does_not_know_is_said_and_read_again(hub: OfflineHub, tmp_path: Any) -> None:
    token = tmp_path / "token"
    token.write_text("hf_expired\n")
    _run(hub.api())
    environment = {**hub.environment(), "HF_TOKEN": "", "PROXY_TOKEN_FILE": str(token)}
    with _proxy(hub, **environment) as proxy:
        wait_until(lambda: "the Hub does not list the Jobs" in proxy.log(), what="it says so")
        assert "hf_expired" not in proxy.log() and proxy.replicas() == []
        token.write_text(f"{TOKEN}\n")
        proxy.wait_states("ready")


def test_a_job_that_nobody_can_reach_is_said_once(hub: OfflineHub) -> None:
    api = hub.api()
    hidden = _run(api, expose=None)
    reached = _run(api)
    with _proxy(hub) as proxy:
        proxy.wait_states("ready")
        assert _urls(proxy) == [_url(reached)]
        assert proxy.log().count(f"Job {hidden.id} has neither port 8000 exposed") == 1


def test_within_a_network_group_the_alias_is_the_address(hub: OfflineHub) -> None:
    api = hub.api()
    _run(api, network_group="fleet", network_aliases=["replica-0"])
    with _proxy(hub, HF_NETWORK_GROUP_PREFIX="grp-7f-") as proxy:
        wait_until(lambda: _urls(proxy) == ["http://grp-7f-replica-0:8000"], what="it is found")
        assert "HF_TOKEN is not sent" not in proxy.log()
    assert JobStage.RUNNING in {job.status.stage for job in api.list_jobs(namespace=USER)}


def test_a_hub_that_never_answers_does_not_hold_up_the_end(hub: OfflineHub) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with _proxy(hub, HF_ENDPOINT=f"http://127.0.0.1:{silent.getsockname()[1]}") as proxy:
            silent.settimeout(10)
            connection, _ = silent.accept()
            began = time.monotonic()
            assert proxy.stop() == 0
            assert time.monotonic() - began < 5
        connection.close()
