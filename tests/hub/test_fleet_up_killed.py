"""`up` is killed in the middle: its Jobs run on, are found by their label alone, and end with the trainer or `down`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.hub.faults import Answer
from tests.hub.fleets import NAME, UP_S, Fleet
from tests.hub.offline_hub import OfflineHub
from tests.support.replicas import wait_until

pytestmark = pytest.mark.timeout(240)


def test_down_ends_what_a_killed_up_has_left(hub: OfflineHub, tmp_path: Path) -> None:
    fleet = Fleet(hub, tmp_path)
    fleet.write()
    with fleet.up() as up:
        fleet.wait_served(3, up)
        up.kill()
        assert len(fleet.alive()) == 4
        # no argument: this machine remembers
        down = fleet.command("down")
        assert down.returncode == 0, down.stderr
        assert down.stdout.count("canceled ") == 4
        fleet.wait_gone()
        fleet.secrets_are_nowhere(up.log(), down.stdout)


def test_down_needs_no_more_than_a_name(hub: OfflineHub, tmp_path: Path) -> None:
    fleet = Fleet(hub, tmp_path)
    fleet.write()
    with fleet.up() as up:
        fleet.wait_served(3, up)
        up.kill()
    elsewhere = {"HOME": str(tmp_path / "other"), "XDG_STATE_HOME": str(tmp_path / "other")}
    down = fleet.command("down", NAME, "--json", environment=elsewhere)
    assert down.returncode == 0, down.stderr
    canceled = sorted(job["name"] for job in json.loads(down.stdout)["canceled"])
    assert canceled == ["replica-1", "replica-2", "replica-3", "trainer"]
    fleet.wait_gone()


def test_up_killed_while_it_starts_leaves_nothing_after_down(hub: OfflineHub, tmp_path: Path) -> None:
    hub.set_faults(scheduling_s=60)
    fleet = Fleet(hub, tmp_path)
    fleet.write()
    with fleet.up() as up:
        wait_until(lambda: bool(fleet.alive()), limit_s=UP_S)
        up.kill()
    assert fleet.command("down").returncode == 0
    fleet.wait_gone()
    again = fleet.command("down", NAME)
    assert (again.returncode, again.stdout) == (0, f"{NAME}: no Job was up\n")


def test_down_names_what_it_could_not_cancel_and_cancels_the_rest(hub: OfflineHub, tmp_path: Path) -> None:
    hub.set_faults(scheduling_s=60)
    fleet = Fleet(hub, tmp_path)
    fleet.write()
    with fleet.up() as up:
        wait_until(lambda: len(fleet.alive()) == 3, limit_s=UP_S)
        up.kill()
    (stubborn,) = fleet.jobs(number="2")
    hub.set_faults(answers=[Answer(403, f"POST */{stubborn.id}/cancel")])
    down = fleet.command("down")
    assert down.returncode == 1
    assert f"not everything has ended: replica-2 (Job {stubborn.id})" in down.stderr
    assert "the Hub answered 403" in down.stderr
    assert [job.id for job in fleet.alive()] == [stubborn.id]
    hub.set_faults(answers=[])
    assert fleet.command("down").returncode == 0, "it is still remembered"
    fleet.wait_gone()


def test_the_trainers_end_ends_the_replicas_though_nobody_watches(hub: OfflineHub, tmp_path: Path) -> None:
    fleet = Fleet(hub, tmp_path)
    fleet.write()
    with fleet.up() as up:
        fleet.wait_served(3, up)
        up.kill()
    fleet.stop_file.touch()
    fleet.wait_gone()
    fleet.lost_nothing()
    (trainer,) = fleet.jobs(role="trainer")
    assert trainer.status.stage == "COMPLETED"


def test_down_ends_a_fleet_that_is_watched(hub: OfflineHub, tmp_path: Path) -> None:
    fleet = Fleet(hub, tmp_path)
    fleet.write()
    with fleet.up() as up:
        fleet.wait_served(3, up)
        assert fleet.command("down").returncode == 0
        fleet.ended_with(up, 1)
    assert len(fleet.jobs()) == 4, "nothing was started in place of what was canceled"
