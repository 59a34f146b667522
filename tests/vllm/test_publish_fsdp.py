"""A model that FSDP2 shards over two processes: one publishes, and both return or raise alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from proxy.artifacts.check import inspect_directory
from proxy.artifacts.manifest import MANIFEST_FILE, read_manifest
from tests.support.fake_proxy import FakeProxy, refusal
from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(200)]


def test_every_rank_is_told_the_same_and_the_weights_are_whole(tmp_path: Path) -> None:
    with FakeProxy() as proxy:
        proxy.answers = {2: refusal(409, "no free slot"), 4: refusal(409, "still no slot")}
        first, second = run_ranks("tests.support.fsdp_run", proxy.url, tmp_path)
        live = list(proxy.live)
    assert first == second, "the ranks were told different things"

    names = [path.name for path in sorted((tmp_path / "store" / "fsdp").glob("fsdp-v*"))]
    assert first["first"] == {"policy": names[0]}
    assert (first["refused"]["error"], "no free slot" in first["refused"]["text"]) == ("AnnounceError", True)
    assert first["again"] == {"policy": names[1]}
    assert first["future"]["error"] == "AnnounceError"
    assert (first["earlier"]["error"], first["earlier"]["inner"]) == ("EarlierPublishError", ["AnnounceError"])
    assert first["rewind"]["error"] == "RewindError"
    assert first["background"] == {"policy": "Future"}
    assert first["last"] == {"policy": names[3]}
    assert first["current"] == names[3]
    assert live == names

    for version, name in enumerate(names[:2], start=1):
        published = tmp_path / "store" / "fsdp" / name
        assert (published / MANIFEST_FILE).exists()
        expected = inspect_directory(tmp_path / f"expected-{version}")
        assert read_manifest(published).digest == expected.digest
        assert inspect_directory(published).digest == expected.digest
