"""How to start the proxies that are compared, each as one process tree whose CPU time can be read."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from proxy.demo.processes import free_port

REPO = Path(__file__).parents[1]
ROUTER_VENV = REPO / ".venv-router"
ROUTER = "vllm-router==0.1.17"

START_LIMIT_S = 30
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Process:
    """A running server."""

    name: str
    port: int
    pid: int

    def cpu_s(self) -> float:
        """Return the CPU seconds that the process and its descendants have used."""
        return sum(_cpu_s(pid) for pid in _tree(self.pid))

    def rss_mb(self) -> float:
        """Return the resident memory of the process alone, in MB."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) / 1024


@contextmanager
def started(
    name: str,
    command: list[str],
    *,
    port: int,
    core: int,
    ready: str = "/health",
    environment: dict[str, str] | None = None,
) -> Iterator[Process]:
    """Run a server on one core until the block ends; it must answer `ready` within START_LIMIT_S."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            ["taskset", "-c", str(core), *command],
            stdout=log,
            stderr=log,
            cwd=REPO,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
        try:
            _wait(process, f"http://127.0.0.1:{port}{ready}", name, log.fileno())
            yield Process(name, port, process.pid)
        finally:
            with suppress(ProcessLookupError):  # it has ended by itself, and why is being said
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(process: subprocess.Popen[bytes], url: str, name: str, log: int) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while True:
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except OSError as error:
            if process.poll() is not None or time.monotonic() > deadline:
                words = Path(f"/proc/self/fd/{log}").read_text(errors="replace")[-1000:]
                raise SystemExit(f"{name} did not start ({error}): {words}") from error
        time.sleep(0.05)


def ours(upstreams: list[str], port: int) -> tuple[list[str], dict[str, str]]:
    """Return the command and environment of this project's proxy."""
    environment = {"UPSTREAM_URLS": ",".join(upstreams), "PROXY_PORT": str(port), "PROXY_STATS_EVERY_S": "0"}
    return [sys.executable, "-m", "proxy.cli"], environment


def nginx(upstreams: list[str], port: int, folder: Path) -> list[str]:
    """Return the command of an nginx that only passes on."""
    if shutil.which("nginx") is None:
        raise SystemExit("benchmarks.overhead compares with nginx: install it (Debian: apt-get install nginx-light)")
    servers = "".join(f"server {url.removeprefix('http://')};" for url in upstreams)
    (folder / "nginx.conf").write_text(
        f"""daemon off; worker_processes 1; pid {folder}/pid; error_log {folder}/error.log;
events {{ worker_connections 4096; }}
http {{
  access_log off; client_max_body_size 64m; client_body_buffer_size 1m;
  client_body_temp_path {folder}/b; proxy_temp_path {folder}/p; fastcgi_temp_path {folder}/f;
  uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  upstream replicas {{ {servers} keepalive 1024; }}
  server {{ listen 127.0.0.1:{port}; location / {{
    proxy_pass http://replicas; proxy_http_version 1.1; proxy_set_header Connection "";
    proxy_buffers 64 64k; proxy_buffer_size 64k;
  }} }}
}}"""
    )
    return ["nginx", "-c", str(folder / "nginx.conf")]


def vllm_router(upstreams: list[str], port: int) -> list[str]:
    """Return the command of vllm-router with its cache-aware policy, installed into a venv of its own at first use."""
    command = ROUTER_VENV / "bin" / "vllm-router"
    if not command.exists():
        print(f"installing {ROUTER} into {ROUTER_VENV.name}", file=sys.stderr)
        venv.create(ROUTER_VENV, with_pip=True)
        pip = [str(ROUTER_VENV / "bin" / "python"), "-m", "pip", "install", "--quiet", ROUTER]
        subprocess.run(pip, check=True, stdout=subprocess.DEVNULL)
    options = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    options += ["--policy", "cache_aware", "--log-level", "warning"]
    return [str(command), *options, "--worker-urls", *upstreams]


def _tree(pid: int) -> list[int]:
    found = [pid]
    for one in found:
        children = Path(f"/proc/{one}/task/{one}/children")
        found += [int(child) for child in children.read_text().split()] if children.exists() else []
    return found


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * _TICK_S
