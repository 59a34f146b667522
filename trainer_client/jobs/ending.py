"""Cancel every Job that labels name, and see it through: a Job that is forgotten is paid for until its time limit."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from trainer_client.errors import HubSilentError, JobsError
from trainer_client.jobs.hub import Hub
from trainer_client.jobs.seen import Job

LIMIT_S = 120.0
"""For the Hub to end all: a canceled Job takes a few seconds, and the Hub may be out of reach for a moment. What is
asked just then still has its own limit."""

POLL_S = 1.0

_AT_ONCE = 16
"""Jobs canceled at the same time."""

REFUSALS = 3
"""Rounds in which the Hub refuses, as for a token that was revoked, before it is taken at its word."""


@dataclass(frozen=True)
class Ended:
    """What came of it: the Jobs that were canceled, and those that are still there at the end of the time."""

    canceled: tuple[Job, ...] = ()
    left: tuple[Job, ...] = ()
    trouble: str = ""
    """What the Hub said last, where it gave no answer or refused."""

    @property
    def complete(self) -> bool:
        """Whether nothing is left."""
        return not self.left and not self.trouble


def cancel_all(
    hub: Hub,
    labels: Mapping[str, str],
    *,
    known: Collection[Job] = (),
    say: Callable[[str], None] = lambda text: None,
    at_least_s: float = 0.0,
    limit_s: float = LIMIT_S,
    poll_s: float = POLL_S,
) -> Ended:
    """Cancel every Job with these labels and wait until none is alive; keep looking for `at_least_s`.

    `known` are Jobs of theirs that the Hub may not list yet. One whose start was never answered may turn up late, which
    is what `at_least_s` is for. Whatever goes wrong with one Job, the others are canceled. It raises nothing: the
    answer says what could not be done.
    """
    begun = time.monotonic()
    canceled: dict[str, Job] = {}
    left = list(known)
    refusals = 0
    while True:
        trouble: JobsError | None = None
        try:
            left = hub.jobs(labels, alive=True)
        except JobsError as error:
            trouble = error
        todo = {job.id: job for job in [*known, *left] if job.id not in canceled}
        for job, failed in _each_canceled(hub, list(todo.values())):
            if failed:
                trouble = failed
                continue
            canceled[job.id] = job
            with suppress(OSError):  # whoever reads it may be gone
                say(f"canceled {job}")
        refusals += trouble is not None and not isinstance(trouble, HubSilentError)
        spent = time.monotonic() - begun
        done = not left and trouble is None and spent >= at_least_s
        if done or refusals >= REFUSALS or spent > limit_s:
            return Ended(tuple(canceled.values()), tuple(left), str(trouble or ""))
        time.sleep(poll_s)


def _each_canceled(hub: Hub, jobs: list[Job]) -> Iterator[tuple[Job, JobsError | None]]:
    # Together, so that none waits until a silent Hub has been given up for each of the others.
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        yield from zip(jobs, threads.map(partial(_cancel, hub), jobs), strict=True)


def _cancel(hub: Hub, job: Job) -> JobsError | None:
    try:
        hub.cancel(job)
    except JobsError as error:
        return error
    return None


def must_be_complete(ended: Ended) -> None:
    """Raise JobsError that names the Jobs which are left."""
    if ended.complete:
        return
    what = ", ".join(map(str, ended.left)) or "it is not known whether Jobs are left"
    why = f" ({ended.trouble})" if ended.trouble else ""
    raise JobsError(f"not everything has ended: {what}{why}; run `lora-sync jobs down` again")
