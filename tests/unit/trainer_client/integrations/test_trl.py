"""A TRL trainer publishes through a TrainerClient: stand-ins of each version, the client, a proxy on a socket."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

from proxy.artifacts.digest import adapter_digest
from proxy.artifacts.manifest import read_manifest
from proxy.errors import SettingsError
from tests.support.fake_proxy import Answer, FakeProxy, refusal
from tests.support.trl_trainers import BY_VERSION, DROPPED, AsyncGRPOTrainer, stand_in_libraries
from trainer_client import AnnounceError, EarlierPublishError, RewindError, TrainerClient
from trainer_client.integrations.trl import use

PLENTY_S = 10.0


@pytest.fixture(autouse=True)
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_libraries(monkeypatch)


@pytest.fixture
def proxy() -> Iterator[FakeProxy]:
    with FakeProxy() as proxy:
        yield proxy


@pytest.fixture
def client(proxy: FakeProxy, tmp_path: Path) -> Iterator[TrainerClient]:
    with make_client(proxy, tmp_path) as client:
        yield client


def make_client(proxy: FakeProxy, tmp_path: Path, *, max_staleness: int = 1) -> TrainerClient:
    return TrainerClient(
        proxy.url, store=tmp_path / "store", run="run", max_staleness=max_staleness, timeout_s=PLENTY_S
    )


def aliases(proxy: FakeProxy) -> list[str | None]:
    """What was announced, in order, by the names that TRL's workers ask for."""
    return [load.policy.alias for load in proxy.loads if load.policy]


def steps(proxy: FakeProxy) -> list[int]:
    return [load.policy.step for load in proxy.loads if load.policy]


def asked_for(trainer: AsyncGRPOTrainer) -> str:
    """What the workers ask for now."""
    return f"{trainer._lora_name}-v{trainer.rollout_worker.model_version}"


# syncing


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("release", BY_VERSION)
def test_every_sync_is_a_publication(proxy: FakeProxy, client: TrainerClient, release: str, wait: bool) -> None:
    trainer = BY_VERSION[release](weight_sync_steps=2)
    use(trainer, client, wait=wait)
    trainer.train(4)
    assert trainer.trl_synced == 0
    assert aliases(proxy) == ["trl-policy-v1", "trl-policy-v2", "trl-policy-v3"]
    assert steps(proxy) == [0, 2, 4]
    assert trainer.rollout_worker.told == [1, 2, 3]
    assert (trainer.model_version, trainer.rollout_worker.started_at) == (3, 1)
    assert proxy.calls == [], "nothing was paused"
    assert len(proxy.live) == 2


def test_the_adapter_that_trl_trains_is_published_whichever_is_active(
    proxy: FakeProxy, client: TrainerClient, tmp_path: Path
) -> None:
    trainer = AsyncGRPOTrainer()
    use(trainer, client)
    trainer.model.active_adapters = ["default", "another"]
    trainer.train(1)
    digests = [adapter_digest(Path(load.lora_path)) for load in proxy.loads]
    assert len(set(digests)) == 2
    manifest = read_manifest(Path(proxy.loads[-1].lora_path))
    assert (manifest.step, manifest.digest) == (1, digests[-1])


def test_a_step_that_changes_nothing_has_a_policy_all_the_same(proxy: FakeProxy, client: TrainerClient) -> None:
    trainer = AsyncGRPOTrainer()
    trainer.model.step = lambda seed: None  # type: ignore[method-assign]
    use(trainer, client)
    trainer.train(2)
    assert len({load.lora_name for load in proxy.loads}) == 3
    assert aliases(proxy)[-1] == asked_for(trainer)


def test_workers_ask_for_the_next_policy_once_it_is_served(proxy: FakeProxy, client: TrainerClient) -> None:
    trainer = AsyncGRPOTrainer()
    use(trainer, client, wait=False)
    trainer._sync_weight()
    proxy.script.append(Answer(503, "not ready", {"Retry-After": "1"}))
    trainer.model.step(1)
    trainer._sync_weight()
    assert (trainer.model_version, asked_for(trainer)) == (2, "trl-policy-v1")
    trainer.model.step(2)
    trainer._sync_weight()  # waits for the second
    assert (trainer.model_version, trainer.rollout_worker.told[:2]) == (3, [1, 2])
    phases = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    assert phases["perf/weight_sync_pause_s"] == 0.0
    assert phases["perf/weight_sync_barrier_s"] > 0.5 > phases["perf/weight_sync_transfer_s"]


