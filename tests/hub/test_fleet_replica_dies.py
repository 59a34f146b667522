"""A replica's Job dies in the middle: another takes its place, gets every policy, and no rollout is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hub.fleets import Fleet
from tests.hub.offline_hub import OfflineHub
from tests.support.replicas import wait_until

pytestmark = pytest.mark.timeout(240)


def test_a_replica_that_dies_is_replaced_and_no_rollout_is_lost(hub: OfflineHub, tmp_path: Path) -> None:
    fleet = Fleet(hub, tmp_path)
    fleet.write()
    with fleet.up() as up:
        fleet.wait_served(3, up)
        (dead,) = fleet.jobs(number="2")
        before = {replica["url"] for replica in fleet.replicas_of_proxy()}
        hub.kill_job(dead.id)
        up.wait_said(f"starting replica-2: in place of replica-2 (Job {dead.id}), which ended as ERROR")

        def replaced() -> bool:
            new = [replica for replica in fleet.replicas_of_proxy() if replica["url"] not in before]
            return len(new) == 1 and new[0]["state"] == "ready" and bool(new[0]["policies"])

        wait_until(replaced, limit_s=60, what="the new replica serves")
        fleet.wait_served(3, up)
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
        for _ in range(4):
            wait_until(lambda: len(fleet.alive(number="3")) == 1, limit_s=60)
            (job,) = fleet.alive(number="3")
            hub.kill_job(job.id)
            wait_until(lambda gone=job.id: gone not in {one.id for one in fleet.alive()}, limit_s=60)  # type: ignore[misc]
        fleet.wait_served(2, up)
        fleet.stop_file.touch()
        fleet.ended_with(up, 0)
    fleet.lost_nothing()
