"""TRL's syncs as publications, over the real proxy: what its workers ask for by alias is there while they may.

The trainer is a stand-in for TRL's; client, proxy and sockets are real.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.simulated.checks import BASE, Traffic, held, models_of, right_tokens, wait_quiet
from tests.support.proxies import RunningProxy
from tests.support.replicas import SimulatedReplica, simulators, wait_until
from tests.support.trl_trainers import AsyncGRPOTrainer, Worker, stand_in_libraries
from trainer_client import TrainerClient
from trainer_client.integrations.trl import use

MAX_STALENESS = 2
SYNCS = 8


@pytest.fixture(autouse=True)
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_libraries(monkeypatch)


@pytest.fixture
def replicas() -> Iterator[list[SimulatedReplica]]:
    with simulators(2, max_loras=MAX_STALENESS + 2, max_cpu_loras=2 * (MAX_STALENESS + 2)) as replicas:
        yield replicas


@pytest.fixture
def proxy(replicas: list[SimulatedReplica]) -> Iterator[RunningProxy]:
    with RunningProxy(*(replica.url for replica in replicas)) as proxy:
        yield proxy


class Asking(Worker):
    """A rollout worker that asks for the newest policy that it was told of, from several threads."""

    def __init__(self, proxy: RunningProxy, traffic: Traffic) -> None:
        super().__init__()
        self._proxy = proxy
        self._traffic = traffic

    def update_model_version(self, model_version: int) -> None:
        super().update_model_version(model_version)
        alias = f"trl-policy-v{model_version}"
        self._traffic.serve(alias, Path(self._proxy.policy(alias)["path"]))
        self._traffic.weights.pop(f"trl-policy-v{model_version - 1}", None)


def in_window(trainer: AsyncGRPOTrainer) -> list[str]:
    """Return what a sample that TRL would still take may have asked for."""
    newest = trainer.rollout_worker.model_version
    return [f"trl-policy-v{version}" for version in range(max(1, newest - MAX_STALENESS), newest + 1)]


@pytest.mark.parametrize("wait", [True, False])
def test_workers_find_what_they_ask_for(
    replicas: list[SimulatedReplica], proxy: RunningProxy, tmp_path: Path, wait: bool
) -> None:
    trainer = AsyncGRPOTrainer(max_staleness=MAX_STALENESS)
    client = TrainerClient(proxy.url, store=tmp_path, run="math", max_staleness=MAX_STALENESS)
    traffic = Traffic(proxy, {"sim": BASE})
    trainer.rollout_worker = Asking(proxy, traffic)
    with client, traffic:
        use(trainer, client, wait=wait)
        for sync in range(1, SYNCS + 1):
            trainer._sync_weight()
            wait_until(lambda n=sync: trainer.rollout_worker.model_version == n, what="the policy is served")  # type: ignore[misc]
            traffic.wait_more(5)
            for alias in in_window(trainer):
                policy = proxy.policy(alias)
                assert proxy.complete(alias) == right_tokens(Path(policy["path"]))
                assert policy["step"] == int(alias.rpartition("v")[2]) - 1
            if sync % 3:  # every third step changes nothing
                trainer.model.step(sync)
            trainer.state.global_step += 1
    assert {f"trl-policy-v{sync}" for sync in range(1, SYNCS + 1)} <= set(traffic.answered)
    assert len(models_of(proxy)) == MAX_STALENESS + 2, "the base model and the window"
    assert proxy.completion(f"trl-policy-v{SYNCS - MAX_STALENESS - 1}").status_code == 404
    wait_quiet(proxy, *replicas)


def test_a_restarted_proxy_answers_what_the_workers_ask_for(
    replicas: list[SimulatedReplica], proxy: RunningProxy, tmp_path: Path
) -> None:
    trainer = AsyncGRPOTrainer(max_staleness=MAX_STALENESS)
    with TrainerClient(proxy.url, store=tmp_path, run="math", max_staleness=MAX_STALENESS) as client:
        use(trainer, client)
        trainer.train(3)
        assert trainer.rollout_worker.model_version == 4
        paths = {alias: Path(proxy.policy(alias)["path"]) for alias in in_window(trainer)}
        proxy.stop()
        proxy.start()
        for alias, path in paths.items():
            assert proxy.complete(alias) == right_tokens(path)
        trainer._sync_weight()
        assert proxy.complete("trl-policy-v5") == right_tokens(Path(proxy.policy("trl-policy-v5")["path"]))
        assert all(len(held(replica)) <= MAX_STALENESS + 3 for replica in replicas)
