"""Publish one policy after the other, each in a process of its own that is killed (SIGKILL) at some point, or not.

A process starts as a fork of this one, so that a round costs no imports. Killed at its n-th look at the file system, or
after some milliseconds, which hits what lies between two looks.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
from collections import Counter
from pathlib import Path

from proxy.simulator.adapters import lora_config, lora_tensors
from trainer_client import TrainerClient

RANK = 4

LOOKS = 90
"""A publication that deletes an old one looks at the file system about 80 times: some rounds end by themselves."""

LONGEST_S = 0.12
"""A round takes about 0.08 s."""

FILE_EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "os.listdir", "fcntl.flock")
"""Events of `sys.audit` at which the file system is looked at or changed."""


def main() -> None:
    """Run the rounds and print how often a publisher was killed."""
    url, store, rounds, seed = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    chance = random.Random(seed)
    ends: Counter[str] = Counter()
    for step in range(1, rounds + 1):
        looks = chance.randrange(1, LOOKS) if chance.random() < 0.7 else None
        seconds = None if looks else chance.uniform(0, LONGEST_S)
        child = os.fork()
        if child == 0:
            _publish(url, store, step, looks, seconds)
        _, status = os.waitpid(child, 0)
        ends["killed" if os.WIFSIGNALED(status) else str(os.WEXITSTATUS(status))] += 1
    print(json.dumps(ends))


def publish(url: str, store: str, step: int) -> None:
    """Publish the weights that belong to a step."""
    with TrainerClient(url, store=store, run="run", max_staleness=1, retry_timeout_s=5) as client:
        client.publish((lora_tensors(rank=RANK, seed=step), lora_config(rank=RANK)), step=step)


def _publish(url: str, store: str, step: int, looks: int | None, seconds: float | None) -> None:
    if looks is not None:
        _die_at_look(looks, Path(store))
    if seconds is not None:
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
    try:
        publish(url, store, step)
    except BaseException as error:  # noqa: BLE001  a fork must never go on with the loop of its parent
        print(f"step {step}: {error!r}", file=sys.stderr)
        os._exit(1)
    os._exit(0)


def _die_at_look(looks: int, store: Path) -> None:
    left = [looks]

    def count(event: str, arguments: tuple[object, ...]) -> None:
        if event in FILE_EVENTS and (event == "fcntl.flock" or str(arguments[0]).startswith(str(store))):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


if __name__ == "__main__":
    main()
