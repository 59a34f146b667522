"""Send one call to every replica that is up, and demand that all of them agree (pause, resume, reset)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

from proxy.controlplane.answer import Answer
from proxy.controlplane.replica_api import ReplicaApi
from proxy.errors import ApiError


async def broadcast(
    apis: Sequence[ReplicaApi],
    method: str,
    target: str,
    *,
    body: bytes | None = None,
    timeout_s: float | None = None,
) -> dict[str, Answer]:
    """Send the call to all of `apis` together and return every replica's answer by its URL.

    `timeout_s`: what each may take; else PROXY_CALL_TIMEOUT_S.
    """
    async with asyncio.TaskGroup() as group:
        calls = {api.url: group.create_task(api.call(method, target, body=body, timeout_s=timeout_s)) for api in apis}
    return {url: call.result() for url, call in calls.items()}


def agreed(answers: dict[str, Answer], *, what: str) -> Answer:
    """Return the answer that all replicas gave. Raises ApiError naming the ones that failed, or that nobody is up."""
    if not answers:
        raise ApiError(503, f"{what}: no replica is up.", reason="no_replica", retry_after_s=1)
    failed = {url: answer for url, answer in answers.items() if not answer.ok}
    if not failed:
        return next(iter(answers.values()))
    first = next(iter(failed.values()))
    said = "; ".join(f"{url}: {answer.status or 'no answer'} {answer.message}" for url, answer in failed.items())
    raise ApiError(
        first.status if first.status and first.status != 200 else 502,
        f"{what} failed on {len(failed)} of {len(answers)} replicas. {said}",
        reason="broadcast_failed",
        details={"replicas": {url: answer.status for url, answer in answers.items()}},
    )


def number_told(url: str, answer: Answer, name: str, *, least: float = -math.inf) -> int:
    """Return a number in the answer of the replica at `url`. Raises ApiError if it tells none, or a lower one."""
    body = answer.json()
    number = body.get(name) if isinstance(body, dict) else None
    if not isinstance(number, int) or number < least:
        raise ApiError(502, f"{url} does not tell its {name}: {answer.text[:200]}", reason="replica_failed")
    return number
