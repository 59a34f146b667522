"""What a replica is shown of the publisher's files while its mount is late, or shows them torn."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.chaos.views import View
from proxy.artifacts.check import inspect_directory
from proxy.errors import ArtifactError
from proxy.simulator.adapters import write_adapter
from tests.support.replicas import wait_until


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """A directory with one policy."""
    directory = tmp_path / "published"
    write_adapter(directory / "policy-v1", seed=1)
    return directory


@pytest.fixture
def view(published: Path, tmp_path: Path) -> Iterator[View]:
    view = View(tmp_path / "replica", published)
    yield view
    view.renew()


def seen(view: View, name: str) -> Path:
    return view.cwd / "published" / name


def digest_of(directory: Path) -> str:
    return inspect_directory(directory).digest


def test_everything_is_seen_at_first(view: View, published: Path) -> None:
    write_adapter(published / "policy-v2", seed=2)
    for name in ("policy-v1", "policy-v2"):
        assert digest_of(seen(view, name)) == digest_of(published / name)


def test_an_old_view_shows_new_policies_late_and_the_known_ones_as_they_are(view: View, published: Path) -> None:
    view.grow_old()
    write_adapter(published / "policy-v2", seed=2)
    wait_until(lambda: view.withheld == 1, what="the new policy has been found")
    assert not seen(view, "policy-v2").exists() and view.has_withheld
    assert digest_of(seen(view, "policy-v1")) == digest_of(published / "policy-v1")
    view.renew()
    assert digest_of(seen(view, "policy-v2")) == digest_of(published / "policy-v2")


@pytest.mark.parametrize("torn", [False, True])
def test_a_known_name_with_another_policy_is_new(view: View, published: Path, torn: bool) -> None:
    # As of a new run of TRL, which begins at v1 again.
    view.tear() if torn else view.grow_old()
    write_adapter(published / "policy-v1.tmp", seed=3)
    shutil.rmtree(published / "policy-v1")
    (published / "policy-v1.tmp").rename(published / "policy-v1")
    wait_until(lambda: view.withheld == 1, what="the new policy has been found")
    with pytest.raises(ArtifactError):
        digest_of(seen(view, "policy-v1"))
    view.renew()
    assert digest_of(seen(view, "policy-v1")) == digest_of(published / "policy-v1")


def test_a_torn_view_shows_new_policies_with_a_part_missing(view: View, published: Path) -> None:
    view.tear()
    write_adapter(published.parent / "made", seed=2).rename(published / "policy-v2")
    wait_until(lambda: seen(view, "policy-v2").exists(), what="the new policy is seen")
    with pytest.raises(ArtifactError):
        digest_of(seen(view, "policy-v2"))
    assert digest_of(seen(view, "policy-v1")) == digest_of(published / "policy-v1")
    view.renew()
    assert digest_of(seen(view, "policy-v2")) == digest_of(published / "policy-v2")


def test_what_is_still_being_written_is_nobodys_policy(view: View, published: Path) -> None:
    view.tear()
    write_adapter(published / "policy-v2.tmp", seed=2)
    (published / "policy-v2.tmp").rename(published / "policy-v2")
    wait_until(lambda: seen(view, "policy-v2").exists(), what="the new policy is seen")
    assert view.withheld == 1
    assert not seen(view, "policy-v2.tmp").exists()
