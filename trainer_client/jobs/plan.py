"""What to do next with a fleet. Pure: what is wanted and what is seen go in, actions come out.

Which replicas are wanted follows from what is seen, so that `scale` needs no one's memory: each number from 1 to the
config's count, and each higher one that somebody started; but none whose newest Job somebody else canceled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from huggingface_hub import JobStage

from trainer_client.jobs.launch import TRAINER, Role, Seat
from trainer_client.jobs.seen import Job

MAX_FAILURES = 3
"""Tries in a row that a seat gets: a flavor that is too small, say, stays too small."""


@dataclass(frozen=True)
class Wanted:
    """What the config asks for."""

    replicas: int
    start_timeout_s: float
    """How long a replica may be without a good /health."""


@dataclass(frozen=True)
class Seen:
    """What is known of the fleet at one moment."""

    jobs: tuple[Job, ...] = ()
    """Every Job of the run, ended ones too."""
    unwell_s: Mapping[str, float] = field(default_factory=dict)
    """For each Job alive, seconds since its /health was last good, or since its start. 0: it is healthy."""
    proven: frozenset[str] = frozenset()
    """Jobs that were healthy at some time."""
    replaced: frozenset[str] = frozenset()
    """Jobs that `up` itself canceled: their seat is still wanted."""
    unanswered: frozenset[Seat] = frozenset()
    """Seats for which a start was sent a moment ago and may yet turn up."""
    refusals: Mapping[Seat, int] = field(default_factory=dict)
    """How many starts of a seat in a row came to nothing."""


@dataclass(frozen=True)
class Start:
    """Start a Job for this seat."""

    seat: Seat
    why: str = ""


@dataclass(frozen=True)
class Cancel:
    """Cancel this Job."""

    job: Job
    why: str


@dataclass(frozen=True)
class End:
    """It is over. `job` is the one whose last words tell why."""

    ok: bool
    why: str
    job: Job | None = None


Action = Start | Cancel | End


def plan(wanted: Wanted, seen: Seen) -> list[Action]:
    """Return what to do now; nothing if all is as it should be."""
    if end := _end(wanted, seen):
        return [end]
    return [*_doubles(seen), *_hung(wanted, seen), *_starts(wanted, seen)]


def wanted_seats(count: int, seen: Seen) -> list[Seat]:
    """Return the replicas' seats that should be taken, by number."""
    return [seat for seat in _seats(count, seen) if not _taken_away(seen, seat)]


def rescale(count: int, seen: Seen) -> list[Start | Cancel]:
    """Return what makes a running fleet one of `count` replicas: new Jobs on the lowest free numbers, or the highest
    numbers canceled. `plan` takes both for wanted.
    """
    alive = [job for job in _replicas(seen) if job.alive]
    taken = sorted({job.seat.number for job in alive})
    free = [number for number in range(1, count + len(taken) + 1) if number not in taken]
    starts = [Start(Seat(Role.REPLICA, number)) for number in free[: max(0, count - len(taken))]]
    return [*starts, *(Cancel(job, "scaled down") for job in alive if job.seat.number in taken[count:])]


def holder(seen: Seen, seat: Seat) -> Job | None:
    """Return the Job that takes the seat: the oldest one alive."""
    return next((job for job in _of(seen.jobs, seat) if job.alive), None)


def started(seen: Seen) -> bool:
    """Return whether the trainer has been started."""
    return any(job.seat == TRAINER for job in seen.jobs)


def _end(wanted: Wanted, seen: Seen) -> End | None:
    # 1. The trainer has ended.
    trainers = _of(seen.jobs, TRAINER)
    if trainers and not any(job.alive for job in trainers):
        last = trainers[-1]
        if last.stage == JobStage.COMPLETED.value:
            return End(True, "the trainer has ended well")
        return End(False, f"{last} ended as {last.stage}{_because(last)}", last)
    # 2. A Job cannot be brought up before there is anything to lose.
    if not trainers:
        return _failed_start(wanted, seen)
    # 3. Nobody is left to answer a rollout, nor will be.
    if all(_hopeless(seen, seat) for seat in _seats(wanted.replicas, seen)):
        gone = _replicas(seen)[-1:]
        return End(False, "no replica is left, and none can be brought up", gone[0] if gone else None)
    return None


