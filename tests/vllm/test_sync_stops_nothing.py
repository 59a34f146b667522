"""A sync stops nothing, on real vLLM (P9): what runs goes on while the next policy loads, and keeps its KV."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import httpx2
import pytest

from tests.support.proxies import RunningProxy
from tests.support.replicas import VllmReplica, wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

STREAMS = 4
TOKENS = 1500
SYNC_TAKES_S = 0.5
"""How long a trainer's sync lasts here, its saving of files included."""


@pytest.fixture(scope="module")
def replica() -> Iterator[VllmReplica]:
    with VllmReplica(max_loras=4, max_cpu_loras=8) as replica:
        yield replica


class Streams:
    """Rollouts that stream, and the moments in which their tokens came."""

    def __init__(self, proxy: RunningProxy, model: str) -> None:
        self.arrivals: list[float] = []
        self._by_stream = [0] * STREAMS
        self.finished: list[str] = []
        self._threads = [threading.Thread(target=self._read, args=(proxy.url, model, seed)) for seed in range(STREAMS)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        wait_until(lambda: min(self._by_stream) > 20, limit_s=60, what="tokens flow in every stream")
        return self

    def __exit__(self, *_: object) -> None:
        for thread in self._threads:
            thread.join(120)
        assert self.finished == ["length"] * STREAMS

    def _read(self, url: str, model: str, seed: int) -> None:
        body: dict[str, Any] = {"model": model, "prompt": [100 + seed, 200, 300], "max_tokens": TOKENS, "stream": True}
        body |= {"ignore_eos": True, "temperature": 1, "seed": seed}
        with httpx2.stream("POST", f"{url}/v1/completions", json=body, timeout=120, trust_env=False) as answer:
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                self.arrivals.append(time.perf_counter())
                self._by_stream[seed] += 1
                if reason := json.loads(line[6:])["choices"][0]["finish_reason"]:
                    self.finished.append(reason)

    def between(self, start: float, end: float) -> int:
        """Return how many tokens came in this time."""
        return sum(start <= at < end for at in self.arrivals)

    def longest_gap_s(self, start: float, end: float) -> float:
        """Return the longest time without any token within this one."""
        moments = [start, *(at for at in sorted(self.arrivals) if start <= at < end), end]
        return max(later - earlier for earlier, later in itertools.pairwise(moments))


def _sync(proxy: RunningProxy, name: str, path: Path) -> tuple[float, float, float]:
    """Make a sync as TRL does. Return when the pause was answered, when it was lifted, and the seconds of the load."""
    assert proxy.client.post("/pause?mode=keep").status_code == 200
    paused_at = time.perf_counter()
    assert proxy.load(name, path).status_code == 200
    load_s = time.perf_counter() - paused_at
    remaining = SYNC_TAKES_S - load_s
    if remaining > 0:
        time.sleep(remaining)  # what a trainer does meanwhile
    resumed_at = time.perf_counter()
    assert proxy.client.post("/resume").status_code == 200
    return paused_at, resumed_at, load_s


@pytest.mark.parametrize("pause", ["lazy", "real"])
def test_rollouts_during_a_sync(replica: VllmReplica, adapter: Callable[..., Path], pause: str) -> None:
    with RunningProxy(replica.url, PROXY_PAUSE=pause) as proxy:
        assert proxy.load(f"{pause}-v1", adapter(1)).status_code == 200
        before = replica.metric("vllm:num_preemptions_total")
        with Streams(proxy, f"{pause}-v1") as streams:
            start, end, load_s = _sync(proxy, f"{pause}-v2", adapter(2))
        during, gap_s = streams.between(start, end), streams.longest_gap_s(start, end)
        preempted = replica.metric("vllm:num_preemptions_total") - before
        wait_until(lambda: proxy.inflight() == 0, what="nothing in flight")
        for version in (1, 2):
            assert proxy.unload(f"{pause}-v{version}").status_code == 200
    print(
        f"{pause}: {during} tokens in a sync of {end - start:.2f} s (load {load_s * 1e3:.0f} ms), longest time without "
        f"one {gap_s * 1e3:.0f} ms, {preempted:.0f} rollouts preempted"
    )
    if pause == "lazy":
        assert preempted == 0
        assert during > 0
        assert gap_s < end - start, "tokens came all along"
    else:
        assert preempted == STREAMS, "their KV is gone and computed again"
        assert during <= STREAMS, "but for what was on its way, nothing came"
