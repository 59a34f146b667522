"""`lora-sync nccl test` on real process groups, over gloo: it ends, says what hangs, and leaves no process behind.

A hang is made by stopping a rank (SIGSTOP), as a rank looks whose GPU never answers.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from trainer_client.nccl import Measurement, Outcome, Sweep
from trainer_client.nccl.sweep import OPERATIONS

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240)]

SIZES = (4096, 16384, 65536)

COMMAND = [sys.executable, "-c", "from trainer_client.cli import main; main()", "nccl", "test", "--backend", "gloo"]

PATIENCE_S = 20.0


@pytest.fixture(autouse=True)
def _loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def ranks_of(parent: int) -> list[int]:
    """The processes of the sweep that `parent` started, in order of rank."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            command = (folder / "cmdline").read_bytes()
            if b"trainer_client.nccl.rank" in command and f"PPid:\t{parent}\n" in (folder / "status").read_text():
                task = json.loads(command.rstrip(b"\0").split(b"\0")[-1])
                found.append((task["rank"], int(folder.name)))
    return [pid for _, pid in sorted(found)]


def is_running(pid: int) -> bool:
    with suppress(OSError):
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    return False


def ended(pids: list[int]) -> bool:
    until = time.monotonic() + PATIENCE_S
    while any(map(is_running, pids)):
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def sweep(**changes: object) -> Sweep:
    values: dict[str, object] = {"ranks": 2, "backend": "gloo", "max_bytes": SIZES[-1], **changes}
    return Sweep(**values)  # type: ignore[arg-type]


def test_every_operation_runs_at_every_size_with_the_right_values() -> None:
    measurements = list(sweep(ranks=3).run())
    assert [(one.operation, one.bytes) for one in measurements] == [
        (name, size) for name in OPERATIONS for size in SIZES
    ]
    assert {one.outcome for one in measurements} == {Outcome.OK}
    assert all(one.first_s > 0 and one.again_s > 0 for one in measurements)
    assert ranks_of(os.getpid()) == []


@pytest.fixture
def interrupted() -> Iterator[list[Measurement]]:
    """A sweep whose rank 1 stops after the first size of all-reduce, until it ends."""
    measurements: list[Measurement] = []
    for measurement in sweep(deadline_s=3.0).run():
        measurements.append(measurement)
        if len(measurements) == 1:
            os.kill(ranks_of(os.getpid())[1], signal.SIGSTOP)
    yield measurements


def test_a_hang_names_its_size_and_rank_and_the_other_operations_still_run(interrupted: list[Measurement]) -> None:
    good, hang, *others = interrupted
    assert (good.operation, good.bytes, good.outcome) == ("all_reduce", 4096, Outcome.OK)
    assert (hang.operation, hang.bytes, hang.outcome) == ("all_reduce", 16384, Outcome.HANG)
    assert "1 of 2 not done after 3 s" in hang.detail
    assert [(one.operation, one.bytes) for one in others] == [(name, size) for name in OPERATIONS[1:] for size in SIZES]
    assert {one.outcome for one in others} == {Outcome.OK}
    assert ranks_of(os.getpid()) == [], "a stopped process is ended too"


def test_a_start_that_hangs_is_ended_too() -> None:
    (measurement,) = sweep(operations=("broadcast",), start_deadline_s=0.01).run()
    assert (measurement.bytes, measurement.outcome) == (0, Outcome.HANG)
    assert "rank 0, 1 of 2" in measurement.detail
    assert ranks_of(os.getpid()) == []


def test_a_rank_that_dies_fails_its_size_at_once() -> None:
    measurements: list[Measurement] = []
    for measurement in sweep(operations=("all_gather",)).run():
        measurements.append(measurement)
        if len(measurements) == 1:
            os.kill(ranks_of(os.getpid())[0], signal.SIGKILL)
            start = time.monotonic()
    assert time.monotonic() - start < PATIENCE_S, "not at its deadline"
    assert [(one.bytes, one.outcome) for one in measurements] == [(4096, Outcome.OK), (16384, Outcome.FAILED)]
    assert measurements[1].detail.startswith("rank ")


def test_a_rank_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    (measurement,) = sweep(operations=("broadcast",)).run()
    assert (measurement.bytes, measurement.outcome) == (0, Outcome.FAILED)
    assert "no-such-interface" in measurement.detail


def test_leaving_a_sweep_early_ends_its_processes() -> None:
    measurements = sweep().run()
    next(measurements)
    ranks = ranks_of(os.getpid())
    assert len(ranks) == 2
    measurements.close()  # type: ignore[attr-defined]
    assert ended(ranks)


def test_a_rank_that_hangs_does_not_outlive_a_command_that_is_killed() -> None:
    with subprocess.Popen(COMMAND, stdout=subprocess.DEVNULL) as command:
        waiting, stopped = started_by(command)
        os.kill(stopped, signal.SIGSTOP)  # so the other waits for it without end
        command.kill()
    try:
        assert ended([waiting])
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert ended([stopped])


def started_by(command: subprocess.Popen[bytes]) -> list[int]:
    until = time.monotonic() + PATIENCE_S
    while len(ranks := ranks_of(command.pid)) < 2:
        assert time.monotonic() < until, "the command starts no ranks"
        time.sleep(0.05)
    return ranks


def test_the_command_prints_a_line_per_size_and_ends_well() -> None:
    done = subprocess.run([*COMMAND, "--max-bytes", "4096"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    first, *lines = done.stdout.splitlines()
    assert first.startswith("2 ranks over gloo, 30 s for each size; NCCL: ")
    assert [line.split()[:4] for line in lines] == [[name, "4", "KB", "ok"] for name in OPERATIONS]


def test_the_command_fails_with_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    done = subprocess.run([*COMMAND, "--max-bytes", "4096"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    assert done.stdout.splitlines()[-1].startswith("all_reduce fails before the first size")


def test_json_is_all_there_is_on_stdout() -> None:
    done = subprocess.run([*COMMAND, "--max-bytes", "4096", "--json"], capture_output=True, text=True, timeout=120)
    assert [(one["operation"], one["outcome"]) for one in json.loads(done.stdout)] == [
        (name, "ok") for name in OPERATIONS
    ]
