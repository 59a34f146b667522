"""What is in a directory counts by where links lead."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from proxy.artifacts.links import is_below, strays


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root with a file and a folder in it, beside which there is a file that nobody may have."""
    (tmp_path / "secret").write_text("x")
    root = tmp_path / "root"
    (root / "folder").mkdir(parents=True)
    (root / "file").write_text("x")
    return root


def test_what_is_inside_is_nothing_to_tell(root: Path) -> None:
    (root / "link").symlink_to(root / "file")
    (root / "relative").symlink_to("folder/../file")
    (root / "to-nothing-yet").symlink_to(root / "folder" / "later")
    assert list(strays(root, roots=[root])) == []
    assert list(strays(root, roots=[root.parent / "other", root])) == []


OUTSIDE = ["/etc/passwd", "../secret", "/dev/zero", "..", "/no/such/file", "../root-but-longer"]


@pytest.mark.parametrize("target", OUTSIDE)
def test_a_link_that_leads_out_is_named(root: Path, target: str) -> None:
    (root / "link").symlink_to(target)
    (root / "through").symlink_to("link")
    assert list(strays(root, roots=[root])) == ["link", "through"]
    assert list(strays(root, roots=[Path("/")])) == (["link", "through"] if target == "/dev/zero" else [])


def test_a_root_that_is_a_link_itself_counts_as_where_it_leads(root: Path, tmp_path: Path) -> None:
    (tmp_path / "alias").symlink_to(root)
    assert is_below(root / "file", [tmp_path / "alias"]) and is_below(tmp_path / "alias" / "file", [root])
    assert list(strays(tmp_path / "alias", roots=[root])) == []


def test_a_pipe_is_told_and_not_read(root: Path) -> None:
    os.mkfifo(root / "pipe")
    assert list(strays(root, roots=[root])) == ["pipe"]


def test_links_in_a_circle_end(root: Path) -> None:
    (root / "a").symlink_to("b")
    (root / "b").symlink_to("a")
    assert list(strays(root, roots=[root])) == [], "they lead nowhere, and who reads them is told so"


def test_a_directory_that_is_not_there_has_none(root: Path) -> None:
    assert list(strays(root / "not-there", roots=[])) == []
