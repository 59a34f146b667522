"""The trainer's disk fills up while it publishes: the publication fails and says so, and the next one works."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.chaos.disk import small_disk
from tests.simulated.checks import Traffic, assert_served_by_all, models_of, wait_quiet
from tests.simulated.conftest import Adapters
from tests.support.proxies import RunningProxy
from tests.support.replicas import SimulatedReplica
from trainer_client import StoreError, TrainerClient


def test_nothing_is_half_published(
    pair: list[SimulatedReplica], proxy: RunningProxy, adapter: Adapters, tmp_path: Path
) -> None:
    with small_disk(tmp_path / "store") as disk:
        if disk is None:
            pytest.skip("this process may not mount a small disk")
        with TrainerClient(proxy.url, store=disk.folder, run="full", max_staleness=1) as client:
            first = client.publish(adapter(1), step=1)
            with Traffic(proxy, {first.model: first.path}) as traffic:
                disk.fill()
                with pytest.raises(StoreError, match="No space left"):
                    client.publish(adapter(2), step=2)
                assert models_of(proxy) == ["sim", first.model]
                traffic.wait_more(10)
                disk.free()
                second = client.publish(adapter(2), step=2)
                traffic.serve(second.model, second.path)
                traffic.wait_more(10)
            assert_served_by_all(pair, second.model, second.path)
            wait_quiet(proxy, *pair)
            published = {folder.name for folder in (disk.folder / "full").iterdir() if folder.is_dir()}
            assert published == {first.name, second.name}, "what had no room is gone"
