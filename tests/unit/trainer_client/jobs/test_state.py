"""Which fleets this machine has started, kept on disk."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from trainer_client.jobs import state

RECORD = state.Record("math-r1", "me", "math-r1-0a1b", "/home/me/math-r1.yaml", os.getpid())


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def test_what_is_remembered_is_there_until_it_is_forgotten() -> None:
    assert list(state.records()) == []
    other = replace(RECORD, namespace="org")
    state.remember(RECORD)
    state.remember(other)
    state.remember(replace(RECORD, run="math-r1-later"))
    assert [one.run for one in state.records()] == ["math-r1-later", "math-r1-0a1b"]
    state.forget("math-r1", "me")
    state.forget("math-r1", "me")
    assert list(state.records()) == [other]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"fleet": "a"}'])
def test_what_cannot_be_read_is_left_out(text: str) -> None:
    state.remember(RECORD)
    (state.folder() / "me--broken.json").write_text(text)
    assert list(state.records()) == [RECORD]


def test_a_record_tells_whether_its_up_is_still_there() -> None:
    assert RECORD.watched
    with subprocess.Popen(["true"]) as ended:
        pass
    assert not replace(RECORD, pid=ended.pid).watched
