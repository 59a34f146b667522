"""Folders in buckets of the Hub, and their files as the Hub is to list them. Asks nobody; `hub_listing` does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from proxy.contract import PolicyFile
from proxy.errors import ArtifactError

SCHEME = "hf://buckets/"


@dataclass(frozen=True)
class BucketFolder:
    """A folder in a bucket of the Hub: `hf://buckets/NAMESPACE/NAME[/PATH]`."""

    bucket: str
    """NAMESPACE/NAME."""
    path: str = ""
    """Without slashes at its ends; empty for the bucket itself."""

    @classmethod
    def parse(cls, url: str) -> Self:
        """Read a URL. Raises ValueError that says what is wrong with it."""
        parts = url.removeprefix(SCHEME).rstrip("/").split("/")
        if not url.startswith(SCHEME) or len(parts) < 2 or {"", ".", ".."} & set(parts):
            raise ValueError(f"has {url!r}, which is no folder in a bucket of the Hub such as {SCHEME}me/runs/lora")
        return cls("/".join(parts[:2]), "/".join(parts[2:]))

    def __str__(self) -> str:
        return SCHEME + _joined(self.bucket, self.path)

    def child(self, *names: str) -> BucketFolder:
        """Return a folder in this one."""
        return BucketFolder(self.bucket, _joined(self.path, *names))

    def file(self, name: str) -> str:
        """Return the path of a file of this folder within the bucket."""
        return _joined(self.path, name)


@dataclass(frozen=True)
class HubFile:
    """A file as the Hub is to list it. None where whatever is listed will do."""

    name: str
    """Relative to its folder."""
    size: int | None = None
    """Bytes."""
    xet_hash: str | None = None

    @classmethod
    def announced(cls, file: PolicyFile) -> Self:
        """Return what a manifest says of a file."""
        return cls(file.path, file.size, file.xet_hash)

    def why_not(self, size: int, xet_hash: str) -> str:
        """Say why what is listed is not this file; empty if it is."""
        if self.size not in (None, size):
            return f"{self.name} has {size} bytes there, not {self.size}"
        return f"{self.name} has other content there" if self.xet_hash not in (None, xet_hash) else ""


def measured(directory: Path) -> tuple[HubFile, ...]:
    """Return the files in a directory as the Hub is to list them; empty if there is no directory. Reads every byte.

    The hashes are the Hub's own (`hf_xet.hash_files`), so that nothing has to be uploaded to know them. Raises
    ArtifactError when a file cannot be read.
    """
    from hf_xet import hash_files  # brings a runtime of its own: only for who uses buckets

    if not directory.is_dir():
        return ()
    try:
        paths = sorted(path for path in directory.iterdir() if path.is_file() and not path.name.startswith("."))
        found = hash_files([str(path) for path in paths])
    except (OSError, RuntimeError) as error:
        raise ArtifactError(f"{directory} cannot be read: {error}") from error
    return tuple(HubFile(path.name, told.file_size, told.hash) for path, told in zip(paths, found, strict=True))


def _joined(*parts: str) -> str:
    return "/".join(part for part in parts if part)
