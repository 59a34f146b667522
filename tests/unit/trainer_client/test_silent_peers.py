"""Proxies, stores and a Hub that never answer, or never end: each wait of the client's has its limit."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pytest
from huggingface_hub import HfApi
from huggingface_hub.utils import close_session, get_session

from proxy.contract import LoadRequest
from tests.support.adapters import unopenable
from tests.support.dripping import dripping
from trainer_client import cli
from trainer_client.errors import AnnounceError, HubSilentError, ProxyError
from trainer_client.jobs import beside
from trainer_client.jobs import hub as hub_module
from trainer_client.jobs.ending import cancel_all
from trainer_client.jobs.health import HEALTHY, HealthProbe
from trainer_client.jobs.hub import Hub
from trainer_client.jobs.launch import Role, Seat
from trainer_client.jobs.seen import Job
from trainer_client.proxy_api import ProxyApi

ENOUGH_S = 10.0
"""Far above the limits that the tests set, and far below those that the client has by itself."""


@pytest.fixture(autouse=True)
def ends() -> Iterator[None]:
    """Each test ends at the limit that it sets."""
    began = time.monotonic()
    yield
    assert time.monotonic() - began < ENOUGH_S


@pytest.fixture
def endless() -> Iterator[str]:
    """A server that never comes to the end of an answer."""
    with dripping() as url:
        yield url


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An endpoint of the Hub that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        endpoint = f"http://127.0.0.1:{listening.getsockname()[1]}"
        monkeypatch.setattr(hub_module, "HfApi", partial(HfApi, endpoint=endpoint, token="hf_offline"))
        monkeypatch.setenv("HF_TOKEN", "hf_offline")
        yield endpoint


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[Path]:
    with unopenable(tmp_path / "policy") as directory:
        yield directory


def test_an_answer_that_never_ends_is_none(endless: str) -> None:
    api = ProxyApi(endless, timeout_s=0.3, retry_timeout_s=0, connect_timeout_s=5, control_timeout_s=0.3)
    with pytest.raises(ProxyError, match=r"did not answer GET /proxy/policies: .*not all of the answer within 0\.3 s"):
        api.statuses()
    with pytest.raises(AnnounceError, match=r"did not answer the announcement of run-v1: .*not all of the answer"):
        api.load(LoadRequest(lora_name="run-v1", lora_path="/lora/run-v1"))
    api.close()


@pytest.mark.parametrize("command", [["check"], ["vllm-args", "--max-staleness", "4", "--adapter"]])
def test_an_adapter_that_cannot_be_read_is_given_up(
    hanging: Path, command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "STORE_TIMEOUT_S", 0.3)
    monkeypatch.setattr(sys, "argv", ["lora-sync", *command, str(hanging)])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == cli.EXIT_FAILED
    assert f"reading {hanging} did not end within 0.3 s" in capsys.readouterr().err


def test_the_hub_has_a_limit_also_after_a_connection_could_not_be_made(
    silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_module, "CALL_TIMEOUT_S", 0.3)
    hub = Hub("me")
    close_session()  # as huggingface_hub does at each ConnectError; the next call has a client made anew
    assert get_session().timeout.read == 0.3, "what has been given up ends as well"
    with pytest.raises(HubSilentError, match="listing the Jobs of me: the Hub gave no answer"):
        hub.jobs({})


def test_a_try_to_write_into_the_bucket_is_given_up(silent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "TRY_TIMEOUT_S", 0.3)
    with pytest.raises(HubSilentError, match=r"writing to bucket me/runs: the Hub gave no answer within 0\.3 s"):
        Hub("me").try_writing("me/runs", ".lora-sync/preflight")


def job(number: int, url: str = "") -> Job:
    return Job(str(number), Seat(Role.REPLICA, number), "RUNNING", datetime.now(UTC), url=url)


def test_a_replica_whose_health_page_never_ends_is_healthy(endless: str) -> None:
    with HealthProbe() as probe:
        assert probe.ask([job(1, endless)]) == {"1": HEALTHY}


class CancelsTogether:
    """A Hub where no Job ends before all have been asked to."""

    def __init__(self, count: int) -> None:
        self._alive = {str(number): job(number) for number in range(1, count + 1)}
        self._all_asked = threading.Barrier(count, timeout=5)

    def jobs(self, labels: Mapping[str, str], *, alive: bool = False) -> list[Job]:
        return list(self._alive.values())

    def cancel(self, one: Job) -> None:
        self._all_asked.wait()
        del self._alive[one.id]


def test_no_job_waits_for_another_one_to_be_canceled() -> None:
    ended = cancel_all(CancelsTogether(16), {}, poll_s=0.01)  # type: ignore[arg-type]
    assert ended.complete and len(ended.canceled) == 16


class Unkillable:
    """A process that the kernel holds, whatever it is sent."""

    def poll(self) -> None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...

    def wait(self, timeout: float) -> int:
        raise subprocess.TimeoutExpired("held", timeout)


def test_a_trainer_that_cannot_be_killed_keeps_nobody_from_canceling_the_replicas() -> None:
    beside._end(Unkillable())  # type: ignore[arg-type]
