"""Who gets the token (P8), and when it is read again."""

from __future__ import annotations

from collections.abc import Iterator

from proxy.auth import Credentials

SAFE, OPEN = "https://a--8000.hf.jobs", "http://elsewhere:8000"


def test_a_refused_token_is_read_again_once_for_all_who_sent_it() -> None:
    reads = iter(["old", "old", "new", "new"])
    credentials = Credentials(lambda: next(reads))
    assert not credentials.has_another_than("old"), "nobody has renewed it"
    assert credentials.bearer(SAFE) == "old"
    assert credentials.has_another_than("old")
    assert (credentials.bearer(SAFE), credentials.bearer(OPEN)) == ("new", None)
    assert credentials.has_another_than("old"), "who was refused with the old one in the same moment need not read"
    assert not credentials.has_another_than("new")


def test_a_source_that_fails_leaves_it_as_it_is() -> None:
    sources: Iterator[str | Exception] = iter(["old", OSError("gone"), ValueError("two\nlines")])

    def read() -> str:
        given = next(sources)
        if isinstance(given, Exception):
            raise given
        return given

    credentials = Credentials(read)
    assert not credentials.has_another_than("old")
    assert not credentials.has_another_than("old")
    assert credentials.bearer(SAFE) == "old"


def test_it_never_prints() -> None:
    assert "hunter2" not in repr(Credentials(lambda: "hunter2"))
