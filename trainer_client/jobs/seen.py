"""What the Hub shows of a fleet's Jobs, read by their labels."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime

from huggingface_hub import JobInfo, JobStage

from trainer_client.jobs.launch import FLEET_LABEL, NUMBER_LABEL, ROLE_LABEL, RUN_LABEL, Role, Seat

ENDED = {stage.value for stage in (JobStage.COMPLETED, JobStage.CANCELED, JobStage.ERROR, JobStage.DELETED)}
"""Stages that no Job leaves again."""


@dataclass(frozen=True)
class Job:
    """One Job of a fleet, as it was when the Hub was asked."""

    id: str
    seat: Seat
    stage: str
    """As the Hub names it: SCHEDULING, RUNNING, COMPLETED, CANCELED, ERROR, DELETED."""
    created: datetime
    fleet: str = ""
    run: str = ""
    message: str = ""
    """What the Hub says of its end."""
    url: str = ""
    """Where its port is reached from outside; empty if none is exposed."""
    page: str = ""
    """Its page on the Hub."""
    facts: JobInfo | None = field(default=None, compare=False, repr=False)
    """All that the Hub shows."""

    @property
    def alive(self) -> bool:
        """Whether it runs or will run: what is not over is paid for. A stage that is not known here counts as alive."""
        return self.stage not in ENDED

    @property
    def running(self) -> bool:
        """Whether its process is there."""
        return self.stage == JobStage.RUNNING.value

    def __str__(self) -> str:
        return f"{self.seat} (Job {self.id})"


def job_of(info: JobInfo) -> Job | None:
    """Return a Job of a fleet, None for one without a fleet's labels."""
    labels = info.labels or {}
    try:
        seat = Seat(Role(labels[ROLE_LABEL]), int(labels[NUMBER_LABEL]))
        fleet, run = labels[FLEET_LABEL], labels[RUN_LABEL]
    except (KeyError, ValueError):
        return None
    return Job(
        id=info.id,
        seat=seat,
        stage=str(getattr(info.status.stage, "value", info.status.stage)),
        created=info.created_at or datetime.now(UTC),
        fleet=fleet,
        run=run,
        message=info.status.message or "",
        url=(info.status.expose_urls or [""])[0].rstrip("/"),
        page=info.url,
        facts=info,
    )