def test_a_worker_of_ones_own_may_be_missing(proxy: FakeProxy, client: TrainerClient) -> None:
    trainer = AsyncGRPOTrainer()
    use(trainer, client)
    trainer.rollout_worker = None
    trainer._sync_weight()
    assert aliases(proxy) == ["trl-policy-v1"]


# failures


def test_a_failed_publication_ends_the_training(proxy: FakeProxy, client: TrainerClient) -> None:
    trainer = AsyncGRPOTrainer()
    use(trainer, client)
    proxy.answers = {2: refusal(500, "a replica refused it")}
    with pytest.raises(AnnounceError, match="a replica refused it"):
        trainer.train(3)
    assert (trainer.model_version, trainer.rollout_worker.told) == (1, [1])


def test_one_that_failed_in_the_background_ends_it_at_the_next_sync(proxy: FakeProxy, tmp_path: Path) -> None:
    with pytest.raises(EarlierPublishError, match="a replica refused it"), make_client(proxy, tmp_path) as client:
        trainer = AsyncGRPOTrainer()
        use(trainer, client, wait=False)
        proxy.answers = {2: refusal(500, "a replica refused it")}
        trainer.train(9)
    assert trainer.state.global_step == 2


def test_one_that_failed_after_the_last_sync_ends_it_too(proxy: FakeProxy, tmp_path: Path) -> None:
    trainer = AsyncGRPOTrainer()
    with pytest.raises(AnnounceError, match="a replica refused it"), make_client(proxy, tmp_path) as client:
        use(trainer, client, wait=False)
        proxy.answers = {3: refusal(500, "a replica refused it")}
        trainer.train(2)
    assert trainer.rollout_worker.told == [1, 2]


def test_the_first_policy_is_served_before_the_workers_start(proxy: FakeProxy, client: TrainerClient) -> None:
    trainer = AsyncGRPOTrainer()
    use(trainer, client, wait=False)
    proxy.script.append(Answer(503, "not ready", {"Retry-After": "1"}))
    trainer.train(1)
    assert trainer.rollout_worker.started_at == 1


# going on


def resumed(trainer: AsyncGRPOTrainer, *, step: int, version: int) -> None:
    """As TRL takes up its numbering from a checkpoint."""
    trainer.state.global_step, trainer.model_version = step, version
    trainer.rollout_worker.update_model_version(version)


def test_a_training_goes_on_from_a_checkpoint_with_its_own_numbers(proxy: FakeProxy, tmp_path: Path) -> None:
    with make_client(proxy, tmp_path) as client:
        trainer = AsyncGRPOTrainer()
        use(trainer, client)
        trainer.train(4)
    with make_client(proxy, tmp_path) as client:
        trainer = AsyncGRPOTrainer()
        resumed(trainer, step=2, version=3)
        use(trainer, client, wait=False)
        trainer.train(1)
    assert aliases(proxy)[-2:] == ["trl-policy-v4", "trl-policy-v5"]
    assert steps(proxy)[-2:] == [2, 3]
    assert trainer.rollout_worker.started_at == 4


def test_a_training_that_begins_anew_under_a_used_run_is_refused(proxy: FakeProxy, tmp_path: Path) -> None:
    for allow_rewind in (False, False, True):
        with make_client(proxy, tmp_path) as client:
            trainer = AsyncGRPOTrainer()
            use(trainer, client, allow_rewind=allow_rewind)
            if proxy.loads and not allow_rewind:
                with pytest.raises(RewindError, match="step 0 is before step 2"):
                    trainer.train(2)
            else:
                trainer.train(2)
    assert steps(proxy) == [0, 1, 2, 0, 1, 2]


# what does not fit


def lacking(name: str) -> AsyncGRPOTrainer:
    trainer = AsyncGRPOTrainer()
    delattr(trainer, name)
    return trainer


class OtherDispatch(AsyncGRPOTrainer):
    def _sync_weight(self) -> None:
        pass


class OtherCall(AsyncGRPOTrainer):
    def _sync_weight_lora(self, t0: float, adapter: str = "default") -> tuple[float, float, float]:
        return t0, t0, t0


class OtherWorker(AsyncGRPOTrainer):
    def __init__(self) -> None:
        super().__init__()
        self.rollout_worker = object()


