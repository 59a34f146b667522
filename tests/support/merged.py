"""Stands in for the merge where there is no torch: checkpoints as small as can be, that simulated replicas read.

All around it is real: the decision, the store, the announcement, the retention.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from proxy.artifacts.checkpoint import MODEL_CONFIG
from proxy.simulator.adapters import Geometry, lora_config, lora_tensors
from proxy.simulator.checkpoints import write_checkpoint
from trainer_client.adapters import Payload
from trainer_client.merging.scratch import Scratch
from trainer_client.ready import Ready, as_checkpoint
from trainer_client.ways import Ways

SEEDED = 1000
"""Above it an alpha tells a seed."""


def dora(seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return an adapter that vLLM cannot serve as one, and whose checkpoint follows from the seed."""
    return dict(lora_tensors(rank=8, seed=seed)), dora_config(lora_config(rank=8), seed)


def dora_config(config: dict[str, Any], seed: int) -> dict[str, Any]:
    """Return the config of such an adapter; its alpha tells the seed."""
    return {**config, "use_dora": True, "lora_alpha": SEEDED + seed}


@contextmanager
def merging_by_seed(geometry: Geometry | None = None) -> Iterator[None]:
    """Let every merge of `dora(seed)` give the checkpoint of that seed, and of another adapter that of seed 99."""

    def merged(self: Ways, _: Any, weights: Payload) -> Ready:
        alpha = int(json.loads(weights.config)["lora_alpha"])
        scratch = Scratch(self.merging.scratch)
        seed = alpha - SEEDED if alpha >= SEEDED else 99
        folder = write_checkpoint(scratch.path, seed=seed, shards=2, geometry=geometry)
        config = folder / MODEL_CONFIG
        weights_files = sorted(path for path in folder.iterdir() if path != config)
        return as_checkpoint([config, *weights_files], base_model="sim", scratch=scratch)

    with patch.object(Ways, "_merged", merged):
        yield
