"""Scratch folders of merges: what a killed process leaves is removed by the next one, what a living one has is not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from trainer_client.merging.scratch import Scratch

MERGING = """
import sys
from trainer_client.merging.scratch import Scratch
scratch = Scratch(sys.argv[1])
(scratch.path / "model.safetensors").write_bytes(b"half of it")
print(scratch.path, flush=True)
sys.stdin.read()
"""
"""Another trainer in the middle of a merge, until its stdin ends."""


@contextmanager
def merging(below: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Run another trainer, and give it with its folder."""
    command = [sys.executable, "-c", MERGING, str(below)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())


def test_what_a_killed_merge_has_left_is_removed_by_the_next_one_and_no_other(tmp_path: Path) -> None:
    with merging(tmp_path) as (killed, left), merging(tmp_path) as (_, others):
        own = Scratch(tmp_path)
        assert {left, others, own.path} == set(tmp_path.iterdir()), "all are alive"
        killed.kill()
        killed.wait()
        assert (left / "model.safetensors").exists(), "nobody could remove it"
        next_one = Scratch(tmp_path)
        assert {others, own.path, next_one.path} == set(tmp_path.iterdir())
        assert (others / "model.safetensors").read_bytes() == b"half of it"
    next_one.discard()
    own.discard()
    own.discard()
    assert not list(tmp_path.iterdir()), "those that end by themselves leave nothing"


def test_a_folder_is_never_taken_for_left_while_it_is_made(tmp_path: Path) -> None:
    def merge_often(_: int) -> None:
        for _ in range(50):
            scratch = Scratch(tmp_path)
            (scratch.path / "model.safetensors").write_bytes(b"whole")
            assert (scratch.path / "model.safetensors").read_bytes() == b"whole"
            scratch.discard()

    with ThreadPoolExecutor(8) as trainers:
        list(trainers.map(merge_often, range(8)))
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_locked_stays(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "lora-sync-merging-link").symlink_to(elsewhere)
    (tmp_path / "lora-sync-merging-file").touch()
    Scratch(tmp_path).discard()
    assert len(list(tmp_path.iterdir())) == 3


def test_where_a_file_system_has_no_locks_nothing_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unlocked(descriptor: int, _: int) -> None:
        raise OSError(38, os.strerror(38))

    monkeypatch.setattr("fcntl.flock", unlocked)
    (tmp_path / "lora-sync-merging-a").mkdir()
    own, descriptors = Scratch(tmp_path), len(list(Path("/proc/self/fd").iterdir()))
    own.discard()
    assert (tmp_path / "lora-sync-merging-a").exists()
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors
