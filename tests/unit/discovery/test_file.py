"""A file of replicas: whole it is believed, half written or with something else in it it is not."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.discovery.file import FileLookup, urls_in
from proxy.discovery.listing import LookupFailed
from proxy.sources import FileSource

WHOLE = b"# the replicas\n\nhttp://10.0.0.7:8000\n  http://B:8000/  # the second\r\nhttp://b:8000\nhttps://c\n"
URLS = ["http://10.0.0.7:8000", "http://b:8000", "https://c"]


def test_lines_are_urls_and_the_rest_is_comment() -> None:
    assert urls_in(WHOLE) == URLS
    assert urls_in(b"# nobody\n") == []


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "it is empty"),
        (b"http://a:80", "half written"),
        (b"http://a:8000\nhttp://b:8000\nhttp", "half written"),
        (b"http://a:8000\n10.0.0.7\n", "line 2 has '10.0.0.7', which is not an http or https URL"),
        (b"http://me:pass@a\n", "line 1 has a URL with credentials"),
        (b"\xff\xfe\n", "line 1"),
    ],
)
def test_what_is_not_whole_is_refused(content: bytes, said: str) -> None:
    with pytest.raises(LookupFailed) as caught:
        urls_in(content)
    assert said in str(caught.value)


@given(st.integers(0, len(WHOLE) - 1))
def test_a_part_of_a_file_never_has_another_url(end: int) -> None:
    try:
        assert set(urls_in(WHOLE[:end])) <= set(URLS)
    except LookupFailed:
        assert not WHOLE[:end].endswith(b"\n")


@given(st.binary(max_size=64))
def test_any_bytes_are_urls_or_refused(content: bytes) -> None:
    try:
        assert all(url.startswith(("http://", "https://")) for url in urls_in(content))
    except LookupFailed as failed:
        assert "\n" not in str(failed)


def test_what_changes_while_it_is_read_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "replicas"
    path.write_bytes(b"http://a\nhttp://b\n")

    async def scenario() -> None:
        lookup = FileLookup(FileSource(path))
        looking = asyncio.get_running_loop().create_task(lookup())
        await asyncio.sleep(0.05)
        path.write_bytes(b"http://a\n")
        with pytest.raises(LookupFailed, match="is being written"):
            await looking
        assert list((await lookup()).replicas) == ["http://a"]
        path.unlink()
        with pytest.raises(LookupFailed, match="cannot be read: No such file"):
            await lookup()

    asyncio.run(scenario())
