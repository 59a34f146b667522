"""From a config to the calls that start its Jobs, as data: what `up` carries out is what `up --dry-run` prints.

A call holds names of secrets, never their values: those are put in when it is carried out.
"""

from __future__ import annotations

import secrets
import shlex
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from huggingface_hub import Volume

from trainer_client.jobs.config import FleetConfig

FLEET_LABEL = "lora-sync-fleet"
"""The fleet's name, on each of its Jobs: how `status`, `scale` and `down` find them."""
RUN_LABEL = "lora-sync-run"
"""One `up`, on each of its Jobs: its Jobs are told from those of earlier ones of the same name."""
REPLICAS_LABEL = "lora-sync-replicas"
"""The run again, on replicas alone: how the proxy finds them (PROXY_DISCOVER)."""
ROLE_LABEL = "lora-sync-role"
NUMBER_LABEL = "lora-sync-number"

TOKEN = "HF_TOKEN"
"""The proxy sends it to the replicas and looks for them with it, so the trainer's Job always gets it."""
FLEET_VARIABLE = "LORA_SYNC_FLEET"
"""NAMESPACE/RUN, in the trainer's Job: whose replicas it cancels when it has ended."""

CODE_MOUNT = "/code"
"""Where the trainer's Job sees the directory `trainer.code`."""

LOOPBACK = "127.0.0.1"
ANYWHERE = "0.0.0.0"
"""A Job's ports are reached from outside it: a server on loopback would never be seen."""


class Role(StrEnum):
    """What a Job is for."""

    REPLICA = "replica"
    TRAINER = "trainer"


@dataclass(frozen=True)
class Seat:
    """A place in the fleet that one Job at a time takes: the trainer, or replica 1, 2, ..."""

    role: Role
    number: int = 0

    def __str__(self) -> str:
        return f"{self.role}-{self.number}" if self.role is Role.REPLICA else self.role.value


TRAINER = Seat(Role.TRAINER)


@dataclass(frozen=True)
class Run:
    """One `up` of a fleet."""

    fleet: str
    namespace: str
    id: str

    @classmethod
    def new(cls, fleet: str, namespace: str) -> Run:
        """Return a run with an id that no other has."""
        return cls(fleet, namespace, f"{fleet}-{secrets.token_hex(4)}")

    def labels(self) -> dict[str, str]:
        """Return the label by which the Jobs of this run are found."""
        return {RUN_LABEL: self.id}


@dataclass(frozen=True)
class Call:
    """A call of `HfApi`: its name and arguments, without `secrets`, of which only the names are here."""

    method: str
    arguments: dict[str, Any]
    secrets: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        shown = {**self.arguments, **({"secrets": f"<{', '.join(self.secrets)}>"} if self.secrets else {})}
        return f"{self.method}({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    def as_json(self) -> dict[str, Any]:
        """Return the call for machines."""
        arguments = {name: _plain(value) for name, value in self.arguments.items()}
        return {"method": self.method, "arguments": arguments, "secrets": list(self.secrets)}


def bucket_call(config: FleetConfig) -> Call:
    """Return the call that makes the bucket where there is none."""
    return Call("create_bucket", {"bucket_id": config.bucket, "private": True, "exist_ok": True})


def code_call(config: FleetConfig, run: Run) -> Call | None:
    """Return the call that copies the trainer's code into the bucket; None if the image has all there is."""
    if config.trainer.code is None:
        return None
    dest = f"hf://buckets/{config.bucket}/{_code_folder(run)}"
    hidden = [".*", "*/.*", "*__pycache__*"]
    return Call("sync_bucket", {"source": str(config.trainer.code), "dest": dest, "exclude": hidden, "quiet": True})


def job_call(config: FleetConfig, run: Run, seat: Seat) -> Call:
    """Return the call that starts the Job of this seat."""
    return _replica(config, run, seat) if seat.role is Role.REPLICA else _trainer(config, run)


def all_calls(config: FleetConfig, run: Run) -> list[Call]:
    """Return every call of an `up` in which nothing goes wrong, in order."""
    seats = [Seat(Role.REPLICA, number) for number in range(1, config.replicas.count + 1)]
    before = [bucket_call(config), *filter(None, [code_call(config, run)])]
    return [*before, *(job_call(config, run, seat) for seat in [*seats, TRAINER])]


def discovery(config: FleetConfig, run: Run) -> str:
    """Return PROXY_DISCOVER with which the proxy finds the replicas of this run."""
    return f"jobs:{REPLICAS_LABEL}={run.id},namespace={run.namespace},port={config.port}"


def _replica(config: FleetConfig, run: Run, seat: Seat) -> Call:
    part = config.replicas
    command = ["vllm", "serve", config.model, "--host", ANYWHERE, "--port", str(config.port)]
    arguments = _job(config, run, seat) | {
        "image": part.image,
        "command": [*command, *config.lora_args(), *part.args],
        # A Job that serves needs both: without them vLLM has neither /v1/load_lora_adapter nor /pause.
        "env": {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_SERVER_DEV_MODE": "1", **part.environment},
        "flavor": part.flavor,
        "timeout": round(part.timeout),
        "volumes": [Volume(type="bucket", source=config.bucket, mount_path=config.mount, read_only=True)],
        # Also within a network group: `up` asks for /health from outside.
        "expose": [config.port],
    }
    arguments["labels"][REPLICAS_LABEL] = run.id
    if config.network == "group":
        # Never the same twice, so that a replacement is not taken for the Job that it replaces.
        arguments["network_aliases"] = [f"{seat}-{secrets.token_hex(3)}"]
    return Call("run_job", arguments, part.secrets)


def _trainer(config: FleetConfig, run: Run) -> Call:
    part = config.trainer
    command = ["lora-sync", "jobs", "beside", "--", *part.command]
    volumes = [Volume(type="bucket", source=config.bucket, mount_path=config.mount, read_only=False)]
    steps = [part.setup] if part.setup else []
    if part.code is not None:
        steps.insert(0, f"cd {CODE_MOUNT}")
        folder = _code_folder(run)
        volumes.append(Volume(type="bucket", source=config.bucket, path=folder, mount_path=CODE_MOUNT, read_only=True))
    if steps:
        command = ["sh", "-c", " && ".join([*steps, f"exec {shlex.join(command)}"])]
    arguments = _job(config, run, TRAINER) | {
        "image": part.image,
        "command": command,
        "env": {
            "PROXY_HOST": LOOPBACK,
            "PROXY_PORT": str(part.proxy_port),
            "PROXY_DISCOVER": discovery(config, run),
            FLEET_VARIABLE: f"{run.namespace}/{run.id}",
            **part.environment,
        },
        "flavor": part.flavor,
        "timeout": round(part.timeout),
        "volumes": volumes,
    }
    return Call("run_job", arguments, tuple(dict.fromkeys([TOKEN, *part.secrets])))


def _code_folder(run: Run) -> str:
    # of its own, since a mount may remember an older copy
    return f"code/{run.id}"


def _job(config: FleetConfig, run: Run, seat: Seat) -> dict[str, Any]:
    labels = {FLEET_LABEL: run.fleet, RUN_LABEL: run.id, ROLE_LABEL: seat.role.value, NUMBER_LABEL: str(seat.number)}
    group = {"network_group": run.id} if config.network == "group" else {}
    named = {"namespace": run.namespace, "name": f"{run.fleet}-{seat}", "labels": {**config.labels, **labels}}
    return named | group


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return value.to_dict() if isinstance(value, Volume) else value
