"""What would go wrong with a fleet, found before it costs anything: each finding with a sentence on what to do.

The Jobs are looked at in one shape, whether they are planned or run already, so that one set of rules serves both.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from proxy.contract import API_KEY, API_KEY_FILE
from proxy.errors import LoraSyncError
from trainer_client import slots
from trainer_client.jobs.config import FleetConfig
from trainer_client.jobs.hub import Hub, secret_values
from trainer_client.jobs.launch import (
    ANYWHERE,
    CODE_MOUNT,
    FLEET_LABEL,
    LOOPBACK,
    ROLE_LABEL,
    TOKEN,
    Call,
    Role,
    Run,
    all_calls,
)
from trainer_client.jobs.seen import Job

PROBE_FOLDER = ".lora-sync"
"""Where the bucket is tried; what is written is removed at once."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. `text` says what is wrong and what to do, or that all is well."""

    what: str
    ok: bool
    text: str


@dataclass(frozen=True)
class Shape:
    """What matters of a Job, planned or running."""

    name: str
    role: str
    command: tuple[str, ...]
    ports: tuple[int, ...]
    mounts: tuple[tuple[str, str], ...]
    """(bucket, path) of each."""

    def argument(self, name: str) -> str | None:
        """Return the value of an argument of its command; of several the last, as vLLM does."""
        found = None
        for position, word in enumerate(self.command):
            if word.startswith(f"{name}="):
                found = word.partition("=")[2]
            elif word == name and position + 1 < len(self.command):
                found = self.command[position + 1]
        return found


def planned(call: Call) -> Shape:
    """Return the shape of a Job that a call would start."""
    arguments = call.arguments
    mounts = tuple((volume.source, volume.mount_path) for volume in arguments["volumes"])
    role = arguments["labels"][ROLE_LABEL]
    return Shape(arguments["name"], role, tuple(arguments["command"]), tuple(arguments.get("expose", ())), mounts)


def running(job: Job) -> Shape:
    """Return the shape of a Job that the Hub shows."""
    facts: Any = job.facts
    mounts = tuple((volume.source, volume.mount_path) for volume in facts.volumes or ())
    # huggingface_hub 1 has the URLs alone
    ports = getattr(facts, "expose", None) or re.findall(r"--(\d+)\.", " ".join(facts.status.expose_urls or ()))
    return Shape(str(job), job.seat.role.value, tuple(facts.command or ()), tuple(map(int, ports)), mounts)


def check_shapes(config: FleetConfig, shapes: Iterable[Shape]) -> list[Finding]:
    """Return what is wrong with these Jobs, or one finding for each rule that all is well. Pure."""
    known = list(shapes)
    replicas = [shape for shape in known if shape.role == Role.REPLICA]
    return [
        *_found("ports", (text for one in replicas for text in _port(config, one)), "every replica can be reached"),
        *_found("mounts", (text for one in known for text in _mount(config, one)), f"every Job sees {config.mount}"),
        *_found("slots", (text for one in replicas for text in _slots(config, one)), "every policy finds a slot"),
    ]


def config_findings(config: FleetConfig) -> list[Finding]:
    """Return what is wrong with the Jobs that this config would start. Asks nobody."""
    calls = all_calls(config, Run.new(config.name, config.namespace or ""))
    return check_shapes(config, (planned(call) for call in calls if call.method == "run_job"))


def preflight(config: FleetConfig) -> list[Finding]:
    """Look at everything: the token, the secrets, the bucket, the planned Jobs, and those of this fleet that run."""
    keys = _found("keys", _keys(config), "nobody comes to the proxy without a key, or from outside its Job")
    findings = [*_secrets(config), *config_findings(config), *keys]
    try:
        hub = Hub(config.namespace)
        alive = hub.jobs({FLEET_LABEL: config.name}, alive=True)
    except LoraSyncError as error:
        return [Finding("token", False, str(error)), *findings]
    if alive:
        findings += [one for one in check_shapes(config, map(running, alive)) if not one.ok]
    return [_token(hub), *findings, _bucket(hub, config)]


