"""A directory is published by its manifest and by nothing else, and it is held to what was announced."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from pydantic import ValidationError

from proxy.artifacts.digest import CONFIG_FILE, WEIGHTS_FILE
from proxy.artifacts.manifest import MANIFEST_FILE, Manifest, read_manifest, verify_manifest
from proxy.contract import Announcement
from proxy.errors import ArtifactError
from tests.support.adapters import publish


def verify(directory: Path, manifest: Manifest, **changes: object) -> None:
    verify_manifest(directory, manifest.announcement().model_copy(update=changes), manifest.name)


def test_a_published_directory_is_what_was_announced(tmp_path: Path) -> None:
    manifest = publish(tmp_path)
    assert read_manifest(tmp_path) == manifest
    verify(tmp_path, manifest)
    verify(tmp_path, manifest, files=())


def test_writing_leaves_nothing_beside_the_manifest(tmp_path: Path) -> None:
    publish(tmp_path)
    publish(tmp_path, version=4)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([CONFIG_FILE, WEIGHTS_FILE, MANIFEST_FILE])
    assert read_manifest(tmp_path).version == 4


def test_the_creation_time_is_utc_in_iso_form(tmp_path: Path) -> None:
    publish(tmp_path)
    assert f'"created": "{datetime.now(UTC).year}-' in (tmp_path / MANIFEST_FILE).read_text()
    assert 'Z"' in (tmp_path / MANIFEST_FILE).read_text()


def test_without_a_manifest_nothing_is_published(tmp_path: Path) -> None:
    manifest = publish(tmp_path)
    (tmp_path / MANIFEST_FILE).unlink()
    with pytest.raises(ArtifactError, match=rf"{MANIFEST_FILE} is missing, so the policy is not published"):
        verify(tmp_path, manifest)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"schema_version": 2}'])
def test_a_manifest_that_cannot_be_understood_says_what_to_do(tmp_path: Path, content: str) -> None:
    (tmp_path / MANIFEST_FILE).write_text(content)
    with pytest.raises(ArtifactError, match=rf"{MANIFEST_FILE} is not a manifest.*upgrade.*delete the directory"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(("field", "value"), [("version", 9), ("digest", "f" * 64), ("run", "other"), ("step", 31)])
def test_every_announced_field_must_match(tmp_path: Path, field: str, value: object) -> None:
    manifest = publish(tmp_path)
    with pytest.raises(ArtifactError, match=rf"{field} {value} was announced"):
        verify(tmp_path, manifest, **{field: value})


def test_another_name_is_refused(tmp_path: Path) -> None:
    manifest = publish(tmp_path)
    with pytest.raises(ArtifactError, match=f"its manifest names {manifest.name}"):
        verify_manifest(tmp_path, manifest.announcement(), "run-v3-00000000")


def test_a_file_of_another_size_is_refused(tmp_path: Path) -> None:
    manifest = publish(tmp_path)
    with (tmp_path / WEIGHTS_FILE).open("ab") as file:
        file.write(b"x")
    with pytest.raises(ArtifactError, match=rf"{WEIGHTS_FILE} has \d+ bytes, not \d+"):
        verify(tmp_path, manifest)


def test_a_file_that_is_gone_is_refused(tmp_path: Path) -> None:
    manifest = publish(tmp_path)
    (tmp_path / CONFIG_FILE).unlink()
    with pytest.raises(ArtifactError, match=rf"{CONFIG_FILE} cannot be read: No such file"):
        verify(tmp_path, manifest)


def test_other_files_than_the_announced_are_refused(tmp_path: Path) -> None:
    manifest = publish(tmp_path)
    with pytest.raises(ArtifactError, match="the announced files are not those of its manifest"):
        verify(tmp_path, manifest, files=manifest.files[:1])


@pytest.mark.parametrize("name", [WEIGHTS_FILE, CONFIG_FILE, MANIFEST_FILE, "tokenizer.json"])
def test_a_link_out_of_the_directory_is_refused_whatever_it_leads_to(tmp_path: Path, name: str) -> None:
    manifest = publish(tmp_path / "policy")
    file, elsewhere = tmp_path / "policy" / name, tmp_path / "elsewhere"
    file.touch()
    file.rename(elsewhere)
    file.symlink_to(elsewhere)
    with pytest.raises(ArtifactError, match=f"holds {name}, which leads out of it"):
        verify(tmp_path / "policy", manifest)


@pytest.mark.parametrize("path", ["", "/etc/passwd", "../x", "a/../../x", "a//x", "./x", "x/", "a\\x", "x\0"])
def test_a_file_outside_the_directory_cannot_be_named(tmp_path: Path, path: str) -> None:
    manifest = publish(tmp_path)
    written = (tmp_path / MANIFEST_FILE).read_text().replace(json.dumps(WEIGHTS_FILE), json.dumps(path))
    (tmp_path / MANIFEST_FILE).write_text(written)
    with pytest.raises(ArtifactError, match="must name a file inside the policy's directory"):
        read_manifest(tmp_path)
    with pytest.raises(ValidationError):
        Announcement.model_validate_json(
            manifest.announcement().model_dump_json().replace(json.dumps(WEIGHTS_FILE), json.dumps(path))
        )


def test_every_difference_is_listed(tmp_path: Path) -> None:
    manifest = publish(tmp_path)
    (tmp_path / CONFIG_FILE).unlink()
    with pytest.raises(ArtifactError, match=r"version 4 .*; digest .*; adapter_config"):
        verify(tmp_path, manifest, version=4, digest="0" * 64)


def test_an_announcement_carries_what_the_manifest_says(tmp_path: Path) -> None:
    manifest = publish(tmp_path).model_copy(update={"alias": "trl-policy-v7"})
    assert manifest.announcement() == Announcement(
        run="run", version=3, step=30, digest=manifest.digest, files=manifest.files, alias="trl-policy-v7"
    )
