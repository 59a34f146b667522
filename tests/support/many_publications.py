"""Publish one policy after the other and print what became of each, as JSON: null, or why it failed.

usage: python -m tests.support.many_publications URL STORE MOUNT RUN COUNT
"""

from __future__ import annotations

import json
import sys

from proxy.simulator.adapters import lora_config, lora_tensors
from trainer_client import PublishError, TrainerClient

RANK = 4


def main() -> None:
    """Publish, and go on after each failure as a training would."""
    url, store, mount, run, count = *sys.argv[1:5], int(sys.argv[5])
    became: list[str | None] = []
    with TrainerClient(url, store=store, mount=mount, run=run, max_staleness=1) as client:
        for step in range(1, count + 1):
            try:
                client.publish((lora_tensors(rank=RANK, seed=step), lora_config(rank=RANK)), step=step)
                became.append(None)
            except PublishError as error:
                became.append(str(error))
    print(json.dumps(became))


if __name__ == "__main__":
    main()
