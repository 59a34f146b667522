"""What the scenarios share: good adapters by seed, and pairs of simulators for modules that break none of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

import pytest

from proxy.simulator.adapters import write_adapter
from tests.simulated.checks import wait_quiet
from tests.support.proxies import RunningProxy
from tests.support.replicas import SimulatedReplica, simulators
from tests.support.wire import Wire

Adapters = Callable[[int], Path]


@pytest.fixture(scope="session")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    """Return a function that gives the adapter of a seed; no test may change it."""
    root = tmp_path_factory.mktemp("adapters")

    def of_seed(seed: int) -> Path:
        directory = root / f"seed-{seed}"
        return directory if directory.exists() else write_adapter(directory, seed=seed)

    return of_seed


@pytest.fixture(scope="session")
def lasting_pair() -> Iterator[list[SimulatedReplica]]:
    """Two simulators for the whole session. Ask for `pair`."""
    with simulators(2, max_loras=64, max_cpu_loras=128) as replicas:
        yield replicas


@pytest.fixture(scope="module")
def pair(lasting_pair: list[SimulatedReplica]) -> Iterator[list[SimulatedReplica]]:
    """Two simulators for a module whose tests leave them whole; they hold nothing at its start."""
    yield lasting_pair
    for replica in lasting_pair:
        replica.clear_faults()
        for name in list(replica.models())[1:]:
            replica.unload(name)


class Serving(Protocol):
    """Starts a proxy in front of `pair` that serves the adapter of `seed` as `name`."""

    def __call__(self, name: str, seed: int, **settings: str) -> AbstractContextManager[RunningProxy]: ...


@pytest.fixture
def serving(pair: list[SimulatedReplica], adapter: Adapters) -> Serving:
    """Return what starts such a proxy. In the end all that is faulty is well again, and nothing is in flight."""

    @contextmanager
    def started(name: str, seed: int, **settings: str) -> Iterator[RunningProxy]:
        with RunningProxy(*(replica.url for replica in pair), **settings) as proxy:
            assert proxy.load(name, adapter(seed)).status_code == 200
            try:
                yield proxy
            finally:
                for replica in pair:
                    replica.clear_faults()
            wait_quiet(proxy, *pair)

    return started


@pytest.fixture(scope="module")
def wire(pair: list[SimulatedReplica]) -> Iterator[Wire]:
    """What is between a proxy and the first of the pair, and keeps the bytes that go over it."""
    with Wire(pair[0].url) as wire:
        yield wire


@pytest.fixture(scope="module")
def proxy(pair: list[SimulatedReplica]) -> Iterator[RunningProxy]:
    """A proxy in front of `pair`, for a module that needs no settings of its own."""
    with RunningProxy(*(replica.url for replica in pair)) as proxy:
        yield proxy
