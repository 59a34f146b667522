"""What the Hub's answers mean: which are final, and which say nothing."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from functools import partial

import pytest
from huggingface_hub import HfApi

from proxy.errors import SettingsError
from tests.unit.trainer_client.jobs.configs import config
from trainer_client.errors import HubSilentError, JobsError
from trainer_client.jobs import hub as hub_module
from trainer_client.jobs.hub import Hub, secret_values
from trainer_client.jobs.launch import TRAINER, Run, job_call

RUN = Run("math-r1", "me", "math-r1-0a1b2c3d")
CALL = job_call(config(), RUN, TRAINER)
SECRETS = {"HF_TOKEN": "hf_secret_of_this_test"}


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An endpoint that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        endpoint = f"http://127.0.0.1:{listening.getsockname()[1]}"
        monkeypatch.setattr(hub_module, "HfApi", partial(HfApi, endpoint=endpoint, token="hf_offline"))
        monkeypatch.setenv("HF_TOKEN", SECRETS["HF_TOKEN"])
        yield endpoint


def test_a_start_that_gets_no_answer_has_an_unknown_outcome(silent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "CALL_TIMEOUT_S", 0.3)
    with pytest.raises(HubSilentError) as raised:
        Hub("me").run(CALL, SECRETS)
    assert "starting math-r1-trainer: the Hub gave no answer" in str(raised.value)
    assert "hf_" not in str(raised.value)


def test_without_a_token_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "get_token", lambda: None)
    with pytest.raises(JobsError, match="there is no token"):
        Hub("me")


def test_an_argument_that_this_huggingface_hub_does_not_have_is_told(
    silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def old_run_job(self: HfApi, *, image: str, command: list[str], **_: None) -> None: ...

    monkeypatch.setattr(HfApi, "run_job", old_run_job)
    with pytest.raises(JobsError, match=r"no Jobs with .*env.*; install 2\.0 or newer"):
        Hub("me").run(CALL, SECRETS)


def test_secrets_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", "1")
    monkeypatch.delenv("B_KEY", raising=False)
    assert secret_values({"A_KEY"}) == {"A_KEY": "1"}
    with pytest.raises(SettingsError, match="not set in the environment: B_KEY"):
        secret_values({"A_KEY", "B_KEY"})
