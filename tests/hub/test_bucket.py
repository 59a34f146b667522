"""The timeline of a bucket, at times that no test has to wait for."""

from __future__ import annotations

from tests.hub.bucket import Bucket, FileVersion


def _bucket(*landings: tuple[str, float]) -> Bucket:
    bucket = Bucket("tester/runs", private=False)
    for number, (path, listed_at) in enumerate(landings):
        bucket.put(FileVersion(path, xet_hash=f"{number:064}", size=number, mtime_ms=0, listed_at=listed_at))
    return bucket


def test_a_file_is_listed_from_its_landing_on() -> None:
    bucket = _bucket(("file", 2.5))
    assert [list(bucket.files(at)) for at in (0, 2.4, 2.5, 100)] == [[], [], ["file"], ["file"]]


def test_what_is_replaced_is_listed_until_then() -> None:
    bucket = _bucket(("file", 0), ("file", 2))
    assert [bucket.files(at)["file"].size for at in (0, 1.9, 2)] == [0, 0, 1]


def test_a_file_deleted_before_its_landing_is_never_listed() -> None:
    bucket = _bucket(("file", 2))
    bucket.delete("file", 1)
    assert [list(bucket.files(at)) for at in (0, 1, 2, 3)] == [[], [], [], []]
    assert bucket.changes(-1, 100) == []


def test_changes_come_in_the_order_in_which_listings_show_them() -> None:
    bucket = _bucket(("late", 3), ("early", 1), ("early", 2))
    bucket.delete("early", 4)
    changes = [(change["op"], change["path"]) for change in bucket.changes(0, 10)]
    assert changes == [("add", "early"), ("update", "early"), ("add", "late"), ("delete", "early")]
    assert [change["op"] for change in bucket.changes(1, 2)] == ["update"]
