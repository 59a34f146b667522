"""A replica sees half of a directory: asked again until the whole is there, as with files that are late."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import get_args

import pytest

from proxy.simulator.faults import TornKind
from tests.simulated.checks import assert_held_by_none, assert_served_by_all, right_tokens, wait_quiet
from tests.simulated.conftest import Adapters
from tests.support.adapters import write_broken
from tests.support.proxies import RunningProxy
from tests.support.replicas import SimulatedReplica


def _loads(replicas: list[SimulatedReplica]) -> list[int]:
    return [replica.state()["calls"].get("POST /v1/load_lora_adapter", 0) for replica in replicas]


@pytest.fixture(scope="module")
def proxy(pair: list[SimulatedReplica]) -> Iterator[RunningProxy]:
    with RunningProxy(*(replica.url for replica in pair), PROXY_LORA_LOAD_TIMEOUT_S="2") as proxy:
        yield proxy


@pytest.mark.parametrize("kind", get_args(TornKind))
def test_a_torn_directory_is_asked_for_again(
    pair: list[SimulatedReplica], proxy: RunningProxy, adapter: Adapters, kind: str
) -> None:
    pair[1].set_faults(torn={"attempts": 2, "kind": kind})
    try:
        answer = proxy.load(f"torn-{kind}", adapter(1))
    finally:
        pair[1].clear_faults()
    assert answer.status_code == 200, answer.text
    assert_served_by_all(pair, f"torn-{kind}", adapter(1))
    assert proxy.complete(f"torn-{kind}") == right_tokens(adapter(1))
    wait_quiet(proxy, *pair)


@pytest.mark.parametrize(
    "kind", ["no_weights", "truncated", "half_header", "empty_weights", "bad_config", "empty_config"]
)
def test_a_really_torn_directory_that_becomes_whole(
    pair: list[SimulatedReplica], proxy: RunningProxy, adapter: Adapters, tmp_path: Path, kind: str
) -> None:
    directory = write_broken(tmp_path / "policy", kind, seed=2)
    before = _loads(pair)
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(proxy.load, f"whole-{kind}", directory)
        assert not wait([loading], timeout=0.3).done
        assert _loads(pair) == before, "the proxy sees as much itself, and asks nobody"
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            temporary = tmp_path / name
            temporary.write_bytes((adapter(2) / name).read_bytes())
            temporary.rename(directory / name)
        answer = loading.result()
    assert answer.status_code == 200, answer.text
    assert proxy.complete(f"whole-{kind}") == right_tokens(adapter(2))
    wait_quiet(proxy, *pair)


def test_a_directory_that_stays_torn_fails_on_every_replica(
    pair: list[SimulatedReplica], proxy: RunningProxy, tmp_path: Path
) -> None:
    answer = proxy.load("torn-for-ever", write_broken(tmp_path / "policy", "truncated"))
    assert answer.status_code == 500
    assert "No replica was asked" in answer.json()["error"]["message"]
    assert_held_by_none(pair, "torn-for-ever")
    assert proxy.completion("torn-for-ever").status_code == 404
