"""A config to start from in tests."""

from __future__ import annotations

from typing import Any

from trainer_client.jobs.config import FleetConfig

MINIMAL: dict[str, Any] = {
    "name": "math-r1",
    "bucket": "me/runs",
    "model": "Qwen/Qwen2.5-Math-1.5B",
    "trainer": {"image": "ghcr.io/me/trainer:1", "command": ["python", "train.py"]},
}


def config(
    *, replicas: dict[str, Any] | None = None, trainer: dict[str, Any] | None = None, **fields: Any
) -> FleetConfig:
    """Return a good config with these fields."""
    parts = {"replicas": replicas or {}, "trainer": {**MINIMAL["trainer"], **(trainer or {})}}
    return FleetConfig.model_validate({**MINIMAL, **parts, **fields})
