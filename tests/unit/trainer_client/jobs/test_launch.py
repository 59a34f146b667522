"""The calls that start a fleet: what each Job gets, and what none may show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.trainer_client.jobs.configs import config
from trainer_client.jobs.launch import TRAINER, Call, Role, Run, Seat, all_calls, code_call, job_call

RUN = Run("math-r1", "me", "math-r1-0a1b2c3d")


def _replica(**fields: Any) -> Call:
    return job_call(config(**fields), RUN, Seat(Role.REPLICA, 2))


def _trainer(**fields: Any) -> Call:
    return job_call(config(**fields), RUN, TRAINER)


def test_a_replica_serves_lora_from_a_mount_that_it_cannot_write() -> None:
    arguments = _replica(lora_rank=20, max_staleness=3, replicas={"args": ["--max-model-len", "8192"]}).arguments
    command = " ".join(arguments["command"])
    assert command.startswith("vllm serve Qwen/Qwen2.5-Math-1.5B --host 0.0.0.0 --port 8000 --enable-lora")
    assert "--max-loras 5 --max-cpu-loras 10 --max-lora-rank 32" in command
    assert command.endswith("--max-model-len 8192")
    assert arguments["env"] == {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_SERVER_DEV_MODE": "1"}
    (volume,) = arguments["volumes"]
    assert (volume.type, volume.source, volume.mount_path, volume.read_only) == ("bucket", "me/runs", "/lora", True)
    assert arguments["expose"] == [8000]


def test_the_proxy_is_beside_the_trainer_on_loopback_and_finds_the_replicas_by_label() -> None:
    trainer = _trainer().arguments
    assert trainer["command"] == ["lora-sync", "jobs", "beside", "--", "python", "train.py"]
    assert trainer["env"]["PROXY_HOST"] == "127.0.0.1"
    assert trainer["env"]["PROXY_DISCOVER"] == "jobs:lora-sync-replicas=math-r1-0a1b2c3d,namespace=me,port=8000"
    assert "UPSTREAM_URLS" not in trainer["env"]
    assert "expose" not in trainer, "nobody reaches the proxy from outside"
    assert _replica().arguments["labels"]["lora-sync-replicas"] == RUN.id
    assert "lora-sync-replicas" not in trainer["labels"], "the trainer is no replica"
    (volume,) = trainer["volumes"]
    assert not volume.read_only


def test_setup_runs_before_in_one_shell() -> None:
    command = _trainer(trainer={"setup": "pip install a", "command": ["python", "a b.py"]}).arguments["command"]
    assert command == ["sh", "-c", "pip install a && exec lora-sync jobs beside -- python 'a b.py'"]


def test_code_is_copied_and_mounted_where_the_command_runs(tmp_path: Path) -> None:
    fields = config(trainer={"code": str(tmp_path), "setup": "pip install a"})
    assert [call.method for call in all_calls(fields, RUN)][:3] == ["create_bucket", "sync_bucket", "run_job"]
    copy = code_call(fields, RUN)
    assert copy is not None
    assert copy.arguments["source"] == str(tmp_path)
    trainer = job_call(fields, RUN, TRAINER).arguments
    _, code = trainer["volumes"]
    assert f"hf://buckets/{code.source}/{code.path}" == copy.arguments["dest"]
    assert (code.mount_path, code.read_only) == ("/code", True)
    assert trainer["command"][2].startswith("cd /code && pip install a && exec lora-sync jobs beside -- ")
    assert code_call(config(), RUN) is None


@pytest.mark.parametrize("seat", [Seat(Role.REPLICA, 1), TRAINER])
def test_a_network_group_is_joined_by_all_under_names_that_do_not_come_back(seat: Seat) -> None:
    fields = config(network="group")
    first, second = (job_call(fields, RUN, seat).arguments for _ in range(2))
    assert first["network_group"] == second["network_group"] == RUN.id
    if seat == TRAINER:
        assert "network_aliases" not in first
    else:
        assert first["network_aliases"] != second["network_aliases"]
        assert len(first["network_aliases"][0]) <= 34
    assert "network_group" not in job_call(config(), RUN, seat).arguments


def test_secrets_go_by_name() -> None:
    fields = {"replicas": {"secrets": ["HF_TOKEN"]}, "trainer": {"secrets": ["WANDB_API_KEY"]}}
    assert _replica(**fields).secrets == ("HF_TOKEN",)
    assert _replica().secrets == ()
    assert _trainer(**fields).secrets == ("HF_TOKEN", "WANDB_API_KEY")
    assert "secrets='<HF_TOKEN, WANDB_API_KEY>'" in str(_trainer(**fields))


def test_every_call_can_be_shown_to_people_and_machines() -> None:
    calls = all_calls(config(replicas={"count": 3}), RUN)
    assert [call.method for call in calls] == ["create_bucket", *["run_job"] * 4]
    assert [call.arguments.get("name") for call in calls[1:]] == [
        f"math-r1-{seat}" for seat in ("replica-1", "replica-2", "replica-3", "trainer")
    ]
    assert json.loads(json.dumps([call.as_json() for call in calls]))[1]["arguments"]["volumes"][0]["readOnly"] is True
    assert str(calls[0]) == "create_bucket(bucket_id='me/runs', private=True, exist_ok=True)"


def test_runs_are_told_apart() -> None:
    assert Run.new("a", "me").id != Run.new("a", "me").id
