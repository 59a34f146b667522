"""What goes on while a policy travels: tokens that come or do not, and files that the Hub lists or does not yet."""

from __future__ import annotations

import itertools
import threading
import time
from pathlib import PurePosixPath
from types import TracebackType
from typing import Any, Self

import httpx2
from huggingface_hub import HfApi

from benchmarks.sync.world import BUCKET, LONG
from proxy.artifacts.digest import CONFIG_FILE, WEIGHTS_FILE
from tests.support.replicas import SimulatedReplica, wait_until

STANDSTILL_S = 0.2
"""A pause between two tokens that counts as standing still; a token takes 0.02 s, and a busy machine some more."""
PROMPT_TOKENS = 500
SEQUENCES = 15
"""Rollouts of each replica beside the one whose tokens are watched: their KV is what a pause can cost."""
LOOK_EVERY_S = 0.02


class Generation:
    """Long rollouts on one replica; the arrivals of one of them are noted."""

    def __init__(self, replica: SimulatedReplica) -> None:
        self._replica = replica
        self._arrivals: list[float] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._read), threading.Thread(target=self._keep_busy)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        wait_until(lambda: len(self._arrivals) > 5, limit_s=30, what="tokens flow")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._replica.client.post("/resume")
        self._replica.client.post("/abort_requests", json={})
        for thread in self._threads:
            thread.join(30)

    @property
    def recomputed(self) -> int:
        """Tokens whose KV this replica has computed a second time."""
        count: int = self._replica.state()["recomputed_tokens"]
        return count

    def standstill_s(self, start: float, end: float) -> float:
        """Return for how long no token came, between two moments of time.perf_counter."""
        moments = [start, *(at for at in list(self._arrivals) if start <= at < end), end]
        gaps = (later - earlier for earlier, later in itertools.pairwise(moments))
        return sum(gap for gap in gaps if gap > STANDSTILL_S)

    def _read(self) -> None:
        with httpx2.stream("POST", self._url, json=_body(stream=True), timeout=None, trust_env=False) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    self._arrivals.append(time.perf_counter())
                if self._stop.is_set():
                    return

    def _keep_busy(self) -> None:
        httpx2.post(self._url, json=_body(n=SEQUENCES), timeout=None, trust_env=False)

    @property
    def _url(self) -> str:
        return f"{self._replica.url}/v1/completions"


def _body(**fields: Any) -> dict[str, Any]:
    prompt = list(range(300, 300 + PROMPT_TOKENS))
    return {"model": "sim", "prompt": prompt, "max_tokens": LONG // 2, "ignore_eos": True, **fields}


class Listing:
    """Looks, from entering to leaving, when the Hub lists one more adapter whole."""

    def __init__(self, api: HfApi) -> None:
        self.whole_at: float | None = None
        """A moment of time.perf_counter, None before."""
        self._api = api
        self._before = self._adapters()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(30)

    def _look(self) -> None:
        while self.whole_at is None and not self._stop.wait(LOOK_EVERY_S):
            if self._adapters() - self._before:
                self.whole_at = time.perf_counter()

    def _adapters(self) -> set[PurePosixPath]:
        """Return the folders that have an adapter's two files; a staged one, under a dot name, is none."""
        listed = [PurePosixPath(entry.path) for entry in self._api.list_bucket_tree(BUCKET, recursive=True)]
        folders = {path.parent for path in listed if path.name == CONFIG_FILE}
        whole = folders & {path.parent for path in listed if path.name == WEIGHTS_FILE}
        return {folder for folder in whole if not folder.name.startswith(".")}
