"""Replicas that are Hugging Face Jobs: those with the given labels that wait for a machine or run.

Within a network group a Job is reached by its alias, directly; from elsewhere by the URL of its exposed port.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from proxy.auth import HIDDEN, Credentials
from proxy.discovery.listing import Listing, LookupFailed
from proxy.settings import base_url
from proxy.sources import JobsSource
from proxy.threads import in_daemon_thread

if TYPE_CHECKING:
    from huggingface_hub import HfApi, JobInfo

HUB_CALL_S = 10.0
"""Seconds for one call to the Hub, whose client has no limit of its own."""

_ALIVE = ("SCHEDULING", "RUNNING")

_ALIAS = re.compile(r"[A-Za-z0-9_-]+")
"""One label of a host name. Whatever else a Job is called would make a URL that leads elsewhere, with the token."""


class JobsLookup:
    """Asks the Hub for the Jobs. `group_prefix`: HF_NETWORK_GROUP_PREFIX, empty outside a network group."""

    def __init__(self, source: JobsSource, credentials: Credentials, *, group_prefix: str) -> None:
        self._source = source
        self._namespace = source.namespace
        self._credentials = credentials
        self._group_prefix = group_prefix
        self._ids: dict[str, str] = {}
        """URL -> id of the Jobs that were listed last."""

    async def __call__(self) -> Listing:
        """Return a replica for every Job."""
        return await in_daemon_thread(self._look)

    def _look(self) -> Listing:
        from huggingface_hub import HfApi  # 0.3 s that only this source needs

        token = self._credentials.token
        try:
            return self._listed(HfApi(token=token or False))
        except Exception as error:  # noqa: BLE001  whatever a library raises, it has not told which Jobs there are
            self._credentials.has_another_than(token)  # for the next time
            said = _one_line(error).replace(token, HIDDEN) if token else _one_line(error)
            raise LookupFailed(f"the Hub does not list the Jobs: {type(error).__name__}: {said}") from None

    def _listed(self, api: HfApi) -> Listing:
        namespace = self._namespace = self._namespace or str(api.whoami()["name"])
        jobs = list(
            api.list_jobs(
                labels=dict(self._source.labels), status=list(_ALIVE), namespace=namespace, timeout=int(HUB_CALL_S)
            )
        )
        urls, unusable = urls_of(jobs, port=self._source.port, group_prefix=self._group_prefix)
        left = {url: job_id for url, job_id in self._ids.items() if url not in urls}
        gone = {url: _how_it_ended(api, job_id, namespace) for url, job_id in left.items()}
        self._ids = {url: job.id for url, job in urls.items()}
        return Listing({url: _told(job) for url, job in urls.items()}, gone, unusable)


def urls_of(jobs: Iterable[JobInfo], *, port: int, group_prefix: str) -> tuple[dict[str, JobInfo], tuple[str, ...]]:
    """Return the URL of every Job that can be reached, and why the others cannot. Pure."""
    alive = [job for job in jobs if _stage(job) in _ALIVE]
    claimed = Counter(alias for job in alive for alias in set(_aliases(job)))
    urls: dict[str, JobInfo] = {}
    unusable = []
    for job in alive:
        # An alias that several Jobs claim leads to any of them.
        aliases = [alias for alias in _aliases(job) if claimed[alias] == 1 and _ALIAS.fullmatch(alias)]
        if group_prefix and aliases:
            urls[f"http://{group_prefix}{aliases[0]}:{port}".lower()] = job
        elif (exposed := _exposed(job, port)) is not None:
            urls[exposed] = job
        else:
            remedy = f"start it with expose=[{port}], or with a network group and an alias of its own"
            unusable.append(f"Job {job.id} has neither port {port} exposed nor an alias that leads here: {remedy}")
    return urls, tuple(unusable)


def _exposed(job: JobInfo, port: int) -> str | None:
    urls = job.status.expose_urls or []
    named = [url for url in urls if f"--{port}." in url]
    ports = list(getattr(job, "expose", None) or [])
    if not named and port in ports and len(ports) == len(urls):
        named = [urls[ports.index(port)]]
    return base_url(named[0]) if named else None


def _aliases(job: JobInfo) -> list[str]:
    network = getattr(job, "network", None)  # huggingface_hub 1 has no network groups
    return list(network.aliases) if network else []


def _stage(job: JobInfo) -> str:
    return str(getattr(job.status.stage, "value", job.status.stage))


def _told(job: JobInfo) -> str:
    message = f": {job.status.message}" if job.status.message else ""
    return f"its Job {job.id} is {_stage(job)}{message}"


def _how_it_ended(api: HfApi, job_id: str, namespace: str) -> str:
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return _told(api.inspect_job(job_id=job_id, namespace=namespace))
    except HfHubHTTPError:
        return f"its Job {job_id} is unknown to the Hub"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
