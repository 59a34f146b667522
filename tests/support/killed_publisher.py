"""Publish one policy after the other, each in a process of its own that is killed (SIGKILL) at some point, or not.

A process starts as a fork of this one, so that a round costs no imports. Killed at its n-th look at the file system
(for a store on the Hub: before or after its n-th call), or after some milliseconds, which hits what lies between two.
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
from typing import Any

import httpx2

from proxy.simulator.adapters import lora_config, lora_tensors
from trainer_client import TrainerClient

RANK = 4

LOOKS = 90
"""A publication that deletes an old one looks at the file system about 80 times: some rounds end by themselves."""

LONGEST_S = 0.12
"""A round takes about 0.08 s."""

HUB_CALLS = 32
"""A publication on the Hub that deletes an old one makes about 25 calls, those of hf_xet not counted."""

HUB_LONGEST_S = 0.8
"""Such a round takes about 0.4 s."""

FILE_EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "os.listdir", "fcntl.flock")
"""Events of `sys.audit` at which the file system is looked at or changed."""


def main() -> None:
    """Run the rounds and print how often a publisher was killed."""
    url, store, rounds, seed = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    on_hub = "://" in store
    if on_hub:
        import hf_xet  # noqa: F401  in each round it would take longer than the round
        import huggingface_hub.hf_api  # noqa: F401
    most_looks, longest_s = (HUB_CALLS, HUB_LONGEST_S) if on_hub else (LOOKS, LONGEST_S)
    chance = random.Random(seed)
    ends: Counter[str] = Counter()
    for step in range(1, rounds + 1):
        looks = chance.randrange(1, most_looks) if chance.random() < 0.7 else None
        seconds = None if looks else chance.uniform(0, longest_s)
        child = os.fork()
        if child == 0:
            _publish(url, store, step, looks, seconds)
        _, status = os.waitpid(child, 0)
        ends["killed" if os.WIFSIGNALED(status) else str(os.WEXITSTATUS(status))] += 1
    print(json.dumps(ends))


def publish(url: str, store: str, step: int) -> None:
    """Publish the weights that belong to a step."""
    mount = "/lora" if "://" in store else None
    with TrainerClient(url, store=store, mount=mount, run="run", max_staleness=1, retry_timeout_s=5) as client:
        client.publish((lora_tensors(rank=RANK, seed=step), lora_config(rank=RANK)), step=step)


def _publish(url: str, store: str, step: int, looks: int | None, seconds: float | None) -> None:
    if looks is not None:
        _die_at_call(looks) if "://" in store else _die_at_look(looks, Path(store))
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


def _die_at_call(calls: int) -> None:
    """Die before the n-th call of the Hub or the proxy (odd n), or after it was answered (even n)."""
    left = [calls]
    send = httpx2.Client.send

    def count(self: httpx2.Client, *arguments: Any, **options: Any) -> httpx2.Response:
        left[0] -= 1
        if left[0] == 0 and calls % 2:
            os.kill(os.getpid(), signal.SIGKILL)
        answer = send(self, *arguments, **options)
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    httpx2.Client.send = count  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
