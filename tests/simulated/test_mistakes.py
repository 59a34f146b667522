"""The commonest mistakes of somebody who begins: each gets one sentence that says what to do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxy.simulator.adapters import write_adapter
from tests.support.proxies import RunningProxy, proxy_command
from tests.support.replicas import SimulatedReplica

KEY = "key-of-this-test"


@pytest.fixture(scope="module")
def guarded(pair: list[SimulatedReplica]) -> Iterator[RunningProxy]:
    """A proxy that asks for a key."""
    with RunningProxy(*(replica.url for replica in pair), PROXY_API_KEY=KEY) as proxy:
        proxy.client.headers["Authorization"] = f"Bearer {KEY}"
        yield proxy


def lora_sync(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `lora-sync` as a user does."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PROXY_", "HF_"))}
    command = [sys.executable, "-c", "from trainer_client.cli import main; main()", *arguments]
    return subprocess.run(command, env=clean | environment, capture_output=True, text=True, timeout=15)


@pytest.mark.parametrize(
    ("url", "environment", "said"),
    [
        ("{proxy}", {}, "it asks for a key, and none was sent; set PROXY_API_KEY"),
        ("{proxy}", {"PROXY_API_KEY": "another"}, "the key that was sent (PROXY_API_KEY, or api_key) is none of the"),
        ("{proxy}/v1", {}, "ends with /v1, which is for rollouts; leave it out here"),
        ("{replica}", {}, "(HTTP 404): Not Found; is this vLLM itself, not lora-sync-proxy?"),
        ("http://127.0.0.1:1", {}, "ConnectError ([Errno 111] Connection refused); does lora-sync-proxy run there?"),
        ("127.0.0.1:8000", {}, "is not http or https; give one like http://localhost:8000"),
    ],
)
def test_a_url_or_a_key_that_is_wrong(
    guarded: RunningProxy, pair: list[SimulatedReplica], url: str, environment: dict[str, str], said: str
) -> None:
    url = url.format(proxy=guarded.url, replica=pair[0].url)
    ended = lora_sync("policies", "--proxy", url, **environment)
    assert ended.returncode in (1, 2) and not ended.stdout
    assert said in ended.stderr and len(ended.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("store", "said"),
    [
        ("hf://me/runs", "store hf://me/runs is no bucket; give hf://buckets/NAMESPACE/NAME"),
        ("hf://buckets/me/runs", "replicas cannot open hf://buckets/me/runs itself; give mount="),
    ],
)
def test_a_store_that_is_wrong(guarded: RunningProxy, tmp_path: Path, store: str, said: str) -> None:
    directory = str(write_adapter(tmp_path / "adapter", seed=1))
    arguments = ["--step", "1", "--store", store, "--run", "r", "--max-staleness", "2", "--proxy", guarded.url]
    ended = lora_sync("publish", directory, *arguments)
    assert ended.returncode == 2 and said in ended.stderr


def test_an_adapter_of_another_base_model_is_warned_of(guarded: RunningProxy, tmp_path: Path) -> None:
    directory = write_adapter(tmp_path / "adapter", seed=7)
    config = json.loads((directory / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = "meta-llama/Llama-3.1-8B"
    (directory / "adapter_config.json").write_text(json.dumps(config))
    said = "it was trained on meta-llama/Llama-3.1-8B, but the replicas serve sim; unless these are the same weights"
    checked = lora_sync("check", str(directory), "--proxy", guarded.url, PROXY_API_KEY=KEY)
    assert checked.returncode == 0 and said in checked.stdout
    arguments = ["--step", "1", "--run", "other-base", "--max-staleness", "2", "--store", str(tmp_path / "store")]
    published = lora_sync("publish", str(directory), *arguments, "--proxy", guarded.url, PROXY_API_KEY=KEY)
    assert published.returncode == 0 and said in published.stderr


def test_a_replicas_url_with_v1_is_refused() -> None:
    ended = proxy_command({"UPSTREAM_URLS": "http://127.0.0.1:8001/v1"})
    assert ended.returncode == 64
    assert "UPSTREAM_URLS has 'http://127.0.0.1:8001/v1'; leave /v1 out" in ended.stderr


@pytest.mark.parametrize("command", [[], ["jobs"], ["nccl"]])
def test_the_list_of_commands_is_not_cut_off(command: list[str]) -> None:
    ended = lora_sync(*command, "-h", COLUMNS="80")
    assert ended.returncode == 0
    commands = ended.stdout.partition("Commands:")[2]
    assert commands and "..." not in commands
