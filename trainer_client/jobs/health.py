"""The replicas' /health, asked from outside through the ports that their Jobs expose."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

import httpx2
from huggingface_hub import get_token

from trainer_client.jobs.seen import Job

TIMEOUT_S = 5.0
"""A healthy vLLM answers /health at once; a round trip through the Hub's gate takes about 0.1 s."""

OK = 200
HEALTHY = "healthy"
_AT_ONCE = 16


class HealthProbe:
    """Asks replicas how they are. Enter it; it keeps connections."""

    def __init__(self) -> None:
        self._client = httpx2.Client(timeout=TIMEOUT_S, follow_redirects=False)
        self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="lora-sync-health")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown(cancel_futures=True)
        self._client.close()

    def ask(self, jobs: Iterable[Job]) -> dict[str, str]:
        """Return for each Job's id `healthy`, or why it is not."""
        asked = list(jobs)
        return dict(zip((job.id for job in asked), self._threads.map(self._health, asked), strict=True))

    def _health(self, job: Job) -> str:
        if not job.running:
            return job.stage.lower()
        if not job.url:
            return "no port is exposed"
        try:
            # its head says all, and whatever sends a body for ever is not waited for
            with self._client.stream("GET", f"{job.url}/health", headers=_authorization(job.url)) as answer:
                pass
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            return f"no answer ({type(error).__name__})"
        if answer.status_code == OK:
            return HEALTHY
        refused = answer.status_code in (401, 403)
        return f"answers {answer.status_code}" + ", so the token may not read this namespace" * refused


def _authorization(url: str) -> dict[str, str]:
    # The token belongs to the Hub: never over plain http, but to this machine itself.
    safe = url.startswith(("https://", "http://127.0.0.1:"))
    token = get_token() if safe else None
    return {"Authorization": f"Bearer {token}"} if token else {}
