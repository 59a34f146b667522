"""Ways to bring a policy to all replicas: the published one, and ours by mount, by the Hub's API, and merged.

Each is a trainer in small: it has an adapter in memory, and returns when every replica serves it.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import httpx2
from safetensors.numpy import save

from benchmarks.sync.world import STORE, World
from proxy.artifacts.digest import CONFIG_FILE, WEIGHTS_FILE
from proxy.contract import LOAD_PATH, UNLOAD_PATH
from proxy.simulator.adapters import Geometry, Tensors
from proxy.simulator.checkpoints import checkpoint_bytes
from tests.support.merged import dora_config, merging_by_seed
from tests.support.mounts import MOUNT
from trainer_client import TrainerClient

Result = TypeVar("Result")

MAX_STALENESS = 4
GIVES_UP_S = 300.0
"""PROXY_LORA_LOAD_TIMEOUT_S of the published proxy, and ours."""


@dataclass(frozen=True)
class Adapter:
    """What a trainer has after a step."""

    version: int
    tensors: Tensors
    config: dict[str, object]
    geometry: Geometry
    """Of the base model that it is for."""

    @property
    def bytes(self) -> int:
        """Of its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(frozen=True)
class Served:
    """How one sync went, in moments of time.perf_counter."""

    began_at: float
    free_at: float
    """From when the trainer could go on."""
    served_at: float | None
    """From when every replica served the policy; None: it was given up."""
    trouble: str = ""
    sent: int | None = None
    """Bytes that went to the store, None: the adapter's."""


class Pattern(Protocol):
    """One way, in one world."""

    def sync(self, adapter: Adapter) -> Served:
        """Bring the adapter to all replicas."""

    def close(self) -> None:
        """End."""


class Published:
    """Pause all, write through the mount and rename, tell all at once, ask again where it is late, resume all.

    A replica that sees half of the directory fails the sync for good: it has no word for that but an error.
    """

    def __init__(self, world: World, *, retry_s: float) -> None:
        self._trainer = world.trainer
        self._retry_s = retry_s
        limits = httpx2.Timeout(GIVES_UP_S)
        self._clients = [httpx2.Client(base_url=r.url, timeout=limits, trust_env=False) for r in world.replicas]
        self._pool = ThreadPoolExecutor(len(self._clients))
        self._live: deque[str] = deque()

    def sync(self, adapter: Adapter) -> Served:
        name = f"trl-policy-v{adapter.version}"
        began_at = time.perf_counter()
        self._everywhere(lambda client: client.post("/pause?mode=keep").raise_for_status())
        write(adapter, self._trainer, name)
        troubles = [trouble for trouble in self._everywhere(lambda client: self._load(client, name)) if trouble]
        served_at = time.perf_counter()
        self._everywhere(lambda client: client.post("/resume").raise_for_status())
        free_at = time.perf_counter()
        self._live.append(name)
        while troubles or len(self._live) > MAX_STALENESS + 1:
            old = self._live.pop() if troubles else self._live.popleft()
            self._everywhere(lambda client, old=old: client.post(UNLOAD_PATH, json={"lora_name": old}))  # type: ignore[misc]
            if troubles:
                return Served(began_at, free_at, None, troubles[0])
        return Served(began_at, free_at, served_at)

    def close(self) -> None:
        self._pool.shutdown()
        for client in self._clients:
            client.close()

    def _load(self, client: httpx2.Client, name: str) -> str:
        deadline = time.perf_counter() + GIVES_UP_S
        body = {"lora_name": name, "lora_path": str(MOUNT / name), "load_inplace": False}
        while True:
            answer = client.post(LOAD_PATH, json=body)
            late = answer.status_code == 404 and "No adapter found" in answer.text
            if not late or time.perf_counter() > deadline:
                return "" if answer.status_code == 200 else answer.text
            time.sleep(self._retry_s)

    def _everywhere(self, call: Callable[[httpx2.Client], Result]) -> list[Result]:
        return list(self._pool.map(call, self._clients))


