"""The contract suite: every test runs on the simulator and, marked `vllm`, on real vLLM.

Replicas are shared, because real vLLM takes 40 s to start; there is never more than one real replica. A test that
destroys its replica, or needs other flags, asks for `own_replica`, and runs after those that share.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest

from proxy.simulator.adapters import write_adapter
from tests.support.replicas import CONTRACT_SETTINGS, Replica, SimulatedReplica, VllmReplica

KINDS = ["simulator", pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.timeout(400)])]

_names = itertools.count(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if item.path.parent == Path(__file__).parent]
    ordered = iter(sorted(here, key=_order))
    items[:] = [next(ordered) if item in here else item for item in items]


def _order(item: pytest.Item) -> tuple[bool, bool]:
    # Shared real replicas first, because an own one has to stop them.
    return item.get_closest_marker("vllm") is not None, "own_replica" in getattr(item, "fixturenames", ())


class Pool:
    """The replicas that tests share, started when first asked for."""

    def __init__(self) -> None:
        self._shared: dict[str, Replica] = {}
        self.spoiled: set[str] = set()
        """Kinds whose replica is not to be shared after the test that runs."""

    def shared(self, kind: str) -> Replica:
        """Return the running shared replica of this kind."""
        if kind not in self._shared:
            replica = SimulatedReplica(**CONTRACT_SETTINGS) if kind == "simulator" else VllmReplica()
            self._shared[kind] = replica.__enter__()
        return self._shared[kind]

    def drop(self, kind: str) -> None:
        """Stop the shared replica of this kind, if there is one."""
        self.spoiled.discard(kind)
        if replica := self._shared.pop(kind, None):
            replica.stop()


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    for kind in ("simulator", "vllm"):
        pool.drop(kind)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    kind: str = request.param
    return kind


@pytest.fixture
def replica(kind: str, pool: Pool) -> Iterator[Replica]:
    """A shared replica, put back in order after the test: nothing in flight, not paused, no adapters."""
    replica = pool.shared(kind)
    yield replica
    if kind in pool.spoiled:
        pool.drop(kind)
        return
    try:
        replica.client.post("/abort_requests", json={}).raise_for_status()
        replica.client.post("/resume").raise_for_status()
        for name in list(replica.models())[1:]:
            replica.unload(name)
    except httpx2.HTTPError:
        pool.drop(kind)


@pytest.fixture
def own_replica(kind: str, pool: Pool) -> Iterator[Callable[..., Replica]]:
    """A factory of replicas that the test may destroy. `plain` starts without the two flags and with an API key."""
    started: list[Replica] = []

    def start(*, plain: bool = False) -> Replica:
        if kind == "vllm":
            pool.drop("vllm")
        replica = _plain(kind) if plain else _destructible(kind)
        started.append(replica.__enter__())
        return replica

    yield start
    for replica in started:
        with suppress(OSError):
            replica.stop()


API_KEY = "sekrit"


def _plain(kind: str) -> Replica:
    if kind == "vllm":
        return VllmReplica(flags=False, args=("--api-key", API_KEY))
    changes: dict[str, Any] = {"runtime_lora_updating": False, "dev_mode": False, "api_key": API_KEY}
    return SimulatedReplica(**{**CONTRACT_SETTINGS, **changes})


def _destructible(kind: str) -> Replica:
    return VllmReplica() if kind == "vllm" else SimulatedReplica(**CONTRACT_SETTINGS)


@pytest.fixture
def name() -> str:
    """An adapter name that no other test uses: replicas remember names in their prefix cache."""
    return f"adapter-{next(_names)}"


@pytest.fixture
def adapter(tmp_path: Path) -> Callable[..., Path]:
    """A factory of adapter directories; another seed gives other weights."""

    def write(seed: int = 1, **fields: Any) -> Path:
        return write_adapter(tmp_path / f"adapter-{next(_names)}", seed=seed, **fields)

    return write


@pytest.fixture
def loaded(replica: Replica, adapter: Callable[..., Path]) -> Callable[..., str]:
    """A factory of adapters loaded on the shared replica; returns the name."""

    def load(seed: int = 1) -> str:
        name = f"adapter-{next(_names)}"
        answer = replica.load(name, adapter(seed))
        assert answer.status_code == 200, answer.text
        return name

    return load


@pytest.fixture
def prompt() -> list[int]:
    """A prompt of 400 tokens that no other test uses."""
    start = next(_names)
    return [(start * 7 + position * (start % 5 + 1)) % 1000 + 4 for position in range(400)]
