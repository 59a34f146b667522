"""Publications with `wait=False`: the training goes on, the order stays, failures are reported and block nobody."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import pytest

from proxy.errors import SettingsError
from proxy.simulator.adapters import lora_config, lora_tensors
from tests.support.fake_proxy import Answer, FakeProxy, refusal
from tests.support.stores import files_of
from trainer_client import (
    AnnounceError,
    EarlierPublishError,
    Policy,
    PublishError,
    StoreError,
    TrainerClient,
    UnservableError,
)

PLENTY_S = 10.0
"""More than any step of a test takes, less than its limit."""


def make_client(proxy: FakeProxy, tmp_path: Path, *, max_staleness: int = 8, **options: Any) -> TrainerClient:
    options = {"retry_timeout_s": PLENTY_S, "timeout_s": PLENTY_S, **options}
    return TrainerClient(proxy.url, store=tmp_path / "store", run="run", max_staleness=max_staleness, **options)


def state_dict(seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    return dict(lora_tensors(rank=8, seed=seed)), dict(lora_config(rank=8))


def finished(*futures: Future[Policy]) -> None:
    assert not wait(futures, PLENTY_S).not_done


def test_the_training_goes_on_while_a_policy_travels(tmp_path: Path) -> None:
    with FakeProxy() as proxy, make_client(proxy, tmp_path) as client:
        proxy.script.append(Answer(503, "not ready", {"Retry-After": "1"}))
        began = time.monotonic()
        future = client.publish(state_dict(1), step=1, wait=False)
        assert time.monotonic() - began < 0.5
        assert not future.done()
        policy = future.result(PLENTY_S)
        assert proxy.live == {policy.name: str(policy.path)}
        assert client.current is policy
        assert policy.timings.announce >= 1.0 > policy.timings.gather


def test_the_weights_may_change_once_publish_has_returned(tmp_path: Path) -> None:
    with FakeProxy() as proxy, make_client(proxy, tmp_path) as client:
        tensors, config = state_dict(1)
        expected = client.publish((tensors, config), step=1).digest
        blocked = client.publish(state_dict(9), step=2, wait=False)
        future = client.publish((tensors, config), step=3, wait=False)
        for tensor in tensors.values():
            tensor.fill(0.0)
        finished(blocked, future)
        assert future.result().digest == expected


def test_publications_keep_their_order(tmp_path: Path) -> None:
    with FakeProxy() as proxy, make_client(proxy, tmp_path) as client:
        proxy.script.append(Answer(503, "not ready"))  # the first takes longest
        futures = [client.publish(state_dict(seed), step=seed, wait=False) for seed in range(1, 4)]
        last = client.publish(state_dict(4), step=4)
        assert [future.result().version for future in futures] == [1, 2, 3]
        assert last.version == 4
        assert list(proxy.live) == [*(future.result().name for future in futures), last.name]


def test_a_failure_is_reported_at_the_next_call_which_goes_on_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with FakeProxy() as proxy, make_client(proxy, tmp_path) as client:
        proxy.script.append(refusal(409, "no free slot"))
        failed = client.publish(state_dict(1), step=1, wait=False)
        finished(failed)
        assert "step 1 was not published" in caplog.text
        with pytest.raises(EarlierPublishError, match=r"earlier publications have failed: .*no free slot") as raised:
            client.publish(state_dict(2), step=2, wait=False)
        (error,) = raised.value.errors
        assert error is failed.exception()
        assert isinstance(error, AnnounceError)
        third = client.publish(state_dict(3), step=3)
        assert third.version == 3
        assert [load.policy.step for load in proxy.loads if load.policy] == [1, 2, 3]
        assert len(proxy.live) == 2


def test_a_call_that_waits_reports_an_earlier_failure_after_its_own_policy_is_live(tmp_path: Path) -> None:
    with FakeProxy() as proxy, make_client(proxy, tmp_path) as client:
        proxy.script.append(refusal(409, "no free slot"))
        client.publish(state_dict(1), step=1, wait=False)
        with pytest.raises(EarlierPublishError, match="no free slot"):
            client.publish(state_dict(2), step=2)
        assert client.current is not None
        assert (client.current.step, list(proxy.live)) == (2, [client.current.name])


def test_a_call_that_fails_itself_raises_its_own_error_and_notes_the_earlier_one(tmp_path: Path) -> None:
    with FakeProxy() as proxy, make_client(proxy, tmp_path) as client:
        proxy.script.extend([refusal(409, "no free slot"), refusal(400, "no such base model")])
        client.publish(state_dict(1), step=1, wait=False)
        with pytest.raises(AnnounceError, match="no such base model") as raised:
            client.publish(state_dict(2), step=2)
        assert "no free slot" in raised.value.__notes__[0]


def test_an_adapter_that_cannot_be_served_fails_its_future_alone(tmp_path: Path) -> None:
    with FakeProxy() as proxy, make_client(proxy, tmp_path) as client:
        tensors, config = state_dict(1)
        next(iter(tensors.values())).fill(float("nan"))
        future = client.publish((tensors, config), step=1, wait=False)
        assert isinstance(future.exception(PLENTY_S), UnservableError)
        with pytest.raises(EarlierPublishError, match="NaN"):
            client.publish(state_dict(2), step=2)
        assert len(proxy.live) == 1


def test_a_store_that_hangs_ends_at_its_limit_and_does_not_block_the_next(tmp_path: Path) -> None:
    hanging = threading.Event()
    with FakeProxy() as proxy, make_client(proxy, tmp_path, store_timeout_s=1.0) as client:
        files = files_of(client._store)
        files.list = lambda: hanging.wait(PLENTY_S) and {}  # type: ignore[method-assign, assignment, return-value]
        with pytest.raises(StoreError, match=r"writing step 1 into .* did not end within 1 s"):
            client.publish(state_dict(1), step=1)
        del files.list
        with pytest.raises(StoreError, match="another publisher"):  # the hanging one still holds the lock
            client.publish(state_dict(2), step=2)
        hanging.set()
        eventually(lambda: client.publish(state_dict(3), step=3).version == 1)
        assert len(proxy.live) == 1


def eventually(done: Any) -> None:
    deadline = time.monotonic() + PLENTY_S
    while True:
        try:
            assert done()
            return
        except StoreError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_not_more_than_three_adapters_are_held_in_memory(tmp_path: Path) -> None:
    with FakeProxy() as proxy, make_client(proxy, tmp_path) as client:
        proxy.script.append(Answer(503, "not ready", {"Retry-After": "1"}))
        futures = [client.publish(state_dict(seed), step=seed, wait=False) for seed in (1, 2, 3)]
        assert not any(future.done() for future in futures)
        client.publish(state_dict(4), step=4, wait=False)
        assert futures[0].done()


# closing


def test_closing_waits_for_what_goes_on(tmp_path: Path) -> None:
    with FakeProxy() as proxy:
        with make_client(proxy, tmp_path) as client:
            proxy.script.append(Answer(503, "not ready"))
            future = client.publish(state_dict(1), step=1, wait=False)
        assert list(proxy.live) == [future.result().name]


def test_closing_reports_a_failure_that_nobody_was_told_of(tmp_path: Path) -> None:
    with FakeProxy() as proxy:
        proxy.script.append(refusal(409, "no free slot"))
        client = make_client(proxy, tmp_path)
        client.publish(state_dict(1), step=1, wait=False)
        with pytest.raises(EarlierPublishError, match="no free slot"):
            client.close()
        client.close()


def test_an_error_in_the_training_is_not_hidden_by_one_of_publishing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with FakeProxy() as proxy:
        proxy.script.append(refusal(409, "no free slot"))
        with pytest.raises(ZeroDivisionError), make_client(proxy, tmp_path) as client:
            client.publish(state_dict(1), step=1, wait=False)
            raise ZeroDivisionError
        assert "no free slot" in caplog.text


def test_closing_has_a_limit(tmp_path: Path) -> None:
    with FakeProxy() as proxy:
        proxy.script.append(Answer(200, delay_s=2.0))
        client = make_client(proxy, tmp_path, timeout_s=2.0)
        future = client.publish(state_dict(1), step=1, wait=False)
        began = time.monotonic()
        with pytest.raises(PublishError, match=r"did not end within 0\.1 s of closing"):
            client.close(timeout_s=0.1)
        assert time.monotonic() - began < 1.5
        assert isinstance(future.exception(PLENTY_S), AnnounceError)


def test_a_closed_client_publishes_no_more(tmp_path: Path) -> None:
    with FakeProxy() as proxy:
        client = make_client(proxy, tmp_path)
        client.close()
        with pytest.raises(SettingsError, match="closed"):
            client.publish(state_dict(1), step=1)
        with pytest.raises(SettingsError, match="closed"):
            client.gc()


TRAINING = """
    import sys, time
    from proxy.simulator.adapters import lora_config, lora_tensors
    from trainer_client import TrainerClient

    client = TrainerClient(sys.argv[1], store=sys.argv[2], run="run", max_staleness=4)
    client.publish((lora_tensors(rank=8, seed=1), lora_config(rank=8)), step=1, wait=False)
    print("handed over", flush=True)
    if sys.argv[3] == "interrupted":
        time.sleep(60)
