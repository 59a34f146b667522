"""What to do next with a fleet: event in, actions out."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_client.jobs.launch import TRAINER, Role, Seat
from trainer_client.jobs.plan import MAX_FAILURES, Cancel, End, Seen, Start, Wanted, plan, rescale, wanted_seats
from trainer_client.jobs.seen import ENDED, Job

WANTED = Wanted(replicas=2, start_timeout_s=600)
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)


def seat(number: int) -> Seat:
    return Seat(Role.REPLICA, number)


def job(number: int, stage: str = "RUNNING", *, age: int = 0, **fields: Any) -> Job:
    """Return a Job: number 0 is the trainer; a higher `age` is a later start."""
    where = seat(number) if number else TRAINER
    name = f"{number}-{age}"
    return Job(id=name, seat=where, stage=stage, created=BEGIN + timedelta(seconds=age), **fields)


def seen(*jobs: Job, unwell: dict[str, float] | None = None, **fields: Any) -> Seen:
    """Return these Jobs, all healthy but those in `unwell`."""
    alive = [one.id for one in jobs if one.alive]
    return Seen(jobs=jobs, unwell_s={**dict.fromkeys(alive, 0.0), **(unwell or {})}, **fields)


def starts(*numbers: int) -> list[Seat]:
    return [seat(number) for number in numbers]


def started_seats(what: Seen) -> list[Seat]:
    return [action.seat for action in plan(WANTED, what) if isinstance(action, Start)]


def test_at_first_every_replica_is_started_and_no_trainer() -> None:
    assert started_seats(seen()) == starts(1, 2)


def test_the_trainer_waits_for_every_health() -> None:
    assert plan(WANTED, seen(job(1), job(2), unwell={"2-0": 5.0})) == []
    assert plan(WANTED, seen(job(1), job(2, "SCHEDULING"), unwell={"2-0": 5.0})) == []
    assert started_seats(seen(job(1), job(2))) == [TRAINER]


def test_with_the_trainer_there_is_nothing_to_do() -> None:
    assert plan(WANTED, seen(job(1), job(2), job(0))) == []
    assert plan(WANTED, seen(job(1), job(2), unanswered=frozenset([TRAINER]))) == []


@pytest.mark.parametrize("stage", ["ERROR", "COMPLETED", "DELETED"])
def test_a_replica_that_ends_before_it_was_healthy_ends_the_wait_at_once(stage: str) -> None:
    broken = job(2, stage, message="exit code: 1")
    (end,) = plan(WANTED, seen(job(1), broken))
    assert isinstance(end, End)
    assert (end.ok, end.job) == (False, broken)
    assert f"ended as {stage} (exit code: 1) before it was healthy" in end.why


def test_a_replica_that_was_healthy_and_ends_before_the_trainer_is_replaced() -> None:
    assert started_seats(seen(job(1), job(2, "ERROR"), proven=frozenset(["2-0"]))) == starts(2)


def test_a_replica_that_takes_too_long_ends_the_wait() -> None:
    slow = job(2)
    (end,) = plan(WANTED, seen(job(1), slow, unwell={slow.id: 601.0}))
    assert isinstance(end, End)
    assert (end.ok, end.job) == (False, slow)
    assert "within 601 s" in end.why


def test_a_replica_that_dies_under_the_trainer_is_replaced() -> None:
    (start,) = plan(WANTED, seen(job(1), job(2, "ERROR"), job(0)))
    assert start == Start(seat(2), "in place of replica-2 (Job 2-0), which ended as ERROR")


def test_a_replica_that_hangs_under_the_trainer_is_canceled_and_replaced() -> None:
    hung = job(2)
    (cancel,) = plan(WANTED, seen(job(1), hung, job(0), unwell={hung.id: 601.0}))
    assert isinstance(cancel, Cancel)
    assert cancel.job == hung
    after = seen(job(1), replace(hung, stage="CANCELED"), job(0), replaced=frozenset([hung.id]))
    assert started_seats(after) == starts(2)


def test_nobody_is_replaced_while_nobody_is_healthy() -> None:
    assert plan(WANTED, seen(job(1), job(2), job(0), unwell={"1-0": 900.0, "2-0": 900.0})) == []


@pytest.mark.parametrize(
    ("stage", "ok"), [("COMPLETED", True), ("ERROR", False), ("CANCELED", False), ("DELETED", False)]
)
def test_the_trainers_end_is_the_end(stage: str, ok: bool) -> None:
    (end,) = plan(WANTED, seen(job(1), job(2), job(0, stage)))
    assert isinstance(end, End)
    assert end.ok == ok


def test_what_somebody_else_canceled_is_not_started_again() -> None:
    assert plan(WANTED, seen(job(1), job(2, "CANCELED"), job(0))) == []
    assert started_seats(seen(job(1), job(2, "CANCELED"))) == [TRAINER]


def test_every_replica_canceled_by_somebody_else_is_the_end_of_a_start() -> None:
    (end,) = plan(WANTED, seen(job(1, "CANCELED"), job(2, "CANCELED")))
    assert isinstance(end, End)
    assert "canceled by someone else" in end.why


def test_replicas_that_leave_at_the_trainers_end_are_no_failure() -> None:
    assert plan(WANTED, seen(job(1, "CANCELED"), job(2, "CANCELED"), job(0))) == []
    given_up = [job(2, "ERROR", age=age) for age in range(MAX_FAILURES)]
    assert plan(WANTED, seen(job(1, "CANCELED"), *given_up, job(0))) == []


def test_a_higher_number_that_somebody_started_is_kept_up() -> None:
    assert plan(WANTED, seen(job(1), job(2), job(3), job(0))) == []
    assert started_seats(seen(job(1), job(2), job(3, "ERROR"), job(0))) == starts(3)


def test_of_two_jobs_for_one_seat_the_older_stays() -> None:
    (cancel,) = plan(WANTED, seen(job(1), job(1, age=3), job(2), job(0)))
    assert isinstance(cancel, Cancel)
    assert cancel.job.id == "1-3"
    (cancel,) = plan(WANTED, seen(job(1), job(2), job(0), job(0, age=3)))
    assert isinstance(cancel, Cancel)
    assert cancel.job.id == "0-3", "two trainers would publish under one name"


def test_a_start_without_an_answer_is_not_repeated_yet() -> None:
    assert started_seats(seen(unanswered=frozenset([seat(1)]))) == starts(2)


def test_a_seat_that_fails_again_and_again_is_given_up() -> None:
    failures = [job(2, "ERROR", age=age) for age in range(MAX_FAILURES)]
    assert started_seats(seen(job(1), *failures[1:], job(0))) == starts(2)
    assert plan(WANTED, seen(job(1), *failures, job(0))) == []
    assert plan(WANTED, seen(job(1), *failures, job(0), proven=frozenset(["2-1"]))) != [], "one of them was healthy"
    (end,) = plan(WANTED, seen(*[job(1, "ERROR", age=age) for age in range(MAX_FAILURES)], *failures, job(0)))
    assert isinstance(end, End)
    assert "no replica is left" in end.why


def test_a_hub_that_takes_no_start_ends_the_wait() -> None:
    (end,) = plan(WANTED, seen(job(1), refusals={seat(2): MAX_FAILURES}))
    assert isinstance(end, End)
    assert "starts of replica-2 got no answer" in end.why
    assert plan(WANTED, seen(job(1), job(0), refusals={seat(2): MAX_FAILURES})) == [], "the training goes on"


def test_rescaling_takes_the_lowest_free_numbers_and_gives_the_highest_back() -> None:
    fleet = seen(job(1), job(2, "CANCELED"), job(3), job(0))
    assert rescale(4, fleet) == [Start(seat(2)), Start(seat(4))]
    assert [action.job.id for action in rescale(1, fleet) if isinstance(action, Cancel)] == ["3-0"]
    assert rescale(2, fleet) == []


JOBS = st.lists(
    st.tuples(st.integers(0, 4), st.sampled_from(["SCHEDULING", "RUNNING", "SOMETHING NEW", *sorted(ENDED)])),
    max_size=12,
).map(lambda pairs: tuple(job(number, stage, age=age) for age, (number, stage) in enumerate(pairs)))


@given(jobs=JOBS, count=st.integers(1, 4))
def test_whatever_is_seen_the_plan_comes_to_rest(jobs: tuple[Job, ...], count: int) -> None:
    """Carry out every action: after a few rounds there is nothing to do, or it is over; no seat has two Jobs."""
    wanted = Wanted(count, 600)
    replaced: set[str] = set()
    for round_ in range(8):
        now = seen(*jobs, replaced=frozenset(replaced), proven=frozenset(one.id for one in jobs if one.running))
        actions = plan(wanted, now)
        if not actions or isinstance(actions[0], End):
            break
        assert len({str(action) for action in actions}) == len(actions)
        for position, action in enumerate(actions):
            if isinstance(action, Start):
                number = action.seat.number if action.seat != TRAINER else 0
                jobs = (*jobs, job(number, age=1000 * (round_ + 1) + position))
            elif isinstance(action, Cancel):
                replaced.add(action.job.id)
                jobs = tuple(replace(one, stage="CANCELED") if one.id == action.job.id else one for one in jobs)
    else:
        pytest.fail(f"it never rests: {actions}")
    if not actions:
        alive = [one.seat for one in jobs if one.alive]
        assert len(alive) == len(set(alive))
        missing = {TRAINER, *wanted_seats(count, now)} - set(alive)
        assert set(alive) <= {TRAINER, *wanted_seats(count, now)}
        for given_up in missing:
            assert sum(one.seat == given_up for one in jobs) >= MAX_FAILURES


@given(jobs=JOBS, count=st.integers(1, 8))
def test_rescaling_gives_that_many(jobs: tuple[Job, ...], count: int) -> None:
    taken = {one.seat for one in jobs if one.alive and one.seat != TRAINER}
    for action in rescale(count, seen(*jobs)):
        if isinstance(action, Start):
            assert action.seat not in taken
            taken.add(action.seat)
        else:
            taken.discard(action.job.seat)
    assert len(taken) == count
