"""A model that FSDP2 shards over two processes is merged by both, and is what one process alone would merge."""

from __future__ import annotations

from pathlib import Path

import pytest

from proxy.artifacts.checkpoint import differences, read_checkpoint
from proxy.artifacts.manifest import read_manifest
from tests.support.fake_proxy import FakeProxy
from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(200)]


def test_every_rank_is_told_the_same_and_it_equals_what_one_process_merges(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    with FakeProxy() as proxy:
        first, second = run_ranks("tests.support.merge_run", proxy.url, tmp_path)
        announced = [reload.name for reload in proxy.reloads]
    current = first.pop("current"), second.pop("current")  # of the last one, rank 1 would be told at its next call
    assert first == second, "the ranks were told different things"

    assert first["first"] == {"policy": announced[0], "model": "base"}
    assert first["again"] == first["first"]
    assert (first["full"]["error"], "No space left" in first["full"]["text"]) == ("StoreError", True)
    assert first["second"] == {"policy": announced[2], "model": "base"}
    assert first["rewind"]["error"] == "RewindError"
    assert first["background"] == "Future"
    assert current == (announced[3], announced[2])
    assert [name.split("-")[1] for name in announced] == ["v1", "v1", "v2", "v3"]

    (published,) = (tmp_path / "store" / "fsdp").glob("fsdp-v1-*")
    assert read_manifest(published).merged
    assert list(differences(read_checkpoint(published), read_checkpoint(tmp_path / "expected"))) == []
    found, expected = (
        AutoModelForCausalLM.from_pretrained(path, dtype="auto").state_dict()
        for path in (published, tmp_path / "expected")
    )
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)
