"""The story of the demo: start everything, publish every few seconds while rollouts run, then sum up."""

from __future__ import annotations

import asyncio
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import httpx2
from pydantic import BaseModel

from proxy.demo import processes
from proxy.demo.rollouts import Rollouts, Target
from proxy.simulator.adapters import write_adapter
from proxy.simulator.settings import SimulatorSettings
from proxy.simulator.tokens import base_weights
from trainer_client import Policy, TrainerClient

MAX_STALENESS = 2
PUBLISH_EVERY_S = 3.0
"""A policy every few seconds: several syncs within the shortest useful demo."""

PROGRESS_EVERY_S = 1.0


class Summary(BaseModel):
    """What the demo saw, for people and for machines."""

    seconds: float
    rollouts: int
    failures: int
    """Rollouts that got no answer or an error."""
    policies: int
    """Policies published and served by both replicas."""
    sync_p50_s: float | None
    """Median seconds from `publish` to its return, when every replica serves the policy."""
    affinity: int
    spilled: int
    unmatched: int
    wrong_tokens: int
    """Tokens that the policy which was asked for would not have given."""
    first_failure: str = ""

    @property
    def passed(self) -> bool:
        """Whether nothing was lost and nothing was wrong."""
        return self.rollouts > 0 and self.failures == 0 and self.wrong_tokens == 0


def run_demo(seconds: float, say: Callable[[str], None]) -> Summary:
    """Run for `seconds`, or until Ctrl-C, and return what was seen. `say` gets a line of progress now and then."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lora-sync-demo-")))
        settings = SimulatorSettings(max_loras=MAX_STALENESS + 2, max_cpu_loras=2 * (MAX_STALENESS + 2))
        replicas = [stack.enter_context(processes.replica(settings.model_dump_json())) for _ in range(2)]
        url = stack.enter_context(processes.proxy(replicas))
        say(f"status page: {url}/proxy/dashboard")
        say(f"in a terminal: {Path(sys.executable).with_name('lora-sync')} top --proxy {url}")
        say(f"replicas {' '.join(replicas)}, proxy {url}, store {folder}")
        client = stack.enter_context(
            TrainerClient(url, store=folder / "store", run="demo", max_staleness=MAX_STALENESS)
        )
        return asyncio.run(_train(client, url, settings.model, folder, seconds, say))


async def _train(
    client: TrainerClient, url: str, model: str, folder: Path, seconds: float, say: Callable[[str], None]
) -> Summary:
    stop, started = asyncio.Event(), time.monotonic()
    for wanted in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(wanted, stop.set)
    rollouts = Rollouts(url, Target(model, base_weights(model)))
    syncs: list[float] = []

    def progress() -> None:
        tally, elapsed = rollouts.tally, time.monotonic() - started
        say(
            f"{elapsed:5.1f} s  policy {rollouts.target.model}  rollouts {tally.rollouts} "
            f"({tally.rollouts / elapsed:.0f}/s)  failures {tally.failures}  wrong tokens {tally.wrong_tokens}"
        )

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_stop_after(seconds, stop))
        tasks.create_task(_every(PROGRESS_EVERY_S, progress, stop))
        tasks.create_task(_publish(client, folder, rollouts, syncs, stop))
        tasks.create_task(rollouts.run(stop))
    counts = httpx2.get(url + "/proxy/stats", trust_env=False).json()["router"]
    return Summary(
        seconds=round(time.monotonic() - started, 1),
        rollouts=rollouts.tally.rollouts,
        failures=rollouts.tally.failures,
        policies=len(syncs),
        sync_p50_s=round(statistics.median(syncs), 4) if syncs else None,
        affinity=counts["affinity"],
        spilled=counts["spilled"],
        unmatched=counts["unmatched"],
        wrong_tokens=rollouts.tally.wrong_tokens,
        first_failure=rollouts.tally.first_failure,
    )


async def _publish(
    client: TrainerClient, folder: Path, rollouts: Rollouts, syncs: list[float], stop: asyncio.Event
) -> None:
    """Pretend to train: new weights every few seconds, published while the rollouts go on."""
    step = 0
    while not stop.is_set():
        step += 1
        adapter = write_adapter(folder / "trainer" / f"step-{step}", seed=step)
        started = time.monotonic()
        policy: Policy = await asyncio.to_thread(client.publish, adapter, step=step)
        syncs.append(time.monotonic() - started)
        rollouts.target = Target(policy.model, policy.digest)
        await wait(stop, PUBLISH_EVERY_S)


async def _every(seconds: float, act: Callable[[], None], stop: asyncio.Event) -> None:
    while not await wait(stop, seconds):
        act()


async def _stop_after(seconds: float, stop: asyncio.Event) -> None:
    await wait(stop, seconds)
    stop.set()


async def wait(stop: asyncio.Event, seconds: float) -> bool:
    """Wait for `stop`, at most `seconds`; return whether it is set."""
    try:
        async with asyncio.timeout(seconds):
            await stop.wait()
    except TimeoutError:
        pass
    return stop.is_set()
