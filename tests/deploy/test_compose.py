"""deploy/compose.yaml: what Compose takes, with commands, settings and files that are there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from proxy.settings import Settings, variables
from tests.support.proxies import proxy_command
from tests.support.tiny_model import REPO

FILE = REPO / "deploy" / "compose.yaml"
OURS = "lora-sync-proxy"
_GIVEN = re.compile(r"\$\{\w+:-([^}]*)\}")


def filled(value: Any) -> Any:
    """Return a value as Compose sees it where the user has set nothing."""
    if isinstance(value, dict):
        return {name: filled(one) for name, one in value.items()}
    if isinstance(value, list):
        return [filled(one) for one in value]
    return _GIVEN.sub(r"\1", value) if isinstance(value, str) else value


@pytest.fixture(scope="module")
def services() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = filled(YAML(typ="safe").load(FILE))["services"]
    return found


def own(services: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: service for name, service in services.items() if service["image"] == OURS}


def test_it_is_what_compose_takes() -> None:
    program = str(Path(sys.executable).with_name("check-jsonschema"))
    command = [program, "--builtin-schema", "vendor.compose-spec", str(FILE)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_it_runs_without_a_gpu(services: dict[str, dict[str, Any]]) -> None:
    default = {name for name, service in services.items() if "profiles" not in service}
    assert default == {"proxy", "simulator", "prometheus", "grafana"}
    assert services["simulator"]["deploy"]["replicas"] == 2
    assert services["vllm"]["profiles"] == ["gpu"]


def test_the_proxy_takes_its_settings(services: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    known = {name for name, _ in variables()}
    for name in known:
        monkeypatch.delenv(name, raising=False)
    environment = services["proxy"]["environment"]
    assert environment.keys() <= known
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    settings = Settings.from_env()
    assert str(settings.discovery.discover) == "dns:simulator:8000" and "simulator" in services
    assert settings.access.admin_key is None and settings.access.read_api_keys() == ()
    assert int(services["proxy"]["stop_grace_period"].removesuffix("s")) > settings.listen.shutdown_s


def test_commands_of_our_image_are_commands_of_ours(services: dict[str, dict[str, Any]]) -> None:
    for name, service in own(services).items():
        told = proxy_command({}, *service.get("command", []), "--help")
        assert told.returncode == 0, (name, told.stderr)
        assert (REPO / "deploy" / service["build"]["context"] / "Dockerfile").exists()
        assert service["read_only"] and service["cap_drop"] == ["ALL"], name


def test_vllm_gets_the_flags_that_the_client_asks_for(services: dict[str, dict[str, Any]]) -> None:
    command = [str(Path(sys.executable).with_name("lora-sync")), "vllm-args", "--max-staleness", "4", "--rank", "16"]
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    given = [part for word in services["vllm"]["command"][1:] for part in word.split("=")]
    assert given == told.stdout.split()
    environment = services["vllm"]["environment"]
    assert environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == environment["VLLM_SERVER_DEV_MODE"] == "1"


def test_files_are_there_and_adapters_are_where_everybody_looks(services: dict[str, dict[str, Any]]) -> None:
    for name, service in services.items():
        mounts = [mount.split(":") for mount in service.get("volumes", [])]
        for source, *_ in mounts:
            assert not source.startswith("./") or source == "./lora" or (FILE.parent / source).exists(), (name, source)
        if name in ("proxy", "simulator", "vllm"):
            assert ["./lora", "/lora", "ro"] in mounts


def test_prometheus_is_pointed_at_the_proxy(services: dict[str, dict[str, Any]]) -> None:
    (script,) = services["prometheus"]["command"]
    assert "s/localhost:8000/proxy:8000/" in script
    assert (REPO / "deploy/prometheus/prometheus.yml").read_text().count('["localhost:8000"]') == 2


def test_only_this_machine_may_come_in_and_images_are_pinned(services: dict[str, dict[str, Any]]) -> None:
    for name, service in services.items():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), name
        assert service["image"] == OURS or re.search(r":v?\d+\.\d+", service["image"]), name
