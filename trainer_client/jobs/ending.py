"""Cancel every Job that labels name, and see it through: a Job that is forgotten is paid for until its time limit."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from trainer_client.errors import HubSilentError, JobsError
from trainer_client.jobs.hub import Hub
from trainer_client.jobs.seen import Job

LIMIT_S = 120.0
"""For the Hub to end all: a canceled Job takes a few seconds, and the Hub may be out of reach for a moment."""

POLL_S = 1.0


@dataclass(frozen=True)
class Ended:
    """What came of it: the Jobs that were canceled, and those that are still there at the end of the time."""

    canceled: tuple[Job, ...] = ()
    left: tuple[Job, ...] = ()
    silent: str = ""
    """What the Hub said last, where it could not be asked."""

    @property
    def complete(self) -> bool:
        """Whether nothing is left."""
        return not self.left and not self.silent


def cancel_all(
    hub: Hub,
    labels: Mapping[str, str],
    *,
    say: Callable[[str], None] = lambda text: None,
    at_least_s: float = 0.0,
    limit_s: float = LIMIT_S,
    poll_s: float = POLL_S,
) -> Ended:
    """Cancel every Job with these labels and wait until none is alive; keep looking for `at_least_s`.

    A Job whose start was never answered may turn up late, which is what `at_least_s` is for. Raises JobsError if the
    Hub refuses; while it is silent, it is asked again up to `limit_s`.
    """
    begun = time.monotonic()
    canceled: dict[str, Job] = {}
    left, silent = [], ""
    while (spent := time.monotonic() - begun) < limit_s:
        try:
            left, silent = hub.jobs(labels, alive=True), ""
            for job in left:
                if job.id not in canceled:
                    hub.cancel(job)
                    canceled[job.id] = job
                    say(f"canceled {job}")
        except HubSilentError as error:
            silent = str(error)
        if not left and not silent and spent >= at_least_s:
            break
        time.sleep(poll_s)
    return Ended(tuple(canceled.values()), tuple(left), silent)


def must_be_complete(ended: Ended) -> None:
    """Raise JobsError that names the Jobs which are left."""
    if ended.complete:
        return
    what = ", ".join(str(job) for job in ended.left) or "it is not known whether Jobs are left"
    raise JobsError(
        f"not everything has ended: {what}{f' ({ended.silent})' * bool(ended.silent)}; run `lora-sync jobs down` again"
    )
