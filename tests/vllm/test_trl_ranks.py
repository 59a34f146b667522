"""TRL's syncs as publications on two ranks, with an adapter that FSDP2 has sharded or that each holds: all raise alike.

Real torch and peft over torch.distributed; TRL's trainer is a stand-in, since it trains over several processes on GPUs.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from proxy.artifacts.manifest import MANIFEST_FILE, read_manifest
from tests.support.fake_proxy import FakeProxy, refusal
from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(200)]


@pytest.mark.parametrize("sharded", [True, False], ids=["sharded", "whole"])
@pytest.mark.parametrize("background", [True, False], ids=["background", "waits"])
def test_every_rank_is_told_the_same(tmp_path: Path, sharded: bool, background: bool) -> None:
    """The second and the fifth sync fail at the proxy."""
    flags = [*(["--sharded"] if sharded else []), *(["--background"] if background else [])]
    with FakeProxy() as proxy:
        proxy.answers = {2: refusal(409, "no free slot"), 5: refusal(409, "still no slot")}
        first, second = run_ranks("tests.support.trl_ranks_run", proxy.url, tmp_path, *flags)
        announced = [load.policy for load in proxy.loads if load.policy]
    if background:
        assert first["told"] == ["fine", "fine", "EarlierPublishError", "fine", "fine", "AnnounceError"]
        assert first["workers"] == [1, 3, 3], "the third went on, while its number was free for the next"
    else:
        assert first["told"] == ["fine", "AnnounceError", "fine", "fine", "AnnounceError", "fine"]
        assert first["workers"] == [1, 2, 3]
    assert second["told"] == first["told"], "the ranks were told different things"
    assert [policy.step for policy in announced] == [0, 1, 2, 3, 4]
    manifests = [read_manifest(path.parent) for path in (tmp_path / "store").glob(f"*/*/{MANIFEST_FILE}")]
    assert len({manifest.digest for manifest in manifests}) == 5
