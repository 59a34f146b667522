"""`lora-sync jobs up` from the first Job to the last, on Jobs that are processes: however it ends, nothing is left."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hub.conftest import BUCKET
from tests.hub.fleets import NAME, UP_S, Fleet, processes_of
from tests.hub.offline_hub import OfflineHub
from tests.support.replicas import wait_until

pytestmark = pytest.mark.timeout(240)


def test_a_fleet_of_three_runs_to_the_trainers_end(hub: OfflineHub, tmp_path: Path) -> None:
    fleet = Fleet(hub, tmp_path)
    fleet.write(seconds=30)
    with fleet.up() as up:
        fleet.wait_served(3, up)
        fleet.secrets_are_nowhere(*processes_of(hub).values())
        fleet.ended_with(up, 0)
        assert "the trainer has ended well" in up.log()
    fleet.lost_nothing()
    training = fleet.training()
    assert training["policies"] > 5
    assert training["replicas"] == ["ready"] * 3
    assert hub.api().bucket_info(BUCKET).private
    assert len(fleet.jobs()) == 4
    assert fleet.command("down").returncode == 2, "the state on disk is gone, too"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_cancels_everything(hub: OfflineHub, tmp_path: Path, number: signal.Signals, status: int) -> None:
    fleet = Fleet(hub, tmp_path)
    fleet.write()
    with fleet.up() as up:
        wait_until(lambda: bool(fleet.alive(role="trainer")), limit_s=UP_S, what="the trainer is started")
        (trainer,) = fleet.alive(role="trainer")
        up.wait_said(f"trainer (Job {trainer.id}) running")
        up.signal(number)
        fleet.ended_with(up, status)


def test_a_signal_before_anything_runs_cancels_everything(hub: OfflineHub, tmp_path: Path) -> None:
    hub.set_faults(scheduling_s=60)
    fleet = Fleet(hub, tmp_path)
    fleet.write()
    with fleet.up(unanswered_s=2) as up:
        up.wait_said("scheduling")
        up.signal(signal.SIGINT)
        fleet.ended_with(up, 130)
    assert {job.status.stage for job in fleet.jobs()} == {"CANCELED"}


def test_a_trainer_that_fails_is_told_with_its_last_lines(hub: OfflineHub, tmp_path: Path) -> None:
    fleet = Fleet(hub, tmp_path)
    fleet.write(trainer={"command": ["python", "-c", "print('step 1'); raise SystemExit('CUDA error')"]})
    with fleet.up("--json") as up:
        fleet.ended_with(up, 1)
        events = [json.loads(line) for line in up.log().splitlines()]
    assert events[-1]["event"] == "end"
    assert events[-1]["ok"] is False
    assert "ERROR" in events[-1]["text"]
    said = [event["text"] for event in events if event["event"] == "said"]
    assert "trainer | CUDA error" in said
    shown = [event for event in events if event["event"] == "job" and event["name"] == "trainer"]
    assert [event["stage"] for event in shown][-1] == "ERROR"


def test_a_command_that_is_not_there_fails_the_trainer(hub: OfflineHub, tmp_path: Path) -> None:
    fleet = Fleet(hub, tmp_path)
    fleet.write(trainer={"command": ["no-such-trainer"]})
    with fleet.up() as up:
        fleet.ended_with(up, 1)
        assert "no-such-trainer cannot be run" in up.log()


def test_a_second_fleet_of_the_same_name_is_refused(hub: OfflineHub, tmp_path: Path) -> None:
    fleet = Fleet(hub, tmp_path)
    fleet.write()
    with fleet.up() as up:
        up.wait_said("scheduling")
        again = fleet.command("up", str(fleet.path))
        assert again.returncode == 1
        assert f"{NAME} is up already" in again.stderr
        assert f"lora-sync jobs down {NAME}" in again.stderr
        up.signal(signal.SIGINT)
        fleet.ended_with(up, 130)


@pytest.mark.parametrize("pair", [os.pipe, os.openpty], ids=["pipe", "terminal"])
def test_whoever_reads_may_leave(hub: OfflineHub, tmp_path: Path, pair: Callable[[], tuple[int, int]]) -> None:
    fleet = Fleet(hub, tmp_path)
    fleet.write()
    reader, writer = pair()
    with fleet.up(output=writer) as up:
        os.close(writer)
        seen = b""
        while b"starting trainer" not in seen:
            seen += os.read(reader, 65536)
        os.close(reader)
        fleet.wait_served(3, up)
        fleet.stop_file.touch()
        wait_until(lambda: not up.running(), limit_s=UP_S, what="`up` ends")
        fleet.wait_gone()
    fleet.lost_nothing()
    assert (b"\x1b[" in seen) == (pair is os.openpty), "a table in a terminal, plain lines elsewhere"


def test_the_trainers_code_is_copied_into_the_bucket(hub: OfflineHub, tmp_path: Path) -> None:
    code = tmp_path / "code"
    for name in ("train.py", "lib/step.py", ".git/config", "lib/__pycache__/step.pyc", ".env"):
        (code / name).parent.mkdir(parents=True, exist_ok=True)
        (code / name).write_text("x")
    fleet = Fleet(hub, tmp_path)
    fleet.write(trainer={"code": "code"})
    with fleet.up(unanswered_s=2) as up:
        up.wait_said("scheduling")
        up.signal(signal.SIGINT)
        fleet.ended_with(up, 130)
    paths = [entry.path for entry in hub.api().list_bucket_tree(BUCKET, recursive=True) if entry.type == "file"]
    assert sorted(path.split("/", 2)[2] for path in paths) == ["lib/step.py", "train.py"]


def test_a_setup_command_runs_before_the_trainer(hub: OfflineHub, tmp_path: Path) -> None:
    fleet = Fleet(hub, tmp_path)
    fleet.write(trainer={"setup": f"touch '{tmp_path}/set up'", "command": ["test", "-f", f"{tmp_path}/set up"]})
    with fleet.up() as up:
        fleet.ended_with(up, 0)
