"""Write whole models with numpy alone: as small as can be, of the shape that a Qwen2 checkpoint has."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from proxy.artifacts.checkpoint import INDEX, MODEL_CONFIG, WHOLE
from proxy.simulator.adapters import Geometry


def checkpoint_bytes(geometry: Geometry) -> int:
    """Return the bytes of the tensors that `write_checkpoint` writes."""
    return 4 * geometry.layers * sum(inputs * outputs for inputs, outputs in geometry.projections().values())


def write_checkpoint(directory: Path, *, seed: int, shards: int = 1, geometry: Geometry | None = None) -> Path:
    """Write a checkpoint with random weights into `directory` (made if missing), in one file or several; return it."""
    directory.mkdir(parents=True, exist_ok=True)
    geometry = geometry or Geometry()
    config = {"architectures": ["Qwen2ForCausalLM"], "hidden_size": geometry.hidden, "model_type": "qwen2"}
    (directory / MODEL_CONFIG).write_text(json.dumps(config))
    random = np.random.default_rng(seed)
    tensors = {
        f"model.layers.{layer}.{name}.weight": random.normal(size=(outputs, inputs)).astype(np.float32)
        for layer in range(geometry.layers)
        for name, (inputs, outputs) in geometry.projections().items()
    }
    if shards == 1:
        save_file(tensors, directory / WHOLE, {"format": "pt"})
        return directory
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = dict(list(tensors.items())[shard::shards])
        save_file(part, directory / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory
