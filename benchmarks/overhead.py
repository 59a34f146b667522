"""What a proxy costs: CPU of a request, requests a second, latency added to that of the replica itself.

usage: python -m benchmarks.overhead [--quick] [--match TEXT] [--json FILE] [--proxy NAME=COMMAND ...] [--own]

Every cell is measured for every proxy in turn, several times over, and the medians are printed: the machine may be
busy, so trust ratios within one run and not figures of different runs. COMMAND may hold {port} and {upstreams} (URLs
separated by spaces). The proxy runs on the first core, replicas and load on the others.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import uvloop

from benchmarks import rivals
from benchmarks.load import Measured, bodies, drive
from benchmarks.result_file import result_file
from proxy.demo.processes import free_port

REPLICAS = 2
PROXY_CORE = 0


@dataclass(frozen=True)
class Cell:
    """One kind of traffic."""

    ids: int
    answer_bytes: int
    connections: int
    stream: bool = False
    tls: bool = False
    renamed: bool = False
    """The requests name a policy that replicas know by another name, so that ours rewrites `model` there and back."""

    @property
    def name(self) -> str:
        """Return the cell in words."""
        what = "stream of 100 events" if self.stream else f"{self.answer_bytes // 1024} KB"
        marks = f"{' / TLS' if self.tls else ''}{' / renamed' if self.renamed else ''}"
        return f"{self.ids} ids / {what} / {self.connections} conn{marks}"


@dataclass(frozen=True)
class Row:
    """The medians of one proxy in one cell."""

    proxy: str
    cell: Cell
    cpu_ms: float
    """CPU milliseconds of a request; of an event if `stream`."""
    rps: float
    """Requests a second; events a second if `stream`."""
    added_p50_ms: float
    added_p99_ms: float
    errors: int

    def flat(self) -> dict[str, Any]:
        """Return the row as JSON has it."""
        measured = asdict(self)
        return {"proxy": measured.pop("proxy"), **measured.pop("cell"), **measured}


RENAMED = [Cell(1024, 2048, 64, renamed=True), Cell(32768, 50 * 1024, 64, renamed=True)]
"""Last, since the replicas answer in the policy's name from then on."""

POLICY = "trl-policy-v1"

QUICK = [
    Cell(1024, 2048, 64),
    Cell(8192, 50 * 1024, 64),
    Cell(32768, 50 * 1024, 64),
    Cell(1024, 2048, 512),
    Cell(1024, 10 * 1024, 1),
    Cell(128, 0, 64, stream=True),
    Cell(1024, 2048, 64, tls=True),
    *RENAMED,
]

FULL = [
    *(
        Cell(ids, size, conn)
        for ids in (128, 1024, 8192, 32768)
        for size in (2048, 51200, 1 << 20)
        for conn in (1, 64, 512)
    ),
    Cell(1024, 10 * 1024, 1),
    Cell(128, 0, 64, stream=True),
    Cell(1024, 2048, 64, tls=True),
    *RENAMED,
]


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="nine cells, within three minutes")
    parser.add_argument("--match", default="", metavar="TEXT", help="only the cells whose name holds this text")
    parser.add_argument("--json", type=result_file, help="write the rows to this file")
    parser.add_argument("--proxy", action="append", default=[], metavar="NAME=COMMAND", help="another proxy to compare")
    parser.add_argument(
        "--own", action="store_true", help="beside ours only ours without counting for Prometheus, and with tracing"
    )
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each cell (default 3)")
    parser.add_argument("--seconds", type=float, default=None, help="length of one measurement")
    asked = parser.parse_args()
    others = dict(item.split("=", 1) for item in asked.proxy)
    cells = [
        cell for cell in (QUICK if asked.quick else FULL) if asked.match in cell.name and not (asked.own and cell.tls)
    ]
    seconds = asked.seconds or (1.5 if asked.quick else 3.0)
    rows = list(measure(cells, others, rounds=asked.rounds, seconds=seconds, own=asked.own))
    print(table(rows))
    if asked.json:
        asked.json.write_text(json.dumps({"rows": [row.flat() for row in rows]}, indent=2) + "\n")


