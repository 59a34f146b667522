"""What a trainer notices of TrainerClient, against a proxy on a real socket."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from proxy.artifacts.digest import WEIGHTS_FILE, adapter_digest
from proxy.artifacts.manifest import MANIFEST_FILE, read_manifest
from proxy.errors import SettingsError
from proxy.simulator.adapters import lora_config, lora_tensors, write_adapter
from tests.support.fake_proxy import Answer, FakeProxy, refusal, report
from trainer_client import (
    Adapter,
    AnnounceError,
    Merging,
    ProxyError,
    RewindError,
    StoreError,
    TrainerClient,
    UnservableError,
)
from trainer_client.stores import open_store

PLENTY_S = 10.0
"""More than any step of a test takes, less than its limit."""


def make_client(proxy: FakeProxy, tmp_path: Path, *, max_staleness: int = 1, **options: Any) -> TrainerClient:
    options = {"retry_timeout_s": PLENTY_S, "timeout_s": PLENTY_S, **options}
    return TrainerClient(proxy.url, store=tmp_path / "store", run="run", max_staleness=max_staleness, **options)


def adapter(tmp_path: Path, seed: int) -> Path:
    return write_adapter(tmp_path / f"adapter-{seed}", seed=seed)


def stored(tmp_path: Path) -> list[int]:
    """Versions whose files are in the store."""
    return sorted(
        read_manifest(path.parent).version for path in (tmp_path / "store" / "run").glob(f"*/{MANIFEST_FILE}")
    )


class Hooked(dict[str, Any]):
    """A state dict that calls `before` when it is gathered."""

    before: Callable[[], None]

    def items(self) -> Any:
        self.before()
        return super().items()


def state_dict(seed: int, before: Callable[[], None] = lambda: None) -> Adapter:
    tensors = Hooked(lora_tensors(rank=8, seed=seed))
    tensors.before = before
    return tensors, lora_config(rank=8)


# publishing


def test_a_published_policy_is_live_under_the_name_that_rollouts_use(tmp_path: Path) -> None:
    with FakeProxy() as proxy, make_client(proxy, tmp_path) as client:
        policy = client.publish(adapter(tmp_path, 1), step=40)
        assert policy.model == policy.name == f"run-v1-{policy.digest[:8]}"
        assert (policy.version, policy.step, policy.digest) == (1, 40, adapter_digest(tmp_path / "adapter-1"))
        assert proxy.live == {policy.name: str(tmp_path / "store" / "run" / policy.name)}
        assert policy.report.status == "live"
        assert policy.timings.total > 0
        assert client.current is policy


def test_the_announcement_lets_the_proxy_hold_the_path_to_its_manifest(tmp_path: Path) -> None:
    with FakeProxy() as proxy, make_client(proxy, tmp_path) as client:
        policy = client.publish(adapter(tmp_path, 1), step=40)
        (announced,) = proxy.loads
        assert announced.policy is not None
        assert announced.policy == read_manifest(policy.path).announcement()
        assert not announced.load_inplace


def test_a_relative_store_is_announced_as_an_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with FakeProxy() as proxy, TrainerClient(proxy.url, store="here", run="run", max_staleness=0) as client:
        policy = client.publish(adapter(tmp_path, 1), step=1)
        assert proxy.loads[0].lora_path == str(policy.path) == str(tmp_path / "here" / "run" / policy.name)


def test_the_same_bytes_again_are_the_same_policy_announced_again(tmp_path: Path) -> None:
    with FakeProxy() as proxy, make_client(proxy, tmp_path) as client:
        first = client.publish(adapter(tmp_path, 1), step=40)
        again = client.publish(adapter(tmp_path, 1), step=41)
        assert (again.name, again.version, again.step) == (first.name, 1, 40)
        assert [load.lora_name for load in proxy.loads] == [first.name, first.name]
        assert stored(tmp_path) == [1]


def test_numbering_continues_after_a_restart(tmp_path: Path) -> None:
    with FakeProxy() as proxy:
        for seed in (1, 2, 3):
            with make_client(proxy, tmp_path) as client:
                assert client.current is None
                assert client.publish(adapter(tmp_path, seed), step=seed).version == seed


def test_a_lower_step_is_refused_unless_it_is_wanted(tmp_path: Path) -> None:
    with FakeProxy() as proxy, make_client(proxy, tmp_path) as client:
        client.publish(adapter(tmp_path, 1), step=40)
        with pytest.raises(RewindError, match="step 39 is before step 40"):
            client.publish(adapter(tmp_path, 2), step=39)
        assert len(proxy.loads) == 1
        assert client.publish(adapter(tmp_path, 2), step=39, allow_rewind=True).version == 2


def test_what_cannot_be_served_reaches_neither_store_nor_proxy(tmp_path: Path) -> None:
    with FakeProxy() as proxy, make_client(proxy, tmp_path) as client:
        (adapter(tmp_path, 1) / WEIGHTS_FILE).write_bytes(b"")
        with pytest.raises(UnservableError, match=f"{WEIGHTS_FILE} ends within its header"):
            client.publish(tmp_path / "adapter-1", step=1)
        assert proxy.loads == []
        assert stored(tmp_path) == []


def test_an_interrupt_leaves_no_half_published_policy(tmp_path: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with FakeProxy() as proxy, make_client(proxy, tmp_path) as client:
        with pytest.raises(KeyboardInterrupt):
            client.publish(state_dict(1, before=interrupt), step=1)
        assert list((tmp_path / "store" / "run").iterdir()) == []
        assert client.publish(state_dict(1), step=1).version == 1


def test_threads_publish_one_after_the_other(tmp_path: Path) -> None:
    with FakeProxy() as proxy, make_client(proxy, tmp_path, max_staleness=8) as client:
        threads = [threading.Thread(target=client.publish, args=(state_dict(seed), 1)) for seed in range(1, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert stored(tmp_path) == [1, 2, 3, 4]
        assert len(proxy.live) == 4


def test_a_second_publisher_of_the_same_run_is_refused_while_one_is_at_work(tmp_path: Path) -> None:
    with FakeProxy() as proxy, make_client(proxy, tmp_path) as client:
        with open_store(tmp_path / "store", run="run").claim(), pytest.raises(StoreError, match="another publisher"):
            client.publish(state_dict(1), step=1)
        assert client.publish(state_dict(1), step=1).version == 1


# announcing


def test_a_proxy_that_starts_late_is_waited_for(tmp_path: Path) -> None:
    with FakeProxy(listening=False) as proxy, make_client(proxy, tmp_path) as client:
        starting = threading.Timer(0.5, proxy.listen)
        starting.start()
        assert client.publish(adapter(tmp_path, 1), step=1).version == 1
        starting.join()


def test_a_proxy_that_is_not_ready_is_asked_again_when_it_said(tmp_path: Path) -> None:
    with FakeProxy() as proxy, make_client(proxy, tmp_path) as client:
        proxy.script.append(Answer(503, refusal(503, "no replica is ready").body, {"Retry-After": "1"}))
        began = time.monotonic()
        policy = client.publish(adapter(tmp_path, 1), step=1)
        assert time.monotonic() - began >= 1.0
        assert list(proxy.live) == [policy.name]
        assert len(proxy.loads) == 2


def test_a_proxy_that_never_gets_ready_is_given_up(tmp_path: Path) -> None:
    with FakeProxy() as proxy, make_client(proxy, tmp_path, retry_timeout_s=0.5) as client:
        proxy.script.extend([refusal(503, "no replica is ready")] * 50)
        with pytest.raises(AnnounceError, match=r"did not load run-v1-.* \(HTTP 503\): no replica is ready") as raised:
            client.publish(adapter(tmp_path, 1), step=1)
        assert raised.value.status == 503
        assert len(proxy.loads) >= 2


def test_a_proxy_that_asks_for_more_patience_than_there_is_is_given_up_at_once(tmp_path: Path) -> None:
    with FakeProxy() as proxy, make_client(proxy, tmp_path, retry_timeout_s=5.0) as client:
        proxy.script.append(Answer(503, refusal(503, "starting").body, {"Retry-After": "3600"}))
        with pytest.raises(AnnounceError, match="starting"):
            client.publish(adapter(tmp_path, 1), step=1)
        assert len(proxy.loads) == 1


def test_an_unreachable_proxy_is_named_with_what_to_do(tmp_path: Path) -> None:
    with FakeProxy(listening=False) as proxy, make_client(proxy, tmp_path, retry_timeout_s=0.3) as client:
        with pytest.raises(
            AnnounceError, match=rf"{proxy.url} did not answer .*ConnectError.*publish the same"
        ) as raised:
            client.publish(adapter(tmp_path, 1), step=1)
        assert raised.value.status is None
        assert raised.value.policy.startswith("run-v1-")


def test_a_load_that_takes_too_long_ends_at_the_limit(tmp_path: Path) -> None:
    with FakeProxy() as proxy, make_client(proxy, tmp_path, timeout_s=0.5) as client:
        proxy.script.append(Answer(200, delay_s=60.0))
        with pytest.raises(AnnounceError, match=r"Timeout.*whether it is live is unknown"):
            client.publish(adapter(tmp_path, 1), step=1)


def test_a_refused_policy_tells_what_each_replica_said(tmp_path: Path) -> None:
    with FakeProxy() as proxy, make_client(proxy, tmp_path) as client:
        failed = report("run-v1", status="failed", message="LoRA rank 16 is greater than max_lora_rank 8.")
        proxy.script.append(refusal(502, "1 of 1 replicas did not load it", details=failed.model_dump()))
        with pytest.raises(AnnounceError) as raised:
            client.publish(adapter(tmp_path, 1), step=1)
        assert "(HTTP 502): 1 of 1 replicas did not load it; http://replica-1:8000 failed: LoRA rank 16" in str(
            raised.value
        )
        assert raised.value.report == failed
        assert len(proxy.loads) == 1
        assert client.current is None


def test_what_the_proxy_warns_of_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with FakeProxy() as proxy, make_client(proxy, tmp_path) as client, caplog.at_level(logging.WARNING):
        warned = report("run-v1", status="live").model_copy(update={"warnings": ("start vLLM with --max-loras 3",)})
        proxy.script.append(Answer(200, warned.model_dump()))
        assert client.publish(adapter(tmp_path, 1), step=1).report == warned
        assert "start vLLM with --max-loras 3" in caplog.text


def test_a_policy_that_failed_to_load_is_only_announced_again(tmp_path: Path) -> None:
    with FakeProxy() as proxy, make_client(proxy, tmp_path) as client:
        proxy.script.append(refusal(409, "no free slot"))
        with pytest.raises(AnnounceError, match="no free slot") as raised:
            client.publish(adapter(tmp_path, 1), step=1)
        policy = client.publish(adapter(tmp_path, 1), step=1)
        assert policy.name == raised.value.policy
        assert stored(tmp_path) == [1]


def test_other_bytes_after_a_failed_load_are_the_next_version(tmp_path: Path) -> None:
    with FakeProxy() as proxy, make_client(proxy, tmp_path) as client:
        proxy.script.append(refusal(409, "no free slot"))
        with pytest.raises(AnnounceError):
            client.publish(adapter(tmp_path, 1), step=1)
        assert client.publish(adapter(tmp_path, 2), step=2).version == 2


@pytest.mark.parametrize("body", ["Success: LoRA adapter 'x' added successfully.", {"status": "ok"}])
def test_vllm_itself_is_not_taken_for_the_proxy(tmp_path: Path, body: Any) -> None:
    with FakeProxy() as proxy, make_client(proxy, tmp_path) as client:
        proxy.script.append(Answer(200, body))
        with pytest.raises(AnnounceError, match="is this vLLM itself, not lora-sync-proxy"):
            client.publish(adapter(tmp_path, 1), step=1)


@pytest.mark.parametrize("body", ["<html>Bad gateway</html>", {"detail": "Not Found"}, {"error": "Unauthorized"}, {}])
def test_an_answer_in_another_shape_is_still_an_error_with_its_status(tmp_path: Path, body: Any) -> None:
    with FakeProxy() as proxy, make_client(proxy, tmp_path) as client:
        proxy.script.append(Answer(404, body))
        with pytest.raises(AnnounceError, match=r"\(HTTP 404\)"):
            client.publish(adapter(tmp_path, 1), step=1)


# retiring


def test_max_staleness_and_the_newest_stay_live_and_the_rest_is_deleted(tmp_path: Path) -> None:
    with FakeProxy() as proxy, make_client(proxy, tmp_path, max_staleness=1) as client:
        names = [client.publish(adapter(tmp_path, seed), step=seed).name for seed in (1, 2, 3, 4)]
        assert list(proxy.live) == names[2:]
        assert stored(tmp_path) == [3, 4]


def test_files_stay_while_a_rollout_needs_them_and_go_at_a_later_publication(tmp_path: Path) -> None:
    with FakeProxy() as proxy, make_client(proxy, tmp_path, max_staleness=0) as client:
        first = client.publish(adapter(tmp_path, 1), step=1)
        proxy.leased.add(first.name)
        client.publish(adapter(tmp_path, 2), step=2)
        assert stored(tmp_path) == [1, 2]
        proxy.leased.clear()
        client.publish(adapter(tmp_path, 3), step=3)
        assert stored(tmp_path) == [3]


def test_files_that_the_proxy_knows_nothing_of_go_only_after_an_acknowledged_unload(tmp_path: Path) -> None:
    with FakeProxy() as proxy:
        with make_client(proxy, tmp_path, max_staleness=0) as client:
            client.publish(adapter(tmp_path, 1), step=1)
        proxy.forget()
        with make_client(proxy, tmp_path, max_staleness=0) as client:
            client.publish(adapter(tmp_path, 2), step=2)
            assert stored(tmp_path) == [1, 2]
        with make_client(proxy, tmp_path, max_staleness=0) as client:
            client.publish(adapter(tmp_path, 3), step=3)
            assert stored(tmp_path) == [3]


@pytest.mark.parametrize("which", ["answer_to_status", "answer_to_unload"])
def test_a_404_from_something_in_front_of_the_proxy_deletes_nothing(
    tmp_path: Path, which: str, caplog: pytest.LogCaptureFixture
) -> None:
    with FakeProxy() as proxy, make_client(proxy, tmp_path, max_staleness=0) as client:
        setattr(proxy, which, Answer(404, {"detail": "Not Found"}))
        with caplog.at_level(logging.WARNING):
            for seed in (1, 2, 3):
                client.publish(adapter(tmp_path, seed), step=seed)
        assert stored(tmp_path) == [1, 2, 3]
        assert "HTTP 404" in caplog.text


def test_trouble_with_retiring_is_logged_and_tried_again_next_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with FakeProxy() as proxy, make_client(proxy, tmp_path, max_staleness=0) as client:
        client.publish(adapter(tmp_path, 1), step=1)
        proxy.answer_to_unload = refusal(500, "a replica did not answer")
        with caplog.at_level(logging.WARNING):
            assert client.publish(adapter(tmp_path, 2), step=2).version == 2
        assert "fell out of the window" in caplog.text
        assert "a replica did not answer" in caplog.text
        proxy.answer_to_unload = None
        client.publish(adapter(tmp_path, 3), step=3)
        assert stored(tmp_path) == [3]


def test_what_another_run_published_is_never_retired(tmp_path: Path) -> None:
    with FakeProxy() as proxy, make_client(proxy, tmp_path, max_staleness=0) as client:
        store = tmp_path / "store"
        with TrainerClient(proxy.url, store=store, run="run-v2", max_staleness=0) as other:
            theirs = other.publish(adapter(tmp_path, 9), step=1)
        for seed in (1, 2, 3):
            client.publish(adapter(tmp_path, seed), step=seed)
        assert theirs.name in proxy.live
        assert read_manifest(theirs.path).version == 1


# what the fleet can serve


def test_an_adapter_above_the_fleets_rank_is_refused_before_it_is_published(tmp_path: Path) -> None:
    with FakeProxy() as proxy, make_client(proxy, tmp_path) as client:
        proxy.max_lora_rank = 4
        with pytest.raises(UnservableError, match="rank 8 is above 4, the largest that the fleet takes"):
            client.publish(adapter(tmp_path, 1), step=1)
        assert (stored(tmp_path), proxy.loads) == ([], [])


def test_a_merge_without_its_extra_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trainer_client.merging.merge", None)  # as if it could not be imported
    with FakeProxy() as proxy, make_client(proxy, tmp_path, on_unservable="merge") as client:
        assert client.publish(adapter(tmp_path, 1), step=1).served_as is None
        proxy.max_lora_rank = 4
        again = make_client(proxy, tmp_path, on_unservable="merge")
        with again, pytest.raises(SettingsError, match=r"pip install 'lora-sync-proxy\[merge\]'"):
            again.publish(adapter(tmp_path, 2), step=2)


@pytest.mark.parametrize("options", [{"max_shard_bytes": 0}, {"scratch": Path("/nowhere")}])
def test_a_merge_that_cannot_work_is_refused_at_once(options: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=next(iter(options))):
        Merging(**options)


# pausing


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_a_pause_lasts_as_long_as_the_block(tmp_path: Path, mode: Any) -> None:
    with FakeProxy() as proxy, make_client(proxy, tmp_path) as client:
        with client.paused(mode):
            assert proxy.calls == [f"/pause?mode={mode}"]
        assert proxy.calls[1:] == ["/resume"]


def test_a_pause_ends_when_the_block_fails(tmp_path: Path) -> None:
    with FakeProxy() as proxy, make_client(proxy, tmp_path) as client:
        with pytest.raises(ZeroDivisionError), client.paused():
            raise ZeroDivisionError
        assert proxy.calls[-1] == "/resume"


def test_a_pause_that_is_refused_does_not_enter_the_block(tmp_path: Path) -> None:
    with FakeProxy() as proxy, make_client(proxy, tmp_path) as client:
        proxy.answer_to_pause = refusal(502, "a replica did not pause")
        with pytest.raises(ProxyError, match="a replica did not pause"), client.paused():
            pytest.fail("it was not paused")
        assert proxy.calls == ["/pause?mode=keep"]


def test_a_pause_without_an_answer_is_taken_back(tmp_path: Path) -> None:
    with FakeProxy() as proxy, make_client(proxy, tmp_path, timeout_s=0.3) as client:
        proxy.answer_to_pause = Answer(200, delay_s=1.0)
        with pytest.raises(ProxyError, match="did not answer POST /pause"), client.paused():
            pytest.fail("it was not paused")
        assert proxy.calls == ["/pause?mode=keep", "/resume"]


# the rest


def test_policies_are_those_that_the_proxy_knows(tmp_path: Path) -> None:
    with FakeProxy() as proxy, make_client(proxy, tmp_path) as client:
        policy = client.publish(adapter(tmp_path, 1), step=1)
        (known,) = client.policies()
        assert (known.name, known.state, known.files_deletable) == (policy.name, "live", False)


def test_asking_an_unreachable_proxy_names_it(tmp_path: Path) -> None:
    with (
        FakeProxy(listening=False) as proxy,
        make_client(proxy, tmp_path) as client,
        pytest.raises(ProxyError, match=f"{proxy.url} did not answer GET /proxy/policies"),
    ):
        client.policies()


def test_the_arguments_of_vllm_follow_from_the_window(tmp_path: Path) -> None:
    with FakeProxy(listening=False) as proxy, make_client(proxy, tmp_path, max_staleness=4) as client:
        assert client.max_loras == 6
        arguments = client.vllm_args(adapter(tmp_path, 1))
        assert arguments[arguments.index("--max-loras") + 1] == "6"
        assert arguments[arguments.index("--max-lora-rank") + 1] == "8"
        assert "--max-lora-rank" not in client.vllm_args()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"run": "a/b"}, "run 'a/b' cannot be used"),
        ({"max_staleness": -1}, "max_staleness is -1"),
        ({"url": "localhost:8000"}, "is not http or https"),
        ({"url": "http://"}, "is not http or https"),
        ({"url": "http://me:hunter2@proxy:8000"}, "has a user in it; set PROXY_API_KEY, or give api_key, instead"),
        ({"api_key": "schl\u00fcssel"}, "api_key holds characters that no key may have"),
        ({"url": "http://host:port"}, "cannot be used"),
    ],
)
def test_arguments_that_cannot_work_are_refused_at_once(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    arguments = {"url": "http://127.0.0.1:1", "store": tmp_path, "run": "run", "max_staleness": 1, **change}
    with pytest.raises(SettingsError, match=words):
        TrainerClient(arguments.pop("url"), **arguments)


def test_a_negative_step_is_refused(tmp_path: Path) -> None:
    with (
        FakeProxy(listening=False) as proxy,
        make_client(proxy, tmp_path) as client,
        pytest.raises(SettingsError, match="step is -1"),
    ):
        client.publish(adapter(tmp_path, 1), step=-1)


def test_closing_twice_is_fine_and_the_policy_stays_live(tmp_path: Path) -> None:
    with FakeProxy() as proxy:
        client = make_client(proxy, tmp_path)
        client.publish(adapter(tmp_path, 1), step=1)
        client.close()
        client.close()
        assert len(proxy.live) == 1


def test_the_repr_tells_run_store_proxy_and_current_policy(tmp_path: Path) -> None:
    with FakeProxy() as proxy, make_client(proxy, tmp_path) as client:
        assert repr(client) == f"<TrainerClient run=run store={tmp_path}/store/run proxy={proxy.url} current=None>"
        policy = client.publish(adapter(tmp_path, 1), step=1)
        assert repr(client).endswith(f"current={policy.name}>")
