"""A pretend trainer, for a Job: publishes a policy now and then, and checks every token of the rollouts meanwhile.

usage: python -m tests.hub.job_trainer --store DIR --max-staleness K (--seconds S | --until FILE)

Its last line of output is a JSON object: what `Tally` counts, the policies published, and the proxy's replicas.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import httpx2

from proxy.demo.rollouts import Rollouts, Target
from proxy.simulator.adapters import write_adapter
from proxy.simulator.tokens import base_weights
from trainer_client import TrainerClient

_PUBLISH_EVERY_S = 1.0
_POLL_S = 0.1


def main() -> None:
    """Train until told."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--max-staleness", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--until", type=Path)
    given = parser.parse_args()
    url = f"http://127.0.0.1:{os.environ['PROXY_PORT']}"
    deadline = time.monotonic() + given.seconds

    def over() -> bool:
        return time.monotonic() > deadline or (given.until is not None and given.until.exists())

    with TrainerClient(url, store=given.store, run="pretend", max_staleness=given.max_staleness) as client:
        published, rollouts = asyncio.run(_train(client, url, given.store.parent / "made", over))
    replicas = httpx2.get(f"{url}/proxy/replicas", trust_env=False).json()["replicas"]
    facts = {
        "rollouts": rollouts.tally.rollouts,
        "failures": rollouts.tally.failures,
        "first_failure": rollouts.tally.first_failure,
        "wrong_tokens": rollouts.tally.wrong_tokens,
        "policies": published,
        "replicas": [replica["state"] for replica in replicas],
    }
    print(json.dumps(facts), flush=True)


async def _train(client: TrainerClient, url: str, made: Path, over: Callable[[], bool]) -> tuple[int, Rollouts]:
    stop = asyncio.Event()
    rollouts = Rollouts(url, Target("sim", base_weights("sim")))
    published = 0
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(rollouts.run(stop))
        while not over():
            published += 1
            adapter = write_adapter(made / f"step-{published}", seed=published)
            policy = await asyncio.to_thread(client.publish, adapter, step=published)
            rollouts.target = Target(policy.model, policy.digest)
            due = time.monotonic() + _PUBLISH_EVERY_S
            while time.monotonic() < due and not over():  # noqa: ASYNC110  a file may say when
                await asyncio.sleep(_POLL_S)
        stop.set()
    return published, rollouts


if __name__ == "__main__":
    main()