def _token(hub: Hub) -> Finding:
    account = hub.account()
    role = account.get("auth", {}).get("accessToken", {}).get("role")
    if role == "read":
        text = "the token may only read; make one with write access at https://huggingface.co/settings/tokens"
        return Finding("token", False, text)
    mine = {account["name"], *(org["name"] for org in account.get("orgs", []))}
    if hub.namespace not in mine:
        text = f"{account['name']} does not belong to {hub.namespace}; change `namespace`, or use another token"
        return Finding("token", False, text)
    return Finding("token", True, f"the token of {account['name']} sees the Jobs of {hub.namespace}")


def _secrets(config: FleetConfig) -> list[Finding]:
    names = {*config.replicas.secrets, *config.trainer.secrets} - {TOKEN}
    try:
        secret_values(names)
    except LoraSyncError as error:
        return [Finding("secrets", False, str(error))]
    return [Finding("secrets", True, "every secret is set")] if names else []


def _keys(config: FleetConfig) -> Iterator[str]:
    host = config.trainer.environment.get("PROXY_HOST", LOOPBACK)
    if host not in (LOOPBACK, "localhost", "::1") and not {API_KEY, API_KEY_FILE} & {
        *config.trainer.secrets,
        *config.trainer.environment,
    }:
        yield (
            f"the proxy listens on {host} (PROXY_HOST), and whoever reaches it there can use the replicas; remove "
            f"PROXY_HOST from trainer.environment, or list {API_KEY} under trainer.secrets"
        )


def _bucket(hub: Hub, config: FleetConfig) -> Finding:
    name = config.bucket
    try:
        if not hub.has_bucket(name):
            text = f"bucket {name} does not exist; `lora-sync jobs up` makes it, or now: hf buckets create {name}"
            return Finding("bucket", False, text)
        hub.try_writing(name, f"{PROBE_FOLDER}/preflight-{secrets.token_hex(4)}")
    except LoraSyncError as error:
        return Finding(
            "bucket", False, f"bucket {name} cannot be written with this token, so no policy would arrive: {error}"
        )
    return Finding("bucket", True, f"bucket {name} can be written")


def _found(what: str, texts: Iterable[str], good: str) -> list[Finding]:
    # the planned replicas differ only in their number: one sentence is enough
    return [Finding(what, False, text) for text in dict.fromkeys(texts)] or [Finding(what, True, good)]


def _port(config: FleetConfig, shape: Shape) -> Iterator[str]:
    if config.port not in shape.ports:
        exposed = ", ".join(map(str, shape.ports)) or "none"
        yield f"{shape.name} does not expose port {config.port} (exposed: {exposed}); start it again with this config"
    if (port := shape.argument("--port")) != str(config.port):
        yield f"replicas listen on --port {port}, but {config.port} is exposed; use `port` instead of --port in args"
    if (host := shape.argument("--host")) != ANYWHERE:
        yield f"replicas listen on --host {host}, which nobody outside the Job reaches; remove it from args"


def _mount(config: FleetConfig, shape: Shape) -> Iterator[str]:
    paths = [path for source, path in shape.mounts if source == config.bucket and path != CODE_MOUNT]
    if not paths:
        yield f"{shape.name} does not mount bucket {config.bucket}; start it again with this config"
    elif config.mount not in paths:
        yield (
            f"{shape.name} sees bucket {config.bucket} at {paths[0]}, but the config says {config.mount}, and policies "
            f"are announced by path; give every Job the same `mount` and start it again"
        )


def _slots(config: FleetConfig, shape: Shape) -> Iterator[str]:
    needed = {
        "--max-loras": slots.max_loras(config.max_staleness),
        "--max-lora-rank": slots.max_lora_rank(config.lora_rank),
        "--max-cpu-loras": slots.max_cpu_loras(slots.max_loras(config.max_staleness)),
    }
    for name, least in needed.items():
        given = shape.argument(name)
        if given is None or not given.isdecimal() or int(given) < least:
            yield (
                f"replicas have {name} {given}, and max_staleness {config.max_staleness} with lora_rank "
                f"{config.lora_rank} needs {least}; remove {name} from replicas.args, or start them again"
            )
