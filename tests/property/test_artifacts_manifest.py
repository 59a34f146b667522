"""For any run and version: names and manifests come back as they went out."""

from __future__ import annotations

import os
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from proxy.artifacts.manifest import Manifest, read_manifest, write_manifest
from proxy.contract import DIGEST_IN_NAME, PolicyFile, managed_name, version_of

digests = st.text("0123456789abcdef", min_size=64, max_size=64)
runs = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,30}", fullmatch=True)
versions = st.integers(min_value=1, max_value=10**9)
letters = st.characters(exclude_characters="/\\\0", exclude_categories=["Cs"])
names = st.text(letters, min_size=1).filter(lambda name: name not in (".", ".."))
paths = st.lists(names, min_size=1, max_size=3).map("/".join)
files = st.builds(PolicyFile, path=paths, size=st.integers(min_value=0), sha256=digests)
manifests = st.builds(
    Manifest,
    run=runs,
    version=versions,
    step=st.integers(min_value=0),
    name=st.text(min_size=1),
    base_model=st.text(),
    digest=digests,
    config_digest=digests,
    files=st.lists(files).map(tuple),
    alias=st.none() | st.text(min_size=1),
    created=st.datetimes(timezones=st.just(UTC)),
)


@given(run=runs, version=versions, digest=digests)
def test_a_managed_name_gives_its_version_back(run: str, version: int, digest: str) -> None:
    name = managed_name(run, version, digest)
    assert version_of(name) == version
    assert name == f"{run}-v{version}-{digest[:DIGEST_IN_NAME]}"


@given(path=st.text(st.sampled_from("a./\\\0"), max_size=8))
def test_whatever_file_may_be_named_is_inside(path: str) -> None:
    try:
        named = PolicyFile(path=path, size=0, sha256="").path
    except ValidationError:
        return
    assert os.path.normpath(Path("/policy/x", named)).startswith("/policy/x/")


@given(manifest=manifests)
def test_a_manifest_comes_back_as_it_was_written(manifest: Manifest) -> None:
    with tempfile.TemporaryDirectory() as directory:
        write_manifest(Path(directory), manifest)
        assert read_manifest(Path(directory)) == manifest


@given(manifest=manifests, later=st.datetimes(min_value=datetime(2000, 1, 1), timezones=st.just(UTC)))
def test_the_announcement_does_not_depend_on_when_it_was_published(manifest: Manifest, later: datetime) -> None:
    assert manifest.model_copy(update={"created": later}).announcement() == manifest.announcement()
