"""Which URL leads to a Job: its alias within a network group, its exposed port from elsewhere, else none."""

from __future__ import annotations

from typing import Any

from huggingface_hub import JobInfo
from hypothesis import given
from hypothesis import strategies as st

from proxy.discovery.jobs import urls_of

PREFIX = "grp-7f-"


def job(
    job_id: str, *, stage: str = "RUNNING", aliases: list[str] | None = None, ports: list[int] | None = None
) -> JobInfo:
    """Return a Job as the Hub describes it."""
    status: dict[str, Any] = {"stage": stage, "message": None}
    if ports:
        status["exposeUrls"] = [f"https://{job_id}--{port}.hf.jobs" for port in ports]
    spec: dict[str, Any] = {"expose": {"ports": ports, "portsPublic": []}} if ports else {}
    if aliases is not None:
        spec["network"] = {"group": "fleet", "aliases": aliases}
    owner = {"id": "0" * 24, "name": "me", "type": "user"}
    return JobInfo(id=job_id, status=status, createdAt="2026-09-01T00:00:00.000Z", owner=owner, **spec)


def urls(*jobs: JobInfo, port: int = 8000, prefix: str = PREFIX) -> tuple[dict[str, str], tuple[str, ...]]:
    found, unusable = urls_of(jobs, port=port, group_prefix=prefix)
    return {url: job.id for url, job in found.items()}, unusable


def test_within_the_group_it_is_the_alias() -> None:
    both = job("a", aliases=["Replica-0"], ports=[8000])
    assert urls(both) == ({"http://grp-7f-replica-0:8000": "a"}, ())
    assert urls(both, prefix="") == ({"https://a--8000.hf.jobs": "a"}, ())


def test_it_is_the_port_that_was_asked_for() -> None:
    assert urls(job("a", ports=[8000, 9000]), port=9000) == ({"https://a--9000.hf.jobs": "a"}, ())


def test_an_alias_that_two_jobs_claim_leads_to_neither() -> None:
    found, unusable = urls(job("a", aliases=["replica"], ports=[8000]), job("b", aliases=["replica", "b"]))
    assert found == {"https://a--8000.hf.jobs": "a", "http://grp-7f-b:8000": "b"}
    assert unusable == ()


def test_what_cannot_be_reached_is_said() -> None:
    found, (said,) = urls(job("a", ports=[9000]), job("b", ports=[8000]))
    assert found == {"https://b--8000.hf.jobs": "b"}
    assert "Job a" in said and "expose=[8000]" in said


def test_jobs_that_have_ended_are_no_replicas() -> None:
    stages = ("SCHEDULING", "RUNNING", "ERROR", "COMPLETED", "CANCELED")
    jobs = [job(stage, stage=stage, ports=[8000]) for stage in stages]
    assert sorted(urls(*jobs)[0].values()) == ["RUNNING", "SCHEDULING"]


@given(
    st.dictionaries(
        st.text("abc", min_size=1, max_size=2),
        st.tuples(st.lists(st.sampled_from(["x", "y", "z"]), max_size=2), st.sampled_from([[], [8000], [9000, 8000]])),
    ),
    st.sampled_from(["", PREFIX]),
)
def test_no_two_jobs_share_a_url_and_none_is_forgotten(
    given_jobs: dict[str, tuple[list[str], list[int]]], prefix: str
) -> None:
    jobs = [job(job_id, aliases=aliases, ports=ports) for job_id, (aliases, ports) in given_jobs.items()]
    found, unusable = urls(*jobs, prefix=prefix)
    assert len(found) + len(unusable) == len(jobs)
    assert len(set(found.values())) == len(found)
