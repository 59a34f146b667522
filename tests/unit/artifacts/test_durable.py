"""A file appears whole or not at all, and a failed write leaves what was there."""

from __future__ import annotations

from pathlib import Path

import pytest

from proxy.artifacts.durable import write_whole


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    write_whole(tmp_path / "file", b"first")
    write_whole(tmp_path / "file", b"second")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("file", b"second")]


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError, match="taken"):
        write_whole(tmp_path / "taken", b"bytes")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
