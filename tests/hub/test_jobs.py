"""Jobs of the offline Hub, through the real huggingface_hub: each is a process with stages, a log and exposed ports."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import httpx2
import pytest
from huggingface_hub import HfApi, JobInfo, JobStage, Volume
from huggingface_hub.errors import JobNotFoundError

from tests.hub.conftest import BUCKET
from tests.hub.hub_process import TOKEN, USER
from tests.hub.offline_hub import OfflineHub
from tests.support.replicas import wait_until

_FOR_EVER = ["python", "-u", "-c", "import time; print('up'); time.sleep(600)"]
_SERVE = ["python", "-m", "http.server", "--bind", "0.0.0.0", "8000"]


def _run(api: HfApi, command: list[str], **options: Any) -> JobInfo:
    return api.run_job(image="python:3.12", command=command, **options)


def _wait(api: HfApi, job: JobInfo, *stages: str) -> JobInfo:
    targets = [JobStage(stage) for stage in stages]
    ended: JobInfo = api.wait_for_job(job.id, timeout=10, poll_interval=0.05, stages=targets or None)
    return ended


def _list(api: HfApi, **options: Any) -> list[JobInfo]:
    # Without a namespace huggingface_hub 2.4.0 asks with the token of the environment, not with the client's.
    return list(api.list_jobs(namespace=USER, **options))


def _wait_served(client: httpx2.Client, url: str) -> None:
    wait_until(lambda: client.get(url).status_code == 200, what=f"{url} answers")


@pytest.mark.parametrize(("code", "stage"), [(0, "COMPLETED"), (3, "ERROR")])
def test_a_job_ends_as_its_process_does(hub: OfflineHub, code: int, stage: str) -> None:
    api = hub.api()
    ended = _wait(api, _run(api, ["python", "-c", f"print('one'); print('two'); exit({code})"]))
    assert ended.status.stage == stage
    assert ("3" in (ended.status.message or "")) == (code == 3)
    assert list(api.fetch_job_logs(job_id=ended.id)) == ["one", "two"]
    assert ended.started_at is not None
    assert ended.finished_at is not None
    assert ended.created_at is not None
    assert ended.created_at <= ended.started_at <= ended.finished_at


def test_a_job_without_a_program_is_an_error(hub: OfflineHub) -> None:
    api = hub.api()
    ended = _wait(api, _run(api, ["no-such-program"]))
    assert ended.status.stage == "ERROR"
    assert "no-such-program" in (ended.status.message or "")


def test_a_job_sees_what_it_was_given_and_no_token(hub: OfflineHub) -> None:
    api = hub.api()
    show = "import os; print(os.environ['A'], os.environ['B'], os.environ['HF_ENDPOINT'], 'HF_TOKEN' in os.environ)"
    job = _run(api, ["python", "-c", show], env={"A": "1"}, secrets={"B": "2"})
    assert list(api.fetch_job_logs(job_id=job.id, follow=True)) == [f"1 2 {hub.url} False"]
    assert api.inspect_job(job_id=job.id).secrets == {"B": ""}


def test_a_job_is_shown_as_it_was_asked_for(hub: OfflineHub) -> None:
    api = hub.api()
    volume = Volume(type="bucket", source=BUCKET, mount_path="/lora", read_only=True)
    options: dict[str, Any] = {"flavor": "a10g-small", "volumes": [volume], "name": "replica-1"}
    job = _run(api, _FOR_EVER, **options, network_group="fleet", network_aliases=["replica"])
    shown = api.inspect_job(job_id=job.id)
    assert (shown.docker_image, shown.command, shown.flavor) == ("python:3.12", _FOR_EVER, "a10g-small")
    assert shown.volumes == [volume]
    assert shown.labels == {"name": "replica-1"}
    assert shown.network is not None
    assert (shown.network.group, shown.network.aliases) == ("fleet", ["replica"])
    assert shown.status.expose_urls is None


def test_jobs_are_found_by_label_and_stage(hub: OfflineHub) -> None:
    api = hub.api()
    lasting = [_run(api, _FOR_EVER, labels={"run": "a", "role": role}) for role in ("replica", "trainer")]
    short = _run(api, ["true"], labels={"run": "b"})
    _wait(api, short)
    assert {job.id for job in _list(api, labels={"run": "a"})} == {job.id for job in lasting}
    assert [job.id for job in _list(api, labels={"run": "a", "role": "trainer"})] == [lasting[1].id]
    assert [job.id for job in _list(api, status="COMPLETED")] == [short.id]
    assert len(_list(api)) == 3


def test_a_job_waits_to_be_scheduled(hub: OfflineHub) -> None:
    hub.set_faults(scheduling_s=0.5)
    api = hub.api()
    job = _run(api, _FOR_EVER)
    assert job.status.stage == "SCHEDULING"
    assert job.started_at is None
    running = _wait(api, job, "RUNNING")
    assert running.started_at is not None
    assert running.created_at is not None
    assert (running.started_at - running.created_at).total_seconds() >= 0.5


_DEAF = ["sh", "-c", "trap '' TERM; sleep 600 & wait"]


@pytest.mark.parametrize(
    "command", [_FOR_EVER, ["sh", "-c", "sleep 600 & wait"], _DEAF], ids=["process", "with a child", "deaf"]
)
def test_a_canceled_job_is_gone(hub: OfflineHub, command: list[str]) -> None:
    api = hub.api()
    job = _run(api, command)
    _wait(api, job, "RUNNING")
    api.cancel_job(job_id=job.id)
    assert _wait(api, job).status.stage == "CANCELED"


def test_a_job_canceled_before_it_ran_never_runs(hub: OfflineHub) -> None:
    hub.set_faults(scheduling_s=30)
    api = hub.api()
    job = _run(api, _FOR_EVER)
    api.cancel_job(job_id=job.id)
    ended = _wait(api, job)
    assert (ended.status.stage, ended.started_at) == ("CANCELED", None)


def test_a_job_that_dies_is_an_error(hub: OfflineHub) -> None:
    api = hub.api()
    job = _run(api, _FOR_EVER)
    _wait(api, job, "RUNNING")
    hub.kill_job(job.id)
    assert _wait(api, job).status.stage == "ERROR"


def test_a_job_has_a_time_limit(hub: OfflineHub) -> None:
    api = hub.api()
    ended = _wait(api, _run(api, _FOR_EVER, timeout=1))
    assert (ended.status.stage, ended.status.message) == ("ERROR", "Job timeout")


def test_two_jobs_expose_the_same_port_to_who_has_the_token(hub: OfflineHub) -> None:
    api = hub.api()
    urls = []
    for _ in range(2):
        status = _run(api, _SERVE, expose=[8000]).status
        assert status.expose_urls is not None
        urls += status.expose_urls
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with httpx2.Client(trust_env=False) as stranger, httpx2.Client(trust_env=False, headers=headers) as owner:
        assert [stranger.get(url).status_code for url in urls] == [401, 401]
        for url in urls:
            _wait_served(owner, url)
        jobs = _list(api)
        hub.kill_job(jobs[0].id)
        _wait(api, jobs[0])
        assert sorted(owner.get(url).status_code for url in urls) == [200, 503]


def test_a_public_port_needs_no_token(hub: OfflineHub) -> None:
    status = _run(hub.api(), _SERVE, expose_public=[8000]).status
    assert status.expose_urls is not None
    [url] = status.expose_urls
    with httpx2.Client(trust_env=False) as stranger:
        _wait_served(stranger, url)


def test_a_test_can_run_something_else_in_a_programs_place() -> None:
    with OfflineHub(programs={"vllm": ["python", "-c", "import sys; print(sys.argv[1:])"]}) as hub:
        api = hub.api()
        job = _run(api, ["vllm", "serve"])
        assert list(api.fetch_job_logs(job_id=job.id, follow=True)) == ["['serve']"]


def test_nothing_runs_on_when_the_hub_has_ended(tmp_path: Path) -> None:
    with OfflineHub() as hub:
        api = hub.api()
        job = _run(api, ["sh", "-c", f"echo $$ > {tmp_path}/pid; sleep 600 & wait"])
        _wait(api, job, "RUNNING")
        wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != "")
        pid = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_an_unknown_job_is_not_found(hub: OfflineHub) -> None:
    with pytest.raises(JobNotFoundError):
        hub.api().inspect_job(job_id="0" * 24)
