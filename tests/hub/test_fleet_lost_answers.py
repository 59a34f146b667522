"""Answers of the Hub are lost: no Job is started twice, none is forgotten."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.hub.faults import Answer
from tests.hub.fleets import Fleet
from tests.hub.hub_process import USER
from tests.hub.offline_hub import OfflineHub

pytestmark = pytest.mark.timeout(240)

_RUN_JOB = f"POST /api/jobs/{USER}"


@pytest.mark.parametrize(
    ("carried_out", "listed_after_s"),
    [(True, 0.0), (True, 2.0), (False, 0.0)],
    ids=["started", "started and listed late", "not started"],
)
def test_a_start_whose_answer_is_lost_gives_one_job(
    hub: OfflineHub, tmp_path: Path, carried_out: bool, listed_after_s: float
) -> None:
    hub.set_faults(answers=[Answer(502, _RUN_JOB, times=2, carried_out=carried_out)], listed_after_s=listed_after_s)
    fleet = Fleet(hub, tmp_path)
    fleet.write()
    with fleet.up(unanswered_s=4) as up:
        fleet.wait_served(3, up)
        assert up.log().count("the Hub answered 502") == 2
        fleet.stop_file.touch()
        fleet.ended_with(up, 0)
    assert len(fleet.jobs()) == 4
    fleet.lost_nothing()


def test_a_job_whose_start_was_never_answered_is_canceled_as_well(hub: OfflineHub, tmp_path: Path) -> None:
    hub.set_faults(answers=[Answer(504, _RUN_JOB, carried_out=True)], scheduling_s=60, listed_after_s=2)
    fleet = Fleet(hub, tmp_path)
    fleet.write()
    with fleet.up(unanswered_s=4) as up:
        up.wait_said("the Hub answered 504")
        up.signal(signal.SIGINT)
        fleet.ended_with(up, 130)
    assert len(fleet.jobs()) == 3


def test_a_job_that_is_not_listed_yet_is_canceled_as_well(hub: OfflineHub, tmp_path: Path) -> None:
    hub.set_faults(scheduling_s=60, listed_after_s=60)
    fleet = Fleet(hub, tmp_path)
    fleet.write()
    with fleet.up(unanswered_s=1) as up:
        up.wait_said("replica-3 (Job")
        up.signal(signal.SIGINT)
        assert up.wait() == 130, up.log()
    hub.set_faults(listed_after_s=0)
    assert [job.status.stage for job in fleet.jobs()] == ["CANCELED"] * 3
    fleet.wait_gone()


def test_a_hub_that_is_away_for_a_while_changes_nothing(hub: OfflineHub, tmp_path: Path) -> None:
    fleet = Fleet(hub, tmp_path)
    fleet.write()
    with fleet.up() as up:
        fleet.wait_served(3, up)
        hub.set_faults(answers=[Answer(503, f"GET /api/jobs/{USER}")])
        up.wait_said("nothing is changed until it lists them")
        assert len(fleet.replicas_of_proxy()) == 3
        hub.set_faults(answers=[])
        fleet.stop_file.touch()
        fleet.ended_with(up, 0)
    assert len(fleet.jobs()) == 4
    fleet.lost_nothing()