"""


@pytest.mark.parametrize("how", ["interrupted", "ended"])
def test_a_training_that_ends_or_is_interrupted_loses_nothing(tmp_path: Path, how: str) -> None:
    with FakeProxy() as proxy:
        proxy.script.append(Answer(503, "not ready", {"Retry-After": "1"}))
        command = [sys.executable, "-c", textwrap.dedent(TRAINING), proxy.url, str(tmp_path / "store"), how]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout
            assert process.stdout.readline() == "handed over\n"
            if how == "interrupted":
                process.send_signal(signal.SIGINT)
            process.communicate(timeout=PLENTY_S)
        assert len(proxy.live) == 1


def test_an_interrupt_while_waiting_loses_nothing(tmp_path: Path) -> None:
    with FakeProxy() as proxy, make_client(proxy, tmp_path) as client:
        proxy.script.append(Answer(503, "not ready", {"Retry-After": "1"}))
        interrupting = threading.Timer(0.3, signal.raise_signal, [signal.SIGINT])
        interrupting.start()
        with pytest.raises(KeyboardInterrupt):
            client.publish(state_dict(1), step=1)
        interrupting.join()
        assert client.publish(state_dict(1), step=1).version == 1


def test_failures_are_logged_when_they_happen(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with FakeProxy() as proxy, make_client(proxy, tmp_path) as client, caplog.at_level(logging.ERROR):
        proxy.script.append(refusal(409, "no free slot"))
        finished(client.publish(state_dict(1), step=7, wait=False))
        assert "step 7 was not published" in caplog.text
        with pytest.raises(EarlierPublishError):
            client.close()
