"""Load: thousands of rollouts at once and a policy every few seconds, for minutes. Does anything grow, lag or fail?

usage: python -m benchmarks.soak [--inflight 5000] [--minutes 10] [--max-inflight N] [--json FILE]

Four replicas that answer after some seconds, one proxy process, one trainer. Nine prompts in ten have 1,024 ids, the
others 8,192; one rollout in 32 is a stream. After the warm-up (a fifth of the time, a minute at most) these count:

    overhead   what the proxy adds until an answer begins, by its own count
    lag        by how much the proxy's event loop is late
    RSS        resident memory of the proxy, and its slope
    errors     rollouts that failed; refused ones (503 with Retry-After) come again and are none

`--max-inflight` below `--inflight` shows an overload: what is too much must be refused before memory grows.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx2
import uvloop

from benchmarks import rivals
from benchmarks.load import Measured, drive_by, whole_request
from benchmarks.result_file import result_file
from proxy.demo.processes import free_port
from proxy.simulator.adapters import write_adapter
from tests.support.metrics import Scrape

REPLICAS = 4
HOLD_S = 10.0
"""Seconds that an answer takes on average. With 5,000 in flight these are 500 rollouts a second."""

PUBLISH_S = 10.0
STALENESS = 4
SAMPLE_S = 2.0
PROXY_CORE, OTHER_CORE = 0, 1
WARM_UP_S = 60.0

LIMITS = {"overhead_p99_ms": 25.0, "lag_p99_ms": 25.0, "slope_mb_a_minute": 1.0, "errors": 0.0}


@dataclass(frozen=True)
class Result:
    """What one run has shown."""

    inflight: int
    seconds: float
    """After the warm-up."""
    answered: int
    refused: int
    errors: int
    syncs: int
    sync_p50_s: float
    overhead_p50_ms: float
    overhead_p99_ms: float
    lag_p99_ms: float
    rss_mb: float
    """At the end."""
    rss_before_mb: float
    """Without a rollout in flight."""
    slope_mb_a_minute: float
    cores: float
    """CPU of the proxy."""
    most_in_flight: int


class Prompts:
    """Requests for the policy that is the newest, round and round."""

    def __init__(self, seed: int) -> None:
        self.model = "sim"
        chance = random.Random(seed)
        self._prompts = [
            ",".join(str(chance.randrange(10_000, 150_000)) for _ in range(8192 if number % 10 == 0 else 1024))
            for number in range(200)
        ]

    def request(self, number: int) -> bytes:
        """Return the n-th."""
        tail = ',"stream":true}' if number % 32 == 0 else "}"
        prompt = self._prompts[number // 8 % len(self._prompts)]
        body = f'{{"model":"{self.model}","seed":{number},"max_tokens":16,"prompt":[{prompt}]{tail}'
        return whole_request(body.encode())


class Trainer:
    """Publishes a policy every PUBLISH_S and keeps STALENESS older ones, as TRL does."""

    def __init__(self, http: httpx2.AsyncClient, prompts: Prompts, folder: Path) -> None:
        self.syncs_s: list[float] = []
        self._http = http
        self._prompts = prompts
        self._folder = folder

    async def train(self) -> None:
        """Publish for ever. Raises httpx2.HTTPStatusError when an announcement fails."""
        for version in itertools.count(1):
            directory = await asyncio.to_thread(write_adapter, self._folder / f"v{version}", seed=version)
            began = time.monotonic()
            load = {"lora_name": f"soak-v{version}", "lora_path": str(directory)}
            (await self._http.post("/v1/load_lora_adapter", json=load)).raise_for_status()
            self.syncs_s.append(time.monotonic() - began)
            self._prompts.model = f"soak-v{version}"
            if (stale := version - STALENESS - 1) > 0:
                await self._http.post("/v1/unload_lora_adapter", json={"lora_name": f"soak-v{stale}"})
            await asyncio.sleep(PUBLISH_S)


@dataclass(frozen=True)
class Sample:
    """The proxy at one moment."""

    at: float
    """Seconds."""
    rss_mb: float
    inflight: int


async def run(proxy: rivals.Process, *, inflight: int, seconds: float, folder: Path, seed: int) -> Result:
    """Load the proxy for so long, and measure."""
    prompts, warm_up_s = Prompts(seed), min(WARM_UP_S, seconds / 5)
    before_mb = proxy.rss_mb()
    async with (
        httpx2.AsyncClient(base_url=f"http://127.0.0.1:{proxy.port}", trust_env=False, timeout=60) as http,
        asyncio.TaskGroup() as tasks,
    ):
        trainer = Trainer(http, prompts, folder)
        training = tasks.create_task(trainer.train())
        load = tasks.create_task(
            drive_by("127.0.0.1", proxy.port, prompts.request, connections=inflight, seconds=seconds)
        )
        await asyncio.sleep(warm_up_s)
        began, cpu_s, first = time.monotonic(), proxy.cpu_s(), Scrape((await http.get("/metrics")).text)
        samples = await _sampled(proxy, http, until=began + seconds - warm_up_s)
        last = Scrape((await http.get("/metrics")).text)
        took_s, cpu_s = time.monotonic() - began, proxy.cpu_s() - cpu_s
        measured: Measured = await load
        training.cancel()
    syncs = trainer.syncs_s
    overhead = _grown(first, last, "lora_sync_overhead_seconds")
    return Result(
        inflight=inflight,
        seconds=round(took_s, 1),
        answered=measured.requests,
        refused=measured.refused,
        errors=measured.errors,
        syncs=len(syncs),
        sync_p50_s=round(statistics.median(syncs), 3) if syncs else float("nan"),
        overhead_p50_ms=quantile_ms(overhead, 0.5),
        overhead_p99_ms=quantile_ms(overhead, 0.99),
        lag_p99_ms=quantile_ms(_grown(first, last, "lora_sync_loop_lag_seconds"), 0.99),
        rss_mb=round(samples[-1].rss_mb, 1),
        rss_before_mb=round(before_mb, 1),
        slope_mb_a_minute=round(slope([(s.at / 60, s.rss_mb) for s in samples]), 2),
        cores=round(cpu_s / took_s, 2),
        most_in_flight=max(sample.inflight for sample in samples),
    )


async def _sampled(proxy: rivals.Process, http: httpx2.AsyncClient, *, until: float) -> list[Sample]:
    samples: list[Sample] = []
    while not samples or time.monotonic() < until:
        upstreams = (await http.get("/proxy/stats")).json()["upstreams"]
        inflight = sum(upstream["inflight"] for upstream in upstreams)
        samples.append(Sample(time.monotonic(), proxy.rss_mb(), inflight))
        left = f"{max(until - time.monotonic(), 0):4.0f} s left"
        print(f"{left}  in flight {inflight}  RSS {samples[-1].rss_mb:.0f} MB", file=sys.stderr)
        await asyncio.sleep(SAMPLE_S)
    return samples


def _grown(first: Scrape, last: Scrape, name: str) -> list[tuple[float, float]]:
    """Return by how much each bucket of a histogram has grown: (upper bound in seconds, count up to there)."""
    before, after = (
        {s.labels["le"]: s.value for s in page.samples if s.name == f"{name}_bucket"} for page in (first, last)
    )
    return sorted((float(bound), count - before.get(bound, 0)) for bound, count in after.items())


def quantile_ms(buckets: Sequence[tuple[float, float]], share: float) -> float:
    """Return a quantile of a histogram, in milliseconds; within a bucket as if it were spread evenly."""
    wanted = share * buckets[-1][1]
    lower, below = 0.0, 0.0
    for upper, count in buckets:
        if count >= wanted and count > below:
            upper = lower if upper == float("inf") else upper
            return round(1e3 * (lower + (upper - lower) * (wanted - below) / (count - below)), 2)
        lower, below = upper, count
    return float("nan")


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the slope of the straight line that fits best."""
    if len(points) < 2:
        return 0.0
    return statistics.linear_regression([x for x, _ in points], [y for _, y in points]).slope


