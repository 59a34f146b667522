"""kill -9 of the proxy in every phase of a load: on the same command line it finds what is there and goes on (P10)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

from proxy.simulator.adapters import write_adapter
from tests.simulated.checks import (
    Traffic,
    assert_served_by_all,
    held,
    models_of,
    right_tokens,
    wait_quiet,
)
from tests.simulated.conftest import Adapters
from tests.support.adapters import write_broken
from tests.support.proxies import RunningProxy
from tests.support.replicas import SimulatedReplica, simulators, wait_until
from trainer_client import TrainerClient

pytestmark = pytest.mark.timeout(60)  # the proxy starts twice

MAX_STALENESS = 1
SLOTS = MAX_STALENESS + 2
NAME = "trl-policy-v2"

Reached = Callable[[], bool]


@dataclass
class World:
    """Two replicas with a proxy, and a policy that must survive everything."""

    replicas: list[SimulatedReplica]
    proxy: RunningProxy
    adapter: Adapters

    def state(self) -> str:
        """Return the state of the newest policy."""
        policies = self.proxy.client.get("/proxy/policies").json()["policies"]
        return str(policies[-1]["state"])


@pytest.fixture
def world(adapter: Adapters) -> Iterator[World]:
    with (
        simulators(2, max_loras=SLOTS, max_num_seqs=2) as replicas,
        RunningProxy(*(r.url for r in replicas), PROXY_VERIFY_S="60", PROXY_POLICY_IDLE_S="0.1") as proxy,
    ):
        yield World(replicas, proxy, adapter)


@contextmanager
def waiting_for_its_name(world: World) -> Iterator[Reached]:
    """A rollout uses what the name meant so far."""
    assert world.proxy.load(NAME, world.adapter(7)).status_code == 200
    with ThreadPoolExecutor(1) as pool:
        pool.submit(world.proxy.completion, NAME, max_tokens=3000)
        wait_until(lambda: world.proxy.inflight() == 1, what="a rollout is in flight")
        yield lambda: "announced again" in world.proxy.log()


@contextmanager
def waiting_for_a_slot(world: World) -> Iterator[Reached]:
    """The policy that must go is not unloaded yet."""
    while len(models_of(world.proxy)) - 1 < SLOTS:
        seed = 10 + len(models_of(world.proxy))
        assert world.proxy.load(f"filler-v{seed}", world.adapter(seed)).status_code == 200
    world.replicas[0].set_faults(unload_delay_s=4)
    yield lambda: "waits for one of the slots" in world.proxy.log()


@contextmanager
def half_there(world: World) -> Iterator[Reached]:
    """One replica holds it, the other does not see it."""
    world.replicas[1].set_faults(late={"seconds": 60})
    holds = len(held(world.replicas[0]))
    yield lambda: len(held(world.replicas[0])) > holds and "No adapter found" in world.proxy.log()


@contextmanager
def being_verified(world: World) -> Iterator[Reached]:
    """Both hold it; one is full, and has not answered the probe."""
    with world.replicas[1].in_flight(n=2, max_tokens=3000):
        yield lambda: bool(world.replicas[1].state()["waiting"])


@contextmanager
def committed(world: World) -> Iterator[Reached]:
    """It is live, and the answer is on its way."""
    before = len(models_of(world.proxy))
    yield lambda: len(models_of(world.proxy)) > before


@contextmanager
def rolling_back(world: World) -> Iterator[Reached]:
    """One has refused it, the other has not unloaded it yet."""
    first, second = world.replicas
    first.set_faults(unload_delay_s=4)
    second.set_faults(load_error={"status": 500})
    before = sum(first.state()["unloads"].values())
    yield lambda: world.state() == "failed"
    # It is carried out although its caller is gone: under what comes next it would take away what is loaded again.
    wait_until(lambda: sum(first.state()["unloads"].values()) > before, what="the unload under way has ended")


Phase = Callable[[World], AbstractContextManager[Reached]]

PHASES: list[Phase] = [waiting_for_a_slot, half_there, being_verified, committed, rolling_back]


def _name(phase: Phase) -> str:
    return phase.__name__


def kill_in(phase: Phase, world: World, begin: Callable[[], Any]) -> Future[Any]:
    """Begin a load, kill the proxy in that phase of it, start it again, and return what the load has become."""
    with ThreadPoolExecutor(1) as pool:
        with phase(world) as reached:
            loading = pool.submit(begin)
            wait_until(reached, what=phase.__name__)
            world.proxy.kill()
        for replica in world.replicas:
            replica.clear_faults()
        world.proxy.start()
    return loading


@pytest.mark.parametrize("phase", [waiting_for_its_name, *PHASES], ids=_name)
def test_the_next_run_starts_without_anyone_cleaning_up(world: World, phase: Phase) -> None:
    proxy, adapter = world.proxy, world.adapter
    assert proxy.load("kept-v1", adapter(1)).status_code == 200
    assert proxy.complete("kept-v1") == right_tokens(adapter(1))
    ended = kill_in(phase, world, lambda: proxy.load(NAME, adapter(2)))
    if phase is not committed:
        assert isinstance(ended.exception(), httpx2.TransportError), "TRL ends here: it never repeats control calls"
    if phase is not waiting_for_a_slot:
        with Traffic(proxy, {"kept-v1": adapter(1)}) as traffic:
            traffic.wait_more(10)
    # A new run knows nothing of the old one: the same name means other bytes.
    answer = proxy.load(NAME, adapter(3))
    assert answer.status_code == 200, answer.text
    with Traffic(proxy, {NAME: adapter(3)}) as traffic:
        traffic.wait_more(20)
        wait_until(lambda: all(held(r).get(NAME) == str(adapter(3)) for r in world.replicas), what="one generation")
    assert_served_by_all(world.replicas, NAME, adapter(3))
    assert all(len(replica.models()) - 1 <= SLOTS for replica in world.replicas)
    wait_quiet(proxy, *world.replicas)


def test_while_it_waits_for_the_files(world: World, tmp_path: Path) -> None:
    directory = write_broken(tmp_path / "policy", "truncated")
    world.proxy.load("kept-v1", world.adapter(1))
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(world.proxy.load, NAME, directory)
        wait_until(lambda: "waits for its files" in world.proxy.log(), what="it has looked at them")
        world.proxy.kill()
        assert isinstance(loading.exception(), httpx2.TransportError)
    world.proxy.start()
    assert models_of(world.proxy) == ["sim", "kept-v1"]
    write_adapter(directory, seed=5)
    assert world.proxy.load(NAME, directory).status_code == 200
    assert world.proxy.complete(NAME) == right_tokens(directory)
    assert world.proxy.complete("kept-v1") == right_tokens(world.adapter(1))
    wait_quiet(world.proxy, *world.replicas)


@pytest.mark.parametrize("phase", PHASES, ids=_name)
def test_trainer_client_carries_on(world: World, tmp_path: Path, phase: Phase) -> None:
    proxy, adapter = world.proxy, world.adapter
    with TrainerClient(
        proxy.url, store=tmp_path, run="math-r1", max_staleness=MAX_STALENESS, retry_timeout_s=30
    ) as client:
        first = client.publish(adapter(1), step=1)
        second = kill_in(phase, world, lambda: client.publish(adapter(2), step=2)).result()
        assert second.version == 2
        weights = {second.model: second.path}
        if phase is not waiting_for_a_slot:
            weights[first.model] = first.path
        with Traffic(proxy, weights) as traffic:
            traffic.wait_more(20)
            third = client.publish(adapter(3), step=3)
            traffic.weights.pop(first.model, None)
            traffic.serve(third.model, third.path)
            traffic.wait_more(20)
        for policy in (second, third):
            assert_served_by_all(world.replicas, policy.name, policy.path)
        assert all(len(replica.models()) - 1 <= SLOTS for replica in world.replicas)
        wait_quiet(proxy, *world.replicas)
