"""Debian's real Prometheus on what deploy/ ships, with time running faster: minutes become seconds."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx2
import pytest

from proxy.demo.processes import free_port
from tests.support.replicas import wait_until
from tests.support.tiny_model import REPO

DEPLOY = REPO / "deploy" / "prometheus"
DASHBOARD = REPO / "deploy" / "grafana" / "lora-sync-proxy.json"

WINDOW = "6s"
"""Stands for every window of minutes: two dozen scrapes."""

_SCRAPE = "250ms"
_START_S = 20


def program(name: str) -> str:
    """Return the path of `prometheus` or `promtool`; skip the test where it is not there."""
    unpacked = REPO / ".prometheus" / "usr" / "bin" / name
    found = str(unpacked) if unpacked.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not here; scripts/prometheus-env unpacks Debian's")
    return found


def hurried(text: str) -> str:
    """Return configuration or rules in which minutes are seconds."""
    text = re.sub(r"_interval: 15s", f"_interval: {_SCRAPE}", text)
    text = re.sub(r"\[\d+m\]", f"[{WINDOW}]", text)
    return re.sub(r"for: \d+m", "for: 500ms", text)


def panel_queries() -> Iterator[tuple[str, str]]:
    """Yield each panel's title with each of its queries."""
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]


def rules() -> list[str]:
    """Return the names of the alerts."""
    return re.findall(r"- alert: (\w+)", (DEPLOY / "rules.yml").read_text())


class Prometheus:
    """One process that scrapes a proxy as deploy/prometheus says, or the `config` made of it."""

    def __init__(self, target: str, folder: Path, config: str | None = None) -> None:
        self._target = target
        self._config = (DEPLOY / "prometheus.yml").read_text() if config is None else config
        self._folder = folder
        port = free_port()
        self._command = [
            program("prometheus"),
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        self._client = httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=10, trust_env=False)
        self._began = time.time()

    def __enter__(self) -> Self:
        config = self._config.replace("localhost:8000", self._target)
        (self._folder / "prometheus.yml").write_text(hurried(config))
        (self._folder / "rules.yml").write_text(hurried((DEPLOY / "rules.yml").read_text()))
        self._log = tempfile.TemporaryFile()
        self._process = subprocess.Popen(self._command, stdout=self._log, stderr=self._log)
        try:
            wait_until(self._is_ready, limit_s=_START_S, what="Prometheus is ready")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()
        self._client.close()

    def _is_ready(self) -> bool:
        assert self._process.poll() is None, "Prometheus has ended at its start"
        with suppress(httpx2.TransportError):
            return self._client.get("/-/ready").status_code == 200
        return False

    def _ask(self, path: str, **parameters: str) -> Any:
        answer = self._client.get(f"/api/v1/{path}", params=parameters).json()
        assert answer["status"] == "success", f"{parameters}: {answer.get('error')}"
        return answer["data"]

    def scrapes(self) -> dict[str, str]:
        """Return what each job's last scrape came to: `up`, `down` or `unknown`."""
        return {target["labels"]["job"]: target["health"] for target in self._ask("targets")["activeTargets"]}

    def value(self, query: str) -> float | None:
        """Return the value of a query now: the first one, or None without any."""
        found = self._ask("query", query=query)["result"]
        return float(found[0]["value"][1]) if found else None

    def has_data(self, query: str) -> bool:
        """Return whether a panel's query has given a number at any time since the start."""
        query = query.replace("$instance", self._target).replace("$__rate_interval", WINDOW)
        found = self._ask("query_range", query=query, start=f"{self._began}", end=f"{time.time()}", step="0.5")
        return any(value != "NaN" for series in found["result"] for _, value in series["values"])

    def firing(self) -> set[str]:
        """Return the names of the alerts that fire."""
        return {a["labels"]["alertname"] for a in self._ask("alerts")["alerts"] if a["state"] == "firing"}

    def wait_firing(self, name: str) -> None:
        """Wait until an alert fires."""
        wait_until(lambda: name in self.firing(), limit_s=40, what=f"{name} fires, not only {self.firing()}")
