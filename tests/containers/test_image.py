"""The Dockerfile, built for real, and its image run: it serves as a user without rights, and drains when stopped."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import signal
import subprocess
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest

from proxy.demo.processes import free_port
from tests.simulated.checks import BASE, right_tokens
from tests.support.images import Image, why_not
from tests.support.replicas import descendants, wait_until
from tests.support.tiny_model import REPO

pytestmark = [pytest.mark.containers, pytest.mark.timeout(600)]

PROMPT = [100, 200, 300]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with Image(tmp_path_factory.mktemp("image")) as image:
        yield image


def _inner(outer: subprocess.Popen[str]) -> int:
    """Return the process id of what runs in a container: the innermost of the processes below `outer`."""
    *_, (pid, _name) = descendants(outer.pid)
    return pid


def _answers(url: str, path: str) -> bool:
    with suppress(httpx2.TransportError):
        return httpx2.get(url + path, timeout=5, trust_env=False).status_code == 200
    return False


def _complete(url: str, count: int) -> Any:
    body = {"model": "sim", "prompt": PROMPT, "max_tokens": count, "temperature": 0, "return_token_ids": True}
    answer = httpx2.post(f"{url}/v1/completions", json=body, timeout=30, trust_env=False)
    return answer.json()["choices"][0]["token_ids"]


def _end(*processes: subprocess.Popen[str]) -> None:
    for process in processes:
        if process.poll() is not None:
            continue
        for pid, _ in reversed(list(descendants(process.pid))):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate(timeout=30)


def test_it_tells_its_version(image: Image) -> None:
    out, _ = image.run("--version").communicate(timeout=60)
    assert out.strip() == f"lora-sync-proxy {importlib.metadata.version('lora-sync-proxy')}"


def test_it_says_how_it_wants_to_be_run(image: Image) -> None:
    assert (image.config["User"], image.config["StopSignal"]) == ("10001", "SIGTERM")
    assert "PROXY_HOST=0.0.0.0" in image.config["Env"] and "8000/tcp" in image.config["ExposedPorts"]


def test_without_replicas_it_says_what_is_missing(image: Image) -> None:
    process = image.run()
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 64 and "UPSTREAM_URLS is empty" in out


def test_it_serves_and_drains(image: Image) -> None:
    ports = free_port(), free_port()
    replica, url = (f"http://127.0.0.1:{port}" for port in ports)
    simulator = image.run("sim", "--host", "127.0.0.1", "--port", str(ports[0]))
    proxy = image.run(UPSTREAM_URLS=replica, PROXY_PORT=str(ports[1]), PROXY_PROBE_S="0.2")
    try:
        wait_until(lambda: _answers(url, "/proxy/live"), limit_s=30, what="it is live")
        wait_until(lambda: _answers(url, "/health"), limit_s=30, what="it is healthy")
        inner = _inner(proxy)
        assert f"Uid:\t{10001}\t" in Path(f"/proc/{inner}/status").read_text()
        assert _complete(url, 8) == right_tokens(BASE)
        check = image.run(entrypoint=image.config["Healthcheck"]["Test"][1:], PROXY_PORT=str(ports[1]))
        check.communicate(timeout=60)
        assert check.returncode == 0, "what Docker asks it finds well"
        with ThreadPoolExecutor(1) as pool:
            pending = pool.submit(_complete, url, 80)
            stats = f"{url}/proxy/stats"
            wait_until(lambda: httpx2.get(stats).json()["upstreams"][0]["inflight"] == 1, what="it is in flight")
            os.kill(inner, signal.SIGTERM)
            assert pending.result() == right_tokens(BASE, count=80)
        out, _ = proxy.communicate(timeout=30)
        assert proxy.returncode == 0, out
        assert "Traceback" not in out
    finally:
        _end(proxy, simulator)


def test_it_serves_from_a_root_that_nobody_can_write_to_without_any_right(image: Image) -> None:
    ports = free_port(), free_port()
    replica, url = (f"http://127.0.0.1:{port}" for port in ports)
    simulator = image.run("sim", "--host", "127.0.0.1", "--port", str(ports[0]))
    environment = {"UPSTREAM_URLS": replica, "PROXY_PORT": str(ports[1]), "PROXY_PROBE_S": "0.2"}
    proxy = image.run_read_only(**environment)
    try:
        wait_until(lambda: _answers(url, "/health"), limit_s=30, what="it is healthy")
        status = Path(f"/proc/{proxy.pid}/status").read_text()
        assert f"Uid:\t{image.config['User']}\t" in status
        assert re.findall(r"^(?:CapEff|CapPrm|CapBnd):\t0+$", status, re.MULTILINE) and "NoNewPrivs:\t1" in status
        mounts = Path(f"/proc/{proxy.pid}/mountinfo").read_text().splitlines()
        assert [line.split()[5].split(",")[0] for line in mounts if line.split()[4] == "/"] == ["ro"]
        assert _complete(url, 8) == right_tokens(BASE)
        for path in ("/proxy/dashboard", "/proxy/stats", "/metrics"):
            assert _answers(url, path), path
        os.kill(proxy.pid, signal.SIGTERM)
        out, _ = proxy.communicate(timeout=30)
        assert proxy.returncode == 0 and "Traceback" not in out, out
        assert "PROXY_API_KEY is not set, and the proxy listens on 0.0.0.0" in out
    finally:
        _end(proxy, simulator)


def test_it_says_what_it_is_made_of(image: Image) -> None:
    bill = json.loads(image.read("/opt/proxy/sbom.cdx.json"))
    assert (bill["bomFormat"], bill["metadata"]["component"]["name"]) == ("CycloneDX", "lora-sync-proxy")
    listed = {component["name"].lower().replace("_", "-"): component for component in bill["components"]}
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    direct = {re.split(r"[>=;\[ ]", one)[0] for one in project["dependencies"]}
    assert direct <= listed.keys() and "cyclonedx-bom" not in listed
    assert all(listed[name]["version"] and listed[name]["purl"] for name in direct)
