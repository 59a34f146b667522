"""`lora-sync jobs scale`, `status` and `logs` beside a fleet that runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.hub.fleets import NAME, UP_S, Fleet
from tests.hub.offline_hub import OfflineHub
from tests.support.replicas import wait_until

pytestmark = pytest.mark.timeout(240)


def test_replicas_come_and_go_while_everything_runs(hub: OfflineHub, tmp_path: Path) -> None:
    fleet = Fleet(hub, tmp_path)
    fleet.write(replicas={"count": 1})
    with fleet.up() as up:
        fleet.wait_served(1, up)
        more = fleet.command("scale", "3")
        assert more.returncode == 0, more.stderr
        said = [line.partition(" (")[0] for line in more.stdout.splitlines()]
        assert said == ["started replica-2", "started replica-3"]
        fleet.wait_served(3, up)
        fewer = fleet.command("scale", "2", str(fleet.path), "--json")
        assert json.loads(fewer.stdout) == {"replicas": 2, "changed": [{"action": "cancel", "name": "replica-3"}]}
        fleet.wait_served(2, up)
        again = fleet.command("scale", "2")
        assert again.stdout == f"{NAME} has 2 replicas already\n"
        fleet.stop_file.touch()
        fleet.ended_with(up, 0)
    fleet.lost_nothing()
    assert len(fleet.jobs(role="replica")) == 3, "`up` started nothing in place of what was scaled away"


def test_a_scaled_fleet_is_watched_at_its_new_size(hub: OfflineHub, tmp_path: Path) -> None:
    fleet = Fleet(hub, tmp_path)
    fleet.write(replicas={"count": 1})
    with fleet.up() as up:
        fleet.wait_served(1, up)
        assert fleet.command("scale", "2").returncode == 0
        fleet.wait_served(2, up)
        (job,) = fleet.jobs(number="2")
        up.wait_said(f"replica-2 (Job {job.id}) running, healthy")
        hub.kill_job(job.id)
        up.wait_said(f"in place of replica-2 (Job {job.id})")
        wait_until(lambda: len(fleet.alive(number="2")) == 1, limit_s=UP_S)
        fleet.wait_served(2, up)
        fleet.stop_file.touch()
        fleet.ended_with(up, 0)
    fleet.lost_nothing()


def test_status_and_logs_show_a_fleet(hub: OfflineHub, tmp_path: Path) -> None:
    fleet = Fleet(hub, tmp_path)
    fleet.write(replicas={"count": 2})
    with fleet.up() as up:
        fleet.wait_served(2, up)
        status = fleet.command("status", "--json")
        assert status.returncode == 0, status.stderr
        rows = json.loads(status.stdout)
        assert [(row["name"], row["stage"], row["health"]) for row in rows] == [
            ("replica-1", "RUNNING", "healthy"),
            ("replica-2", "RUNNING", "healthy"),
            ("trainer", "RUNNING", ""),
        ]
        assert "replica-2" in fleet.command("status", NAME).stdout
        unknown = fleet.command("scale", "3", NAME, environment={"XDG_STATE_HOME": str(tmp_path / "elsewhere")})
        assert unknown.returncode == 2
        assert f"the config of {NAME} is not known here; give its file" in unknown.stderr
        fleet.stop_file.touch()
        fleet.ended_with(up, 0)
    logs = fleet.command("logs", str(fleet.path), "--tail", "1")
    assert logs.returncode == 0, logs.stderr
    assert json.loads(logs.stdout.splitlines()[-1])["failures"] == 0
    every = fleet.command("logs", NAME, "--job", "all")
    assert {line.split(" | ")[0] for line in every.stdout.splitlines()} >= {"replica-1", "trainer"}
    unknown = fleet.command("logs", NAME, "--job", "replica-9")
    assert unknown.returncode == 1
    assert "there is: replica-1, replica-2, trainer" in unknown.stderr
    assert fleet.command("status", NAME).returncode == 1