def _failed_start(wanted: Wanted, seen: Seen) -> End | None:
    seats = wanted_seats(wanted.replicas, seen)
    if not seats:
        return End(False, "every replica has been canceled by someone else")
    for seat, count in seen.refusals.items():
        if count >= MAX_FAILURES:
            return End(False, f"{count} starts of {seat} got no answer from the Hub; see https://status.huggingface.co")
    for seat in seats:
        ended = [job for job in _of(seen.jobs, seat) if not job.alive]
        if ended and holder(seen, seat) is None and ended[-1].id not in seen.proven:
            job = ended[-1]
            return End(False, f"{job} ended as {job.stage}{_because(job)} before it was healthy", job)
    for job in _replicas(seen):
        if job.alive and (waited := seen.unwell_s.get(job.id, 0)) > wanted.start_timeout_s:
            return End(False, f"{job} was not healthy within {waited:.0f} s (replicas.start_timeout)", job)
    return None


def _doubles(seen: Seen) -> Iterable[Action]:
    # A start whose answer was lost may have gone through, and `scale` may have been quicker: the oldest stays.
    for seat in {job.seat for job in seen.jobs}:
        for job in [job for job in _of(seen.jobs, seat) if job.alive][1:]:
            yield Cancel(job, f"{seat} has a Job already")


def _hung(wanted: Wanted, seen: Seen) -> Iterable[Action]:
    # Where nobody is healthy, the way to them is what is broken, and replacing them would only cost.
    alive = [job for job in _replicas(seen) if job.alive]
    if all(seen.unwell_s.get(job.id, 0) > 0 for job in alive):
        return
    for job in alive:
        if (waited := seen.unwell_s.get(job.id, 0)) > wanted.start_timeout_s:
            yield Cancel(job, f"not healthy for {waited:.0f} s")


def _starts(wanted: Wanted, seen: Seen) -> Iterable[Action]:
    seats = wanted_seats(wanted.replicas, seen)
    for seat in seats:
        before = _of(seen.jobs, seat)
        if holder(seen, seat) is None and seat not in seen.unanswered and not _hopeless(seen, seat):
            yield Start(seat, f"in place of {before[-1]}, which ended as {before[-1].stage}" if before else "")
    up = all((job := holder(seen, seat)) is not None and seen.unwell_s.get(job.id, 1) == 0 for seat in seats)
    if seats and up and not started(seen) and TRAINER not in seen.unanswered:
        yield Start(TRAINER, f"{len(seats)} replicas are healthy")


def _hopeless(seen: Seen, seat: Seat) -> bool:
    """Tell whether trying once more is in vain: no Job can be started, or none of the last was ever healthy."""
    if holder(seen, seat) is not None or _taken_away(seen, seat):
        return False
    if seen.refusals.get(seat, 0) >= MAX_FAILURES:
        return True
    failed = [job for job in _of(seen.jobs, seat) if not _canceled_elsewhere(seen, job)][-MAX_FAILURES:]
    return len(failed) == MAX_FAILURES and not any(job.id in seen.proven for job in failed)


def _seats(count: int, seen: Seen) -> list[Seat]:
    """Return every replica's seat that is or was wanted, by number."""
    numbers = {*range(1, count + 1), *(job.seat.number for job in _replicas(seen))}
    return [Seat(Role.REPLICA, number) for number in sorted(numbers)]


def _taken_away(seen: Seen, seat: Seat) -> bool:
    """Tell whether somebody else canceled the newest Job of this seat: `scale`, or a click on the Hub."""
    jobs = _of(seen.jobs, seat)
    return bool(jobs) and holder(seen, seat) is None and _canceled_elsewhere(seen, jobs[-1])


def _canceled_elsewhere(seen: Seen, job: Job) -> bool:
    return job.stage == JobStage.CANCELED.value and job.id not in seen.replaced


def _replicas(seen: Seen) -> list[Job]:
    return sorted((job for job in seen.jobs if job.seat.role is Role.REPLICA), key=_age)


def _of(jobs: Iterable[Job], seat: Seat) -> list[Job]:
    """Return the Jobs of a seat, the oldest first."""
    return sorted((job for job in jobs if job.seat == seat), key=_age)


def _age(job: Job) -> tuple[object, str]:
    return job.created, job.id


def _because(job: Job) -> str:
    return f" ({job.message})" if job.message else ""
