"""Where the syncs happen: an offline Hub, replicas and a trainer with mounts of their own, and our proxy or none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.hub.mount import BucketMount
from tests.hub.offline_hub import OfflineHub
from tests.support.mounts import MOUNT
from tests.support.proxies import RunningProxy
from tests.support.replicas import SimulatedReplica

BUCKET = "tester/runs"
STORE = f"hf://buckets/{BUCKET}"

SLOTS = 6
DECODE_STEP_S = 0.02
LONG = 200_000
"""Tokens of context: what runs in the background does not end."""


@dataclass
class World:
    """All of them. Replicas see the bucket at MOUNT; so does the trainer, in `trainer`."""

    hub: OfflineHub
    replicas: list[SimulatedReplica]
    trainer: Path
    """The bucket as the trainer's machine has mounted it."""
    proxy: RunningProxy | None
    """Ours, on the trainer's machine; the published pattern goes to the replicas without it."""


@contextmanager
def world(*, replicas: int, negative_ttl_s: float, with_proxy: bool) -> Iterator[World]:
    """Start a world with an empty bucket. Its processes end with it."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="sync-")))
        hub = stack.enter_context(OfflineHub())
        # what this process asks, and hf_xet keeps, is the offline Hub's and ends with it
        os.environ.update(hub.environment() | {"HF_XET_CACHE": str(folder / "xet")})
        hub.api().create_bucket(BUCKET)
        started = []
        for number in range(replicas):
            mount = stack.enter_context(
                BucketMount(hub, BUCKET, folder / f"replica-{number}", negative_ttl_s=negative_ttl_s, read_only=True)
            )
            replica = SimulatedReplica(
                cwd=mount, max_loras=SLOTS, max_cpu_loras=2 * SLOTS, max_model_len=LONG, kv_cache_tokens=8 * LONG,
                decode_step_s=DECODE_STEP_S,
            )  # fmt: skip
            started.append(stack.enter_context(replica))
        trainer = stack.enter_context(BucketMount(hub, BUCKET, folder / "trainer", negative_ttl_s=negative_ttl_s))
        proxy = None
        if with_proxy:
            urls = (replica.url for replica in started)
            settings = {"PROXY_STORAGE": f"{STORE}={MOUNT}", "PROXY_PROBE_S": "2", "PROXY_LORA_RETRY_S": "2"}
            proxy = stack.enter_context(RunningProxy(*urls, cwd=trainer, **settings, **hub.environment()))
        yield World(hub, started, trainer, proxy)