def measure(
    cells: list[Cell], others: dict[str, str], *, rounds: int, seconds: float, own: bool = False
) -> Iterator[Row]:
    """Yield the rows of all cells."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="overhead-")))
        certificate = _certificate(folder) if any(cell.tls for cell in cells) else None
        plain = [_replica(stack, []) for _ in range(REPLICAS)]
        proxies = _own(stack, plain) if own else _proxies(stack, plain, others, folder)
        secure = None
        if certificate:
            tls = [_replica(stack, certificate).replace("http:", "https:") for _ in range(REPLICAS)]
            port = free_port()
            command, environment = rivals.ours(tls, port)
            environment["SSL_CERT_FILE"] = certificate[0]
            secure = stack.enter_context(
                rivals.started("ours", command, port=port, core=PROXY_CORE, environment=environment)
            )
        os.sched_setaffinity(0, range(1, os.cpu_count() or 1) if (os.cpu_count() or 1) > 1 else {0})
        for cell in cells:
            for url in plain:
                set_size = urllib.request.Request(f"{url}/set?answer_bytes={cell.answer_bytes}", method="POST")
                urllib.request.urlopen(set_size).read()
            if cell.renamed:
                for ours in proxies if own else proxies[:1]:
                    _announce(ours)
            contenders = [secure] if cell.tls and secure else proxies
            yield from _cell(cell, contenders, int(plain[0].rpartition(":")[2]), rounds=rounds, seconds=seconds)


def _cell(
    cell: Cell, proxies: list[rivals.Process], replica_port: int, *, rounds: int, seconds: float
) -> Iterator[Row]:
    requests = bodies(cell.ids, stream=cell.stream, model=POLICY if cell.renamed else "sim")
    samples: dict[str, list[tuple[float, float, float, float, int]]] = {proxy.name: [] for proxy in proxies}
    for number in range(rounds):
        direct = uvloop.run(
            drive("127.0.0.1", replica_port, requests, connections=cell.connections, seconds=seconds / 2)
        )
        for proxy in proxies[number % len(proxies) :] + proxies[: number % len(proxies)]:
            _progress(f"{cell.name}: {proxy.name}, round {number + 1} of {rounds}")
            samples[proxy.name].append(_sample(proxy, requests, cell, direct, seconds=seconds))
    for proxy in proxies:
        cpu, rate, p50, p99, errors = (list(values) for values in zip(*samples[proxy.name], strict=True))
        yield Row(
            proxy.name,
            cell,
            cpu_ms=round(statistics.median(cpu), 4),
            rps=round(statistics.median(rate), 1),
            added_p50_ms=round(statistics.median(p50), 3),
            added_p99_ms=round(statistics.median(p99), 3),
            errors=int(sum(errors)),
        )


def _sample(
    proxy: rivals.Process, requests: list[bytes], cell: Cell, direct: Measured, *, seconds: float
) -> tuple[float, float, float, float, int]:
    """Return what a row has, of one measurement."""
    cpu_s: list[float] = []
    seen = uvloop.run(
        drive(
            "127.0.0.1",
            proxy.port,
            requests,
            connections=cell.connections,
            seconds=seconds,
            begins=lambda: cpu_s.append(proxy.cpu_s()),
        )
    )
    count = seen.events if cell.stream else seen.requests
    return (
        (proxy.cpu_s() - cpu_s[0]) / max(count, 1) * 1e3,
        count / seen.seconds,
        seen.percentile_ms(0.5) - direct.percentile_ms(0.5),
        seen.percentile_ms(0.99) - direct.percentile_ms(0.99),
        seen.errors,
    )


def _proxies(stack: ExitStack, upstreams: list[str], others: dict[str, str], folder: Path) -> list[rivals.Process]:
    def start(name: str, command: list[str], port: int, environment: dict[str, str] | None = None) -> rivals.Process:
        return stack.enter_context(rivals.started(name, command, port=port, core=PROXY_CORE, environment=environment))

    ports = [free_port() for _ in range(3 + len(others))]
    command, environment = rivals.ours(upstreams, ports[0])
    found = [
        start("ours", command, ports[0], environment),
        start("nginx", rivals.nginx(upstreams, ports[1], folder), ports[1]),
        start("vllm-router", rivals.vllm_router(upstreams, ports[2]), ports[2]),
    ]
    for port, (name, text) in zip(ports[3:], others.items(), strict=True):
        found.append(start(name, shlex.split(text.format(port=port, upstreams=" ".join(upstreams))), port))
    return found


def _own(stack: ExitStack, upstreams: list[str]) -> list[rivals.Process]:
    """Start our proxy, the same without counting, and the same with tracing; a replica takes the spans."""
    tracing = {"OTEL_EXPORTER_OTLP_ENDPOINT": upstreams[-1]}
    sampling = {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.01"}
    found = []
    for name, module, more in (
        ("ours", "proxy.cli", {}),
        ("uncounted", "benchmarks.uncounted", {}),
        ("traced", "proxy.cli", tracing),
        ("traced, 1 %", "proxy.cli", tracing | sampling),
    ):
        port = free_port()
        _, environment = rivals.ours(upstreams, port)
        command, environment = [sys.executable, "-m", module], environment | more
        found.append(
            stack.enter_context(rivals.started(name, command, port=port, core=PROXY_CORE, environment=environment))
        )
    return found


def _announce(ours: rivals.Process) -> None:
    """Let ours know the policy; saying so again changes nothing. The replicas load whatever they are told to."""
    body = json.dumps({"lora_name": POLICY, "lora_path": "/nowhere/to/be/seen"}).encode()
    headers = {"Content-Type": "application/json"}
    url = f"http://127.0.0.1:{ours.port}/v1/load_lora_adapter"
    urllib.request.urlopen(urllib.request.Request(url, body, headers)).read()


def _replica(stack: ExitStack, certificate: list[str]) -> str:
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.static_replica", str(port), *certificate]
    core = (os.cpu_count() or 1) - 1
    if certificate:
        process = subprocess.Popen(["taskset", "-c", str(core), *command], cwd=rivals.REPO)
        stack.callback(process.wait)
        stack.callback(process.kill)
        time.sleep(1)
    else:
        stack.enter_context(rivals.started("replica", command, port=port, core=core))
    return f"http://127.0.0.1:{port}"


def _certificate(folder: Path) -> list[str]:
    paths = [str(folder / "certificate.pem"), str(folder / "key.pem")]
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1"
    )
    subprocess.run([*command.split(), "-out", paths[0], "-keyout", paths[1]], check=True, capture_output=True)
    return paths


def table(rows: list[Row]) -> str:
    """Return the rows as text, each with its ratio to vllm-router and to ours."""
    names = f"{'CPU ms':>8} {'ours/it':>8} {'per s':>9} {'+p50 ms':>8} {'+p99 ms':>8} errors"
    lines = [f"{'traffic':42} {'proxy':12} {names}"]
    own = {row.cell: row.cpu_ms for row in rows if row.proxy == "ours"}
    for row in rows:
        ratio = own[row.cell] / row.cpu_ms if row.cpu_ms else float("nan")
        lines.append(
            f"{row.cell.name:42} {row.proxy:12} {row.cpu_ms:8.4f} {ratio:8.2f} {row.rps:9.1f} "
            f"{row.added_p50_ms:8.3f} {row.added_p99_ms:8.3f} {row.errors:6d}"
        )
    return "\n".join(lines)


def _progress(text: str) -> None:
    print(f"\r\x1b[K{text}" if sys.stderr.isatty() else text, file=sys.stderr, end="" if sys.stderr.isatty() else "\n")


if __name__ == "__main__":
    main()
