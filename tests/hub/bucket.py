"""A bucket as a timeline: every version of every file, with the time at which listings begin and cease to show it.

Slow landing, stale listings and the feed of changes are all questions to that timeline. No HTTP and no clock of its
own: times are seconds on whatever clock the caller uses.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from math import inf
from typing import Any


@dataclass
class FileVersion:
    """One file as it was uploaded once."""

    path: str
    xet_hash: str
    size: int
    mtime_ms: int
    listed_at: float
    gone_at: float = inf
    uploaded_at: datetime = field(default_factory=lambda: datetime.now(UTC))

    def is_there(self, at: float) -> bool:
        """Tell whether a listing of that time shows it."""
        return self.listed_at <= at < self.gone_at

    def describe(self) -> dict[str, Any]:
        """Return it as the Hub lists it."""
        return {
            "type": "file",
            "path": self.path,
            "size": self.size,
            "xetHash": self.xet_hash,
            "mtime": hub_time(datetime.fromtimestamp(self.mtime_ms / 1000, UTC)),
            "uploadedAt": hub_time(self.uploaded_at),
        }


class Bucket:
    """One bucket. There is no directory but by a file in it, and no rename."""

    def __init__(self, bucket_id: str, *, private: bool) -> None:
        self.id = bucket_id
        self.private = private
        self.created_at = datetime.now(UTC)
        self._versions: list[FileVersion] = []

    def __repr__(self) -> str:
        return f"Bucket({self.id}, versions={len(self._versions)})"

    def put(self, version: FileVersion) -> None:
        """Add a file; what it replaces is listed until then."""
        self._end(version.path, version.listed_at)
        self._versions.append(version)

    def delete(self, path: str, at: float) -> None:
        """Remove a file, landed or not. A path that is not there is as deleted as it can be."""
        self._end(path, at)

    def files(self, at: float) -> dict[str, FileVersion]:
        """Return what a listing of that time shows, by path, sorted."""
        there = {version.path: version for version in self._versions if version.is_there(at)}
        return dict(sorted(there.items()))

    def tree(self, at: float, *, prefix: str, recursive: bool) -> list[dict[str, Any]]:
        """Return the entries whose path begins with `prefix`, which is lexical: `v1` finds `v10` as well.

        Not recursive: what lies deeper is one entry for its directory; a `/` right after the prefix does not count, so
        `v1` and `v1/` both list the children of that directory.
        """
        entries: dict[str, dict[str, Any]] = {}
        for path, version in self.files(at).items():
            if not path.startswith(prefix):
                continue
            depth = len(prefix) + path.startswith("/", len(prefix))
            directory, slash, _ = path[depth:].partition("/")
            if slash and not recursive:
                folder = path[:depth] + directory
                entries[folder] = {
                    "type": "directory",
                    "path": folder,
                    "uploadedAt": hub_time(version.uploaded_at),
                }
            else:
                entries[path] = version.describe()
        return [entries[path] for path in sorted(entries)]

    def changes(self, since: float, until: float) -> list[dict[str, Any]]:
        """Return what listings have shown differently after `since` and up to `until`, in order of time."""
        seen = [version for version in self._versions if version.listed_at < version.gone_at]
        replaced = {(version.path, version.gone_at) for version in seen}
        replacing = {(version.path, version.listed_at) for version in seen}
        found: list[tuple[float, dict[str, Any]]] = []
        for version in seen:
            if since < version.listed_at <= until:
                op = "update" if (version.path, version.listed_at) in replaced else "add"
                found.append((version.listed_at, {**version.describe(), "op": op}))
            if since < version.gone_at <= until and (version.path, version.gone_at) not in replacing:
                found.append((version.gone_at, {"path": version.path, "op": "delete"}))
        return [change for _, change in sorted(found, key=lambda item: item[0])]

    def _end(self, path: str, at: float) -> None:
        for version in self._versions:
            if version.path == path:
                version.gone_at = min(version.gone_at, at)


def hub_time(moment: datetime) -> str:
    """Return a time as the Hub writes it: UTC in milliseconds."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