class ByMount:
    """What TRL sends, to our proxy: it records the pause, and lets nobody look before the Hub lists the files."""

    def __init__(self, world: World) -> None:
        assert world.proxy is not None
        self._trainer = world.trainer
        self._client = httpx2.Client(base_url=world.proxy.url, timeout=GIVES_UP_S, trust_env=False)

    def sync(self, adapter: Adapter) -> Served:
        name = f"trl-policy-v{adapter.version}"
        began_at = time.perf_counter()
        self._client.post("/pause?mode=keep").raise_for_status()
        write(adapter, self._trainer, name)
        answer = self._client.post(LOAD_PATH, json={"lora_name": name, "lora_path": str(MOUNT / name)})
        served_at = time.perf_counter()
        self._client.post("/resume").raise_for_status()
        self._client.post(UNLOAD_PATH, json={"lora_name": f"trl-policy-v{adapter.version - MAX_STALENESS - 1}"})
        if answer.status_code != 200:
            return Served(began_at, served_at, None, answer.text)
        return Served(began_at, served_at, served_at)

    def close(self) -> None:
        self._client.close()


class ByHub:
    """TrainerClient over the Hub's API, in the background."""

    def __init__(self, world: World) -> None:
        assert world.proxy is not None
        self._client = TrainerClient(
            world.proxy.url, store=STORE, mount=MOUNT, run="run", max_staleness=MAX_STALENESS, endpoint=world.hub.url
        )

    def sync(self, adapter: Adapter) -> Served:
        began_at = time.perf_counter()
        future = self._client.publish((adapter.tensors, adapter.config), step=adapter.version, wait=False)
        free_at = time.perf_counter()
        policy = future.result(GIVES_UP_S)
        retired_s = policy.timings.retire  # after the replicas had begun to serve
        return Served(began_at, free_at, time.perf_counter() - retired_s)

    def close(self) -> None:
        self._client.close()


class ByMerge:
    """TrainerClient over the Hub's API with an adapter that vLLM cannot serve: the whole model goes to each replica.

    The merge itself is left out (`tests.support.merged`): a checkpoint with the shapes of the adapter's base model, in
    float32, is written in its place. Replicas read it one after the other.
    """

    def __init__(self, world: World) -> None:
        assert world.proxy is not None
        self._client = TrainerClient(
            world.proxy.url, store=STORE, mount=MOUNT, run="merged", max_staleness=0, endpoint=world.hub.url,
            on_unservable="merge",
        )  # fmt: skip

    def sync(self, adapter: Adapter) -> Served:
        config = dora_config(adapter.config, adapter.version)
        began_at = time.perf_counter()
        with merging_by_seed(adapter.geometry):
            future = self._client.publish((adapter.tensors, config), step=adapter.version, wait=False)
        free_at = time.perf_counter()
        policy = future.result(GIVES_UP_S)
        served_at = time.perf_counter() - policy.timings.retire
        return Served(began_at, free_at, served_at, sent=checkpoint_bytes(adapter.geometry))

    def close(self) -> None:
        self._client.close()


PATTERNS: dict[str, Callable[[World], Pattern]] = {
    "published, 2 s": lambda world: Published(world, retry_s=2.0),
    "published, 0.5 s": lambda world: Published(world, retry_s=0.5),
    "ours, mount": ByMount,
    "ours, Hub API": ByHub,
    "ours, merged": ByMerge,
}


def write(adapter: Adapter, root: Path, name: str) -> None:
    """Write a directory as TRL does: beside its name, then renamed."""
    staged = root / f".{name}"
    staged.mkdir()
    (staged / CONFIG_FILE).write_text(json.dumps(adapter.config))
    (staged / WEIGHTS_FILE).write_bytes(save(adapter.tensors, {"format": "pt"}))
    staged.rename(root / name)