@pytest.mark.parametrize(
    ("trainer", "what"),
    [
        (lacking("_lora_name"), "AsyncGRPOTrainer has no _lora_name"),
        (lacking("model_version"), "AsyncGRPOTrainer has no model_version"),
        (object(), "object has no _sync_weight; object has no _sync_weight_lora"),
        (OtherDispatch(), "OtherDispatch._sync_weight does not call _sync_weight_lora"),
        (OtherCall(), "OtherCall._sync_weight_lora does not take one argument"),
        (OtherWorker(), "its rollout worker has no update_model_version"),
    ],
    ids=["attribute", "version", "not TRL", "dispatch", "call", "worker"],
)
def test_another_trl_is_refused_by_its_version_and_what_is_missing(
    client: TrainerClient, trainer: Any, what: str
) -> None:
    with pytest.raises(SettingsError) as raised:
        use(trainer, client)
    assert str(raised.value).startswith(f"TRL {_installed()} is not built as expected: {what}")
    assert "TRL 1.14 to 1.16" in str(raised.value)


def _installed() -> str:
    try:
        return version("trl")
    except PackageNotFoundError:
        return "of an unknown version"


def test_merged_weights_are_refused(client: TrainerClient) -> None:
    with pytest.raises(SettingsError, match="merged weights"):
        use(AsyncGRPOTrainer(lora=False), client)


@pytest.mark.parametrize("theirs", [0, 2])
def test_both_must_have_the_same_staleness(client: TrainerClient, theirs: int) -> None:
    trainer = AsyncGRPOTrainer(max_staleness=theirs)
    with pytest.raises(SettingsError, match=f"max_staleness is {theirs} in TRL's config and 1 in the TrainerClient"):
        use(trainer, client)
    trainer._sync_weight()
    assert trainer.trl_synced == 1, "a trainer that was refused is as it was"


def test_a_trainer_is_used_once(client: TrainerClient) -> None:
    trainer = AsyncGRPOTrainer()
    use(trainer, client)
    with pytest.raises(SettingsError, match="once"):
        use(trainer, client)
    assert len(trainer.callbacks) == 1


# logs


@pytest.mark.parametrize("logging_steps", [1, 2, 3])
def test_dropped_samples_are_counted_once_however_often_trl_logs(client: TrainerClient, logging_steps: int) -> None:
    trainer = AsyncGRPOTrainer()
    use(trainer, client)
    trainer.train(5, logging_steps=logging_steps, dropped=(0, 3, 0, 0, 2), taken=3)
    metrics = client.metrics()
    assert (metrics["lora_sync/discarded_total"], metrics["lora_sync/rollouts_total"]) == (5, 20)
    assert metrics["lora_sync/discarded_share"] == 0.25


def test_an_evaluation_in_between_is_no_second_count(client: TrainerClient) -> None:
    trainer = AsyncGRPOTrainer()
    use(trainer, client)
    trainer.add_callback(_Evaluates(trainer))
    trainer.train(3, logging_steps=3, dropped=(1, 1, 1), taken=1)
    metrics = client.metrics()
    assert (metrics["lora_sync/discarded_total"], metrics["lora_sync/rollouts_total"]) == (3, 6)


class _Evaluates:
    def __init__(self, trainer: AsyncGRPOTrainer) -> None:
        self._trainer = trainer

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._trainer._metrics["eval"]["reward"].append(1.0)
        self._trainer.log({}, mode="eval")


def test_the_clients_numbers_are_in_trls_logs(client: TrainerClient) -> None:
    trainer = AsyncGRPOTrainer()
    use(trainer, client)
    trainer.train(4, logging_steps=2, dropped=(2,))
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["lora_sync/current_step"] for entry in logged] == [2, 4]
    assert [entry["lora_sync/publications_total"] for entry in logged] == [3, 5], "a count, not the sum of counts"
    assert [entry["lora_sync/discarded_total"] for entry in logged] == [2, 2]
    assert [entry[DROPPED] for entry in logged if DROPPED in entry] == [2]
    assert client.metrics().items() <= logged[-1].items()


def test_a_trl_that_counts_no_samples_is_told_of(client: TrainerClient, caplog: pytest.LogCaptureFixture) -> None:
    trainer = AsyncGRPOTrainer()
    use(trainer, client)
    trainer.train(2, taken=0)
    assert caplog.text.count("TRL has no sample/staleness_mean") == 1


def test_only_the_main_process_logs(client: TrainerClient) -> None:
    trainer = AsyncGRPOTrainer()
    use(trainer, client)
    trainer.accelerator.is_main_process = False
    trainer.control.should_log = True
    trainer._call("on_step_end")
    assert dict(trainer._metrics["train"]) == {}


# importing


def test_neither_trl_nor_torch_is_imported_before_it_is_used() -> None:
    code = "import json, sys; import trainer_client.integrations.trl; print(json.dumps(sorted(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=15)
    assert not {"trl", "torch", "peft", "transformers"} & set(json.loads(ran.stdout))
