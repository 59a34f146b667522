"""Two trainings on the same live replicas, under the same names and paths: each token from its own weights (P1).

TRL calls its policies trl-policy-v1, v2 ... in every run, and keeps them in the output directory. A run that is killed
leaves its policies on the replicas, and with vLLM alone the next one dies at its first sync.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxy.contract import LOAD_PATH, UNLOAD_PATH
from proxy.demo.processes import free_port
from tests.support.proxies import RunningProxy
from tests.support.recorder import Recorder, recorder
from tests.support.replicas import VllmReplica, wait_until
from tests.support.training import Training, train, trl_pair

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

MUCH_LATER_S = 400
BUDGET = ("--token-budget", "512")


@pytest.fixture(scope="module")
def replicas() -> Iterator[list[VllmReplica]]:
    with trl_pair() as pair:
        yield pair


@pytest.fixture(scope="module")
def proxy(replicas: list[VllmReplica]) -> Iterator[RunningProxy]:
    with RunningProxy(*(replica.url for replica in replicas)) as proxy:
        yield proxy


def _loads(record: Recorder) -> list[str]:
    return [exchange.json()["lora_name"] for exchange in record.of(LOAD_PATH) if exchange.status == 200]


def _assert_right(record: Recorder, proxy: RunningProxy) -> None:
    from tests.support.who_sampled import assert_own_weights

    # A run that goes on from a checkpoint unloads what lies before it, which nobody holds; TRL ignores that answer.
    exchanges = [e for e in record.exchanges if (e.target, e.status) != (UNLOAD_PATH, 404)]
    failed = [(e.method, e.target, e.status, e.answer[:500]) for e in exchanges if e.status != 200]
    assert not failed
    assert_own_weights(record)
    wait_until(lambda: proxy.inflight() == 0, what="no rollout in flight")
    assert proxy.states() == ["ready", "ready"]


def test_the_second_starts_five_seconds_after_the_first_was_killed(proxy: RunningProxy, tmp_path: Path) -> None:
    output = tmp_path / "run"
    with recorder(proxy.url, free_port(), tmp_path / "first") as first:
        with Training(first.url, output, steps=100, seed=0, arguments=BUDGET) as training:
            wait_until(
                lambda: not training.running() or len(_loads(first)) >= 4, limit_s=MUCH_LATER_S, what="four syncs"
            )
        _assert_right(first, proxy)
    time.sleep(5)
    with recorder(proxy.url, free_port(), tmp_path / "second") as second:
        history = train(second.url, output, steps=4, seed=1, arguments=BUDGET)
        assert history[0]["ratio"] == pytest.approx(1.0, abs=1e-2)
        assert _loads(second)[:4] == _loads(first)[:4], "the names are the same"
        _assert_right(second, proxy)
    assert proxy.policy(_loads(second)[-1])["state"] == "live"


def test_a_run_goes_on_from_a_checkpoint_and_announces_the_same_versions_again(
    proxy: RunningProxy, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    checkpoint = output / "checkpoint-2"
    with recorder(proxy.url, free_port(), tmp_path / "first") as first:
        with Training(first.url, output, steps=100, seed=2, arguments=(*BUDGET, "--save-steps", "2")) as training:
            wait_until(
                lambda: (
                    not training.running() or ((checkpoint / "rollout_state.json").exists() and len(_loads(first)) > 5)
                ),
                limit_s=MUCH_LATER_S,
                what="a checkpoint, and syncs beyond it",
            )
        _assert_right(first, proxy)
    with recorder(proxy.url, free_port(), tmp_path / "second") as second:
        train(second.url, output, steps=5, seed=2, arguments=(*BUDGET, "--resume", str(checkpoint)))
        assert set(_loads(second)) & set(_loads(first)), "versions were announced again"
        _assert_right(second, proxy)
