"""What the trainer's side counts, ready to be logged, and that docs/metrics.md lists exactly that."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from proxy.errors import SettingsError
from proxy.simulator.adapters import lora_config, lora_tensors
from tests.support.fake_proxy import Answer, FakeProxy, refusal
from tests.support.tiny_model import REPO
from trainer_client import AnnounceError, TrainerClient, UnservableError

PLENTY_S = 10.0


def make_client(proxy: FakeProxy, tmp_path: Path, *, max_staleness: int = 1) -> TrainerClient:
    return TrainerClient(
        proxy.url, store=tmp_path / "store", run="run", max_staleness=max_staleness, timeout_s=PLENTY_S
    )


def state_dict(seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    return dict(lora_tensors(rank=8, seed=seed)), dict(lora_config(rank=8))


def numbers(client: TrainerClient, *names: str) -> list[float]:
    """Return some of the metrics."""
    metrics = client.metrics()
    return [metrics[f"lora_sync/{name}"] for name in names]


def test_every_number_is_there_from_the_start_and_documented(tmp_path: Path) -> None:
    page = (REPO / "docs" / "metrics.md").read_text()
    listed = [line.split("|")[1].strip().strip("`") for line in page.splitlines() if line.startswith("| `lora_sync/")]
    with FakeProxy() as proxy, make_client(proxy, tmp_path) as client:
        before = client.metrics()
        assert set(before.values()) == {0.0}
        assert all(type(value) is float for value in before.values())
        client.publish(state_dict(1), step=1)
        assert list(client.metrics()) == list(before) == listed


def test_publications_and_their_phases(tmp_path: Path) -> None:
    with FakeProxy() as proxy, make_client(proxy, tmp_path) as client:
        policies = [client.publish(state_dict(step), step=step) for step in (10, 20, 30)]
        assert numbers(client, "current_version", "current_step", "staleness") == [3, 30, 0]
        assert numbers(client, "publications_total", "failures_total", "policies_live") == [3, 0, 2]
        last, totals = policies[-1].timings, [asdict(policy.timings) for policy in policies]
        for phase, took in asdict(last).items():
            assert numbers(client, f"{phase}_s") == [took]
            assert numbers(client, f"{phase}_s_total") == [pytest.approx(sum(timings[phase] for timings in totals))]
        assert numbers(client, "publish_s") == [pytest.approx(last.total)]
        assert numbers(client, "publish_s_total") == [pytest.approx(sum(policy.timings.total for policy in policies))]


def test_what_failed_is_counted_and_leaves_the_rollouts_stale(tmp_path: Path) -> None:
    with FakeProxy() as proxy, make_client(proxy, tmp_path) as client:
        client.publish(state_dict(1), step=1)
        proxy.script.append(refusal(500, "a replica refused it"))
        with pytest.raises(AnnounceError):
            client.publish(state_dict(2), step=2)
        with pytest.raises(UnservableError):
            client.publish(tmp_path / "nothing", step=3)
        assert numbers(client, "publications_total", "failures_total", "staleness") == [1, 2, 2]
        assert numbers(client, "current_version", "current_step") == [1, 1]
        client.publish(state_dict(4), step=4)
        assert numbers(client, "publications_total", "failures_total", "staleness") == [2, 2, 0]


def test_a_policy_that_travels_leaves_the_rollouts_stale(tmp_path: Path) -> None:
    with FakeProxy() as proxy, make_client(proxy, tmp_path) as client:
        client.publish(state_dict(1), step=1)
        proxy.script.append(Answer(503, "not ready", {"Retry-After": "1"}))
        futures = [client.publish(state_dict(step), step=step, wait=False) for step in (2, 3)]
        assert numbers(client, "staleness", "current_step") == [2, 1]
        assert [future.result(PLENTY_S).step for future in futures] == [2, 3]
        assert numbers(client, "staleness", "current_step", "publications_total") == [0, 3, 3]


def test_a_proxy_that_does_not_tell_leaves_the_last_count(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with FakeProxy() as proxy, make_client(proxy, tmp_path) as client:
        client.publish(state_dict(1), step=1)
        proxy.answer_to_status = Answer(500, "broken")
        client.publish(state_dict(2), step=2)
        assert "stay until the next one" in caplog.text
        assert numbers(client, "policies_live", "publications_total", "failures_total") == [1, 2, 0]


def test_the_share_of_discarded_rollouts(tmp_path: Path) -> None:
    with FakeProxy() as proxy, make_client(proxy, tmp_path) as client:
        client.record_discarded(0, of=0)
        assert numbers(client, "rollouts_total", "discarded_total", "discarded_share") == [0, 0, 0]
        client.record_discarded(3, of=10)
        client.record_discarded(0, of=2)
        assert numbers(client, "rollouts_total", "discarded_total", "discarded_share") == [12, 3, 0.25]


@pytest.mark.parametrize(("n", "of"), [(-1, 5), (6, 5), (0, -1)])
def test_a_share_that_cannot_be_is_refused(tmp_path: Path, n: int, of: int) -> None:
    with FakeProxy(listening=False) as proxy, make_client(proxy, tmp_path) as client:
        with pytest.raises(SettingsError, match=rf"{n} of {of} rollouts"):
            client.record_discarded(n, of=of)
        assert numbers(client, "rollouts_total") == [0]
