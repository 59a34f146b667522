"""`lora-sync jobs preflight`: what would go wrong, each with a sentence on what to do, before it costs anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import Volume

from tests.hub.conftest import BUCKET
from tests.hub.faults import Answer
from tests.hub.fleets import NAME, Fleet
from tests.hub.hub_process import USER
from tests.hub.offline_hub import OfflineHub

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def fleet(hub: OfflineHub, tmp_path: Path) -> Fleet:
    """A fleet whose config and bucket are good."""
    hub.api().create_bucket(BUCKET)
    fleet = Fleet(hub, tmp_path)
    fleet.write()
    return fleet


def _wrong(fleet: Fleet, **environment: str) -> dict[str, str]:
    """Run preflight and return what it finds wrong, by what it looked at."""
    ran = fleet.command("preflight", str(fleet.path), "--json", environment=environment)
    assert "Traceback" not in ran.stderr
    findings = json.loads(ran.stdout)
    wrong: dict[str, str] = {}
    for finding in findings:
        if not finding["ok"]:
            wrong[finding["what"]] = f"{wrong.get(finding['what'], '')}{finding['text']}\n"
    assert ran.returncode == (1 if wrong else 0), ran.stderr
    fleet.secrets_are_nowhere(ran.stdout, ran.stderr)
    return wrong


def _started_by_hand(fleet: Fleet, **fields: Any) -> None:
    """Start a replica of this fleet in another way than `up` does."""
    mount = str(fleet.folder / "lora")
    command = ["vllm", "serve", "sim", "--host", "0.0.0.0", "--port", "8000", "--enable-lora"]
    command += ["--max-loras", "4", "--max-cpu-loras", "8", "--max-lora-rank", "16"]
    labels = {"fleet": NAME, "run": "by-hand", "role": "replica", "number": "1"}
    given = {
        "image": "vllm/vllm-openai:v0.27.0",
        "command": command,
        "labels": {f"lora-sync-{name}": value for name, value in labels.items()},
        "volumes": [Volume(type="bucket", source=BUCKET, mount_path=mount, read_only=True)],
        "expose": [8000],
        **fields,
    }
    fleet.hub.api().run_job(namespace=USER, **given)


def test_nothing_is_found_where_nothing_is_wrong(fleet: Fleet) -> None:
    _started_by_hand(fleet)
    assert _wrong(fleet) == {}
    assert not list(fleet.hub.api().list_bucket_tree(BUCKET, recursive=True)), "what was written is removed"
    text = fleet.command("preflight", str(fleet.path)).stdout
    looked_at = [line.split()[1] for line in text.splitlines()]
    assert looked_at == ["token:", "ports:", "mounts:", "slots:", "keys:", "bucket:"]


def test_no_token_is_found(fleet: Fleet) -> None:
    assert "there is no token: set HF_TOKEN, or run `hf auth login`" in _wrong(fleet, HF_TOKEN="")["token"]


def test_a_token_that_is_not_valid_is_found(fleet: Fleet) -> None:
    assert "the Hub answered 401" in _wrong(fleet, HF_TOKEN="hf_other")["token"]


def test_a_token_without_access_to_the_namespace_is_found(fleet: Fleet) -> None:
    fleet.write(namespace="somebody")
    told = _wrong(fleet)["token"]
    assert "the Jobs of somebody: the Hub answered 403" in told
    assert "https://huggingface.co/settings/tokens" in told


def test_a_token_that_may_only_read_is_found(fleet: Fleet) -> None:
    fleet.hub.set_faults(token_role="read")
    assert "the token may only read; make one with write access" in _wrong(fleet)["token"]


def test_a_secret_that_is_not_set_is_found(fleet: Fleet) -> None:
    fleet.write(trainer={"secrets": ["WANDB_API_KEY"]})
    assert "not set in the environment: WANDB_API_KEY" in _wrong(fleet)["secrets"]
    up = fleet.command("up", str(fleet.path))
    assert (up.returncode, fleet.jobs()) == (2, [])
    assert _wrong(fleet, WANDB_API_KEY="x") == {}


def test_a_missing_bucket_is_found(fleet: Fleet) -> None:
    fleet.hub.api().delete_bucket(BUCKET)
    assert f"bucket {BUCKET} does not exist; `lora-sync jobs up` makes it" in _wrong(fleet)["bucket"]


@pytest.mark.parametrize("call", ["*/xet-write-token", "*/batch"])
def test_a_bucket_that_is_read_only_is_found(fleet: Fleet, call: str) -> None:
    fleet.hub.set_faults(answers=[Answer(403, f"* /api/buckets/{call.removeprefix('*/')}"), Answer(403, call)])
    told = _wrong(fleet)["bucket"]
    assert f"bucket {BUCKET} cannot be written with this token" in told


def test_a_port_that_is_not_exposed_is_found(fleet: Fleet) -> None:
    _started_by_hand(fleet, expose=[9000])
    assert "does not expose port 8000 (exposed: 9000); start it again" in _wrong(fleet)["ports"]


@pytest.mark.parametrize(
    ("args", "told"),
    [(["--port", "9000"], "listen on --port 9000, but 8000 is exposed"), (["--host=127.0.0.1"], "--host 127.0.0.1")],
)
def test_a_port_that_nobody_would_reach_is_found_before_it_is_started(fleet: Fleet, args: list[str], told: str) -> None:
    fleet.write(replicas={"args": args})
    assert told in _wrong(fleet)["ports"]


def test_a_mount_path_that_differs_between_jobs_is_found(fleet: Fleet) -> None:
    _started_by_hand(fleet, volumes=[Volume(type="bucket", source=BUCKET, mount_path="/data")])
    told = _wrong(fleet)["mounts"]
    assert f"sees bucket {BUCKET} at /data, but the config says {fleet.folder}/lora" in told


def test_a_job_without_the_bucket_is_found(fleet: Fleet) -> None:
    _started_by_hand(fleet, volumes=[])
    assert f"does not mount bucket {BUCKET}" in _wrong(fleet)["mounts"]


def test_a_proxy_that_others_reach_without_a_key_is_found(fleet: Fleet) -> None:
    fleet.write(trainer={"environment": {"PROXY_HOST": "0.0.0.0"}})
    assert "listens on 0.0.0.0 (PROXY_HOST)" in _wrong(fleet)["keys"]
    fleet.write(trainer={"environment": {"PROXY_HOST": "0.0.0.0"}, "secrets": ["PROXY_API_KEY"]})
    assert _wrong(fleet, PROXY_API_KEY="a-key-of-our-own") == {}


def test_too_few_slots_are_found_and_not_started(fleet: Fleet) -> None:
    fleet.write(replicas={"args": ["--max-loras", "2"]})
    told = _wrong(fleet)["slots"]
    assert "replicas have --max-loras 2, and max_staleness 2 with lora_rank 16 needs 4" in told
    up = fleet.command("up", str(fleet.path))
    assert up.returncode == 2
    assert told.strip() in up.stderr
    assert fleet.jobs() == []


def test_too_few_slots_of_a_running_job_are_found(fleet: Fleet) -> None:
    _started_by_hand(fleet)
    fleet.write(max_staleness=8, lora_rank=64)
    assert "--max-loras 4" in _wrong(fleet)["slots"]


def test_init_and_dry_run_touch_nothing(hub: OfflineHub, tmp_path: Path) -> None:
    fleet = Fleet(hub, tmp_path)
    assert fleet.command("init").returncode == 0
    again = fleet.command("init")
    assert again.returncode == 2
    assert "fleet.yaml is there already" in again.stderr
    calls = fleet.command("up", "--dry-run", "--json", "fleet.yaml", environment={"HF_TOKEN": ""})
    assert calls.returncode == 0, calls.stderr
    assert [call["method"] for call in json.loads(calls.stdout)] == ["create_bucket", *["run_job"] * 3]
    text = fleet.command("up", "--dry-run", "fleet.yaml").stdout
    assert text.count("run_job(") == 3
    assert "secrets='<HF_TOKEN>'" in text
    assert hub.calls == []
    fleet.secrets_are_nowhere(text)