def missed(result: Result) -> list[str]:
    """Return every limit that was not kept."""
    found = {name: getattr(result, name) for name in LIMITS}
    return [
        f"{name} is {value}, at most {LIMITS[name]:g}" for name, value in found.items() if not value <= LIMITS[name]
    ]


def _replicas(stack: ExitStack) -> list[str]:
    urls = []
    for _ in range(REPLICAS):
        port = free_port()
        command = [sys.executable, "-m", "benchmarks.static_replica", str(port)]
        stack.enter_context(rivals.started("replica", command, port=port, core=OTHER_CORE))
        urls.append(f"http://127.0.0.1:{port}")
        httpx2.post(f"{urls[-1]}/set?answer_bytes=2048&hold_s={HOLD_S}", trust_env=False).raise_for_status()
    return urls


def main() -> None:
    """Run, print the figures, write JSON. Exits with 1 if a limit was missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__.partition("\n")[0])
    parser.add_argument("--inflight", type=int, default=5000, help="rollouts in flight (default 5000)")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (default 10)")
    parser.add_argument("--max-inflight", type=int, help="the proxy's PROXY_MAX_INFLIGHT")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--json", type=result_file, help="write the figures to this file")
    asked = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-")))
        port = free_port()
        command, environment = rivals.ours(_replicas(stack), port)
        limits = {"PROXY_CONN_LIMIT": str(max(1024, asked.inflight))}
        if asked.max_inflight:
            limits["PROXY_MAX_INFLIGHT"] = str(asked.max_inflight)
        proxy = stack.enter_context(
            rivals.started("proxy", command, port=port, core=PROXY_CORE, environment={**environment, **limits})
        )
        work = run(proxy, inflight=asked.inflight, seconds=60 * asked.minutes, folder=folder, seed=asked.seed)
        result = uvloop.run(work)
    for name, value in asdict(result).items():
        print(f"{name:<20} {value}")
    problems = missed(result)
    print(f"MISSED: {'; '.join(problems)}" if problems else "every limit was kept")
    if asked.json:
        asked.json.write_text(json.dumps(asdict(result), indent=2) + "\n")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
