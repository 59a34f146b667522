"""The gate in front of a Job: what the proxy says of a token that it refuses, and of a Job that is starting or gone."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import JobInfo

from tests.hub.hub_process import TOKEN
from tests.hub.offline_hub import OfflineHub
from tests.simulated.checks import BASE, WaitingProxy, right_tokens
from tests.support.replicas import wait_until

_COMMAND = ["python", "-m", "proxy.simulator", "--port", "8000"]


def _replica(hub: OfflineHub) -> tuple[JobInfo, str]:
    job = hub.api().run_job(image="vllm", command=_COMMAND, expose=[8000])
    assert job.status.expose_urls
    return job, job.status.expose_urls[0]


def test_a_token_without_access_is_said_and_a_renewed_one_is_used(hub: OfflineHub, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("hf_without_access\n")
    _, url = _replica(hub)
    with WaitingProxy(url, HF_TOKEN="", PROXY_TOKEN_FILE=str(token)) as proxy:
        wait_until(lambda: "401" in proxy.replicas()[0]["reason"], what="it says why it is down")
        health = proxy.client.get("/health").text
        assert f"{url} is down" in health and "the gate in front of it does not take the proxy's token" in health
        assert "hf_without_access" not in health + proxy.log()
        token.write_text(f"{TOKEN}\n")
        proxy.wait_states("ready")
        assert proxy.complete("sim") == right_tokens(BASE)
        assert TOKEN not in proxy.log()


def test_without_a_token_it_is_said_which_one_is_wanted(hub: OfflineHub) -> None:
    _, url = _replica(hub)
    with WaitingProxy(url, HF_TOKEN="") as proxy:
        wait_until(lambda: "set HF_TOKEN" in proxy.replicas()[0]["reason"], what="it says what to do")


def test_a_job_whose_server_is_not_up_is_down_but_not_refused(hub: OfflineHub) -> None:
    hub.set_faults(scheduling_s=1)
    job, url = _replica(hub)
    with WaitingProxy(url, HF_TOKEN=TOKEN) as proxy:
        wait_until(lambda: "/health: 503" in proxy.replicas()[0]["reason"], what="it is starting")
        proxy.wait_states("ready")
        hub.kill_job(job.id)
        wait_until(lambda: proxy.states() == ["down"], what="it is dead")
        assert "token" not in proxy.replicas()[0]["reason"]
