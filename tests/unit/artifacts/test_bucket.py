"""URLs of buckets are read, and files are measured as the Hub lists them."""

from __future__ import annotations

from pathlib import Path

import pytest

from proxy.artifacts.bucket import BucketFolder, measured
from proxy.errors import ArtifactError


@pytest.mark.parametrize(
    ("url", "bucket", "path"),
    [
        ("hf://buckets/me/runs", "me/runs", ""),
        ("hf://buckets/me/runs/", "me/runs", ""),
        ("hf://buckets/me/runs/a/b", "me/runs", "a/b"),
    ],
)
def test_a_url_is_read(url: str, bucket: str, path: str) -> None:
    folder = BucketFolder.parse(url)
    assert (folder.bucket, folder.path) == (bucket, path)
    assert str(folder) == url.rstrip("/")
    assert folder.child("run", "x").file("y") == "/".join(filter(None, [path, "run/x/y"]))


@pytest.mark.parametrize(
    "url", ["hf://buckets/me", "hf://me/runs", "s3://me/runs", "hf://buckets/me/runs//x", "hf://buckets/me/../x"]
)
def test_what_is_no_bucket_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="no folder in a bucket of the Hub"):
        BucketFolder.parse(url)


def test_files_of_a_directory_are_measured_as_the_hub_lists_them(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_bytes(b"{}")
    (tmp_path / "empty").touch()
    (tmp_path / ".hidden").touch()
    (tmp_path / "folder").mkdir()
    config, empty = measured(tmp_path)
    assert (config.name, config.size, len(config.xet_hash or "")) == ("adapter_config.json", 2, 64)
    assert (empty.name, empty.size, empty.xet_hash) == ("empty", 0, "0" * 64)
    assert measured(tmp_path / "nowhere") == ()


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "adapter_config.json").write_bytes(b"{}")
    monkeypatch.setattr(
        Path, "iterdir", lambda directory: iter([directory / "adapter_config.json", directory / "gone"])
    )
    monkeypatch.setattr(Path, "is_file", lambda _: True)
    with pytest.raises(ArtifactError, match=f"{tmp_path} cannot be read: "):
        measured(tmp_path)
