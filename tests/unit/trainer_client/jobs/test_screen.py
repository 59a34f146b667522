"""What is shown of a fleet: a table in a terminal, a line for each change elsewhere, JSON for machines."""

from __future__ import annotations

import io
import json
import sys

import pytest

from trainer_client.jobs.screen import LiveTable, Row, screen

STARTING = Row("replica-1", "6e55", "SCHEDULING", "scheduling", 3, "https://hub/jobs/me/6e55", "")
HEALTHY = Row("replica-1", "6e55", "RUNNING", "healthy", 75, "https://hub/jobs/me/6e55", "")
DEAD = Row("replica-1", "6e55", "ERROR", "", 7300, "https://hub/jobs/me/6e55", "Job failed with exit code: 1")


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_in_a_terminal_the_table_is_redrawn_and_what_happens_stays_above(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with screen(as_json=False) as shown:
        assert isinstance(shown, LiveTable)
        shown.show([STARTING])
        shown.say("starting replica-1 [1/3]")
        shown.show([HEALTHY])
        shown.show([DEAD])
    text = terminal.getvalue()
    assert "starting replica-1 [1/3]" in text
    assert "\x1b[" in text, "lines are drawn over"
    for part in ("scheduling", "healthy", "3 s", "1 min", "2 h 1 min", "exit code: 1", "https://hub/jobs/me/6e55"):
        assert part in text


def test_elsewhere_each_change_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with screen(as_json=False) as shown:
        for row in (STARTING, STARTING, HEALTHY, HEALTHY, DEAD):
            shown.show([row])
    lines = [line.partition("  ")[2] for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "replica-1 (Job 6e55) scheduling",
        "replica-1 (Job 6e55) running, healthy",
        "replica-1 (Job 6e55) error: Job failed with exit code: 1",
    ]


def test_machines_get_an_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with screen(as_json=True) as shown:
        shown.say("hello")
        shown.show([HEALTHY])
    said, job = map(json.loads, capsys.readouterr().out.splitlines())
    assert (said["event"], said["text"]) == ("said", "hello")
    assert (job["event"], job["name"], job["stage"], job["health"]) == ("job", "replica-1", "RUNNING", "healthy")
