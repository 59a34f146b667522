"""A replica's Job dies in the middle: another takes its place, gets every policy, and no rollout is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hub.fleets import UP_S, Fleet
from tests.hub.offline_hub import OfflineHub
from tests.support.replicas import wait_until
from trainer_client.jobs.plan import MAX_FAILURES

pytestmark = pytest.mark.timeout(240)


def test_a_replica_that_dies_is_replaced_and_no_rollout_is_lost(hub: OfflineHub, tmp_path: Path) -> None:
    fleet = Fleet(hub, tmp_path)
    fleet.write()
    with fleet.up() as up:
        fleet.wait_served(3, up)
        (dead,) = fleet.jobs(number="2")
        hub.kill_job(dead.id)
        up.wait_said(f"starting replica-2: in place of replica-2 (Job {dead.id}), which ended as ERROR")
        [url] = dead.status.expose_urls or [""]
        fleet.wait_served(3, up, not_at=url)
        fleet.stop_file.touch()
        fleet.ended_with(up, 0)
    fleet.lost_nothing()
    assert fleet.training()["replicas"] == ["ready"] * 3
    assert len(fleet.jobs(role="replica")) == 4


def test_a_replica_that_dies_at_every_start_is_given_up_and_the_training_goes_on(
    hub: OfflineHub, tmp_path: Path
) -> None:
    fleet = Fleet(hub, tmp_path)
    fleet.write()
    with fleet.up() as up:
        fleet.wait_served(3, up)
        fleet.spoil(MAX_FAILURES)
        (job,) = fleet.jobs(number="3")
        hub.kill_job(job.id)
        wait_until(lambda: len(fleet.jobs(number="3")) == 1 + MAX_FAILURES, limit_s=UP_S, what="all tries")
        wait_until(lambda: not fleet.alive(number="3"), limit_s=UP_S, what="the last try has failed")
        fleet.wait_served(2, up)
        fleet.stop_file.touch()
        fleet.ended_with(up, 0)
    fleet.lost_nothing()
    assert len(fleet.jobs(number="3")) == 1 + MAX_FAILURES, "it was not tried again"
