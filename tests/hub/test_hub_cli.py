"""`lora-sync` on a bucket: publish, look at what is there, clear away; and a bar for who sits at a terminal."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from huggingface_hub import HfApi

from proxy.simulator.adapters import write_adapter
from tests.hub.conftest import BUCKET
from tests.hub.offline_hub import OfflineHub
from tests.support.adapters import write_broken
from tests.support.fake_proxy import Answer, FakeProxy, report
from tests.support.tiny_model import REPO

STORE = f"hf://buckets/{BUCKET}/lora"


@pytest.fixture
def api(hub_of_this_process: OfflineHub, api: HfApi) -> HfApi:
    return api


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-c", "from trainer_client.cli import main; main()", *arguments]


def _run(*arguments: str) -> tuple[int, str, str]:
    done = subprocess.run(_command(*arguments), cwd=REPO, capture_output=True, text=True, timeout=15)
    return done.returncode, done.stdout, done.stderr


def _publish_arguments(proxy: FakeProxy, adapter: Path, store: str = STORE) -> list[str]:
    named = {"--step": "1", "--store": store, "--mount": "/lora", "--proxy": proxy.url, "--run": "run"}
    return ["publish", str(adapter), "--max-staleness", "1", *(part for option in named.items() for part in option)]


def test_a_policy_is_published_checked_and_its_remains_are_cleared_away(api: HfApi, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", seed=1)
    api.batch_bucket_files(BUCKET, add=[(b"{}", "lora/run/run-v7-00000000/adapter_config.json")])
    with FakeProxy(sees_files=False) as proxy:
        status, out, err = _run(*_publish_arguments(proxy, adapter), "--json")
        assert (status, err) == (0, "")
        name = json.loads(out)["name"]
        assert name.startswith("run-v8-")
        assert proxy.live == {name: f"/lora/run/{name}"}
        url = f"{STORE}/run/{name}"
        assert _run("check", url) == (0, f"{url}: adapter: it goes as it is, as LoRA beside the base model\n", "")
        cleaning = ["gc", "--store", STORE, "--mount", "/lora", "--proxy", proxy.url, "--run", "run", "--min-age", "0"]
        status, out, _ = _run(*cleaning, "--json")
        assert (status, [garbage["folder"] for garbage in json.loads(out)]) == (0, ["run-v7-00000000"])
        assert "run-v7" not in str(list(api.list_bucket_tree(BUCKET, recursive=True)))


def test_what_is_in_a_bucket_is_judged_as_on_the_disk(api: HfApi, tmp_path: Path) -> None:
    adapter = write_broken(tmp_path / "adapter", "dora")
    api.batch_bucket_files(BUCKET, add=[(path, f"bad/{path.name}") for path in adapter.iterdir()])
    status, out, _ = _run("check", f"hf://buckets/{BUCKET}/bad")
    assert (status, "use_dora is set" in out) == (2, True)
    status, out, _ = _run("check", f"hf://buckets/{BUCKET}/nothing", "--json")
    assert (status, json.loads(out)["way"]) == (2, "broken")
    assert "adapter_config.json cannot be read" in json.loads(out)["reasons"][0]


def test_a_bucket_that_is_not_there_is_one_sentence_and_status_1(api: HfApi, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", seed=1)
    with FakeProxy(sees_files=False) as proxy:
        status, _, err = _run(*_publish_arguments(proxy, adapter, store="hf://buckets/tester/none"))
    assert (status, err.count("\n")) == (1, 1)
    assert "hf buckets create tester/none" in err


def _all_of(terminal: int) -> str:
    """Return what is written to a terminal until nobody has it open."""
    shown = b""
    with suppress(OSError):  # EIO: the other end is closed
        while piece := os.read(terminal, 65536):
            shown += piece
    os.close(terminal)
    return shown.decode()


@pytest.mark.parametrize("store", ["bucket", "directory", "memory://store"])
def test_a_terminal_shows_how_far_it_is_and_scripts_get_json_all_the_same(
    hub: OfflineHub, api: HfApi, tmp_path: Path, store: str
) -> None:
    hub.set_faults(landing_s=0.5)
    adapter = write_adapter(tmp_path / "adapter", seed=1)
    where = {"bucket": STORE, "directory": str(tmp_path / "store")}.get(store, store)
    terminal, stderr = pty.openpty()
    with FakeProxy(sees_files=False) as proxy:
        # held up, since the bar is drawn ten times a second
        proxy.script.append(Answer(200, report("run-v1", status="live").model_dump(), delay_s=0.5))
        command = _command(*_publish_arguments(proxy, adapter, store=where), "--json")
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
        with subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, stderr=stderr, env=environment) as process:
            os.close(stderr)
            shown = _all_of(terminal)
            assert process.stdout is not None
            policy = json.loads(process.stdout.read())
    assert policy["version"] == 1
    assert "loading on every replica" in shown
    if store == "bucket":  # anywhere else that takes no time, but on a busy machine it can be seen
        assert "waiting until the store shows it" in shown
    assert "Processing Files" not in shown, "huggingface_hub draws none of its own"
