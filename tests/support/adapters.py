"""LoRA adapters that are broken or unusual, each in one way, made with numpy alone.

`BROKEN` maps a kind to the function that spoils a good adapter in that way; `write_broken` makes one from scratch, and
`publish` a good one with its manifest.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from proxy.artifacts.check import inspect_directory
from proxy.artifacts.digest import CONFIG_FILE, WEIGHTS_FILE
from proxy.artifacts.manifest import Manifest, write_manifest
from proxy.contract import managed_name
from proxy.simulator.adapters import Tensors, write_adapter

Spoil = Callable[[Path], None]


@contextmanager
def unopenable(directory: Path) -> Iterator[Path]:
    """Give an adapter whose config nobody can open: it is a pipe that nobody writes to."""
    write_adapter(directory, seed=3)
    config = directory / CONFIG_FILE
    config.unlink()
    os.mkfifo(config)
    yield directory
    os.close(os.open(config, os.O_RDWR | os.O_NONBLOCK))  # whoever still waits finds its end


def publish(directory: Path, *, version: int = 3) -> Manifest:
    """Make `directory` a published policy, as the trainer client does."""
    adapter = inspect_directory(write_adapter(directory, seed=1))
    manifest = Manifest(
        run="run",
        version=version,
        step=30,
        name=managed_name("run", version, adapter.digest),
        base_model="sim",
        digest=adapter.digest,
        config_digest=adapter.config_digest,
        files=adapter.files,
        created=datetime.now(UTC),
    )
    write_manifest(directory, manifest)
    return manifest


def write_broken(directory: Path, kind: str, *, seed: int = 1) -> Path:
    """Write an adapter of rank 8 that is broken in the way `kind` says, and return the directory."""
    write_adapter(directory, seed=seed)
    BROKEN[kind](directory)
    return directory


def _no_config(directory: Path) -> None:
    (directory / CONFIG_FILE).unlink()


def _no_weights(directory: Path) -> None:
    (directory / WEIGHTS_FILE).unlink()


def _truncated(directory: Path) -> None:
    weights = directory / WEIGHTS_FILE
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])


def _half_header(directory: Path) -> None:
    weights = directory / WEIGHTS_FILE
    weights.write_bytes(weights.read_bytes()[:100])


def _empty_weights(directory: Path) -> None:
    (directory / WEIGHTS_FILE).write_bytes(b"")


def _bad_config(directory: Path) -> None:
    (directory / CONFIG_FILE).write_text('{"peft_type": "LORA" ')


def _empty_config(directory: Path) -> None:
    (directory / CONFIG_FILE).write_bytes(b"")


def _config(**changes: Any) -> Spoil:
    def spoil(directory: Path) -> None:
        path = directory / CONFIG_FILE
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return spoil


def _tensors(change: Callable[[Tensors], Tensors]) -> Spoil:
    def spoil(directory: Path) -> None:
        path = directory / WEIGHTS_FILE
        changed = {name: np.ascontiguousarray(tensor) for name, tensor in change(load_file(path)).items()}
        save_file(changed, path, {"format": "pt"})

    return spoil


def _both(*spoils: Spoil) -> Spoil:
    def spoil(directory: Path) -> None:
        for one in spoils:
            one(directory)

    return spoil


def _rank(rank: int) -> Spoil:
    def spoil(directory: Path) -> None:
        write_adapter(directory, seed=1, rank=rank)

    return spoil


def _first_layer_at_rank(rank: int) -> Callable[[Tensors], Tensors]:
    def resized(name: str, tensor: np.ndarray[Any, np.dtype[np.float32]]) -> Any:
        if "layers.0.self_attn.q_proj" not in name:
            return tensor
        return np.resize(tensor, (rank, tensor.shape[1]) if "lora_A" in name else (tensor.shape[0], rank))

    return lambda tensors: {name: resized(name, tensor) for name, tensor in tensors.items()}


def _renamed(old: str, new: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name.replace(old, new): tensor for name, tensor in tensors.items()}


def _all_nan(tensors: Tensors) -> Tensors:
    return {name: np.full_like(tensor, np.nan) for name, tensor in tensors.items()}


def _half_inputs(tensors: Tensors) -> Tensors:
    return {name: tensor[:, : tensor.shape[1] // 2] if "lora_A" in name else tensor for name, tensor in tensors.items()}


def _only_a(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if "lora_A" in name}


def _only_b(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if "lora_B" in name}


def _double_rank(tensors: Tensors) -> Tensors:
    return {
        name: np.concatenate([tensor, tensor], axis=0 if "lora_A" in name else 1) for name, tensor in tensors.items()
    }


BROKEN: dict[str, Spoil] = {
    "no_config": _no_config,
    "no_weights": _no_weights,
    "truncated": _truncated,
    "half_header": _half_header,
    "empty_weights": _empty_weights,
    "bad_config": _bad_config,
    "empty_config": _empty_config,
    "rank_16": _rank(16),
    "rank_pattern_4": _both(_config(rank_pattern={"layers.0.self_attn.q_proj": 4}), _tensors(_first_layer_at_rank(4))),
    "rank_pattern_16": _both(
        _config(rank_pattern={"layers.0.self_attn.q_proj": 16}), _tensors(_first_layer_at_rank(16))
    ),
    "rank_in_weights_16": _tensors(_double_rank),
    "dora": _config(use_dora=True),
    "modules_to_save": _config(modules_to_save=["lm_head"]),
    "bias": _config(bias="all"),
    "rslora": _config(use_rslora=True),
    "foreign_module": _tensors(_renamed("layers.0.self_attn.q_proj", "layers.0.foo.bar_proj")),
    "lm_head": _tensors(_renamed("layers.0.self_attn.q_proj", "lm_head")),
    "missing_a": _tensors(_only_b),
    "missing_b": _tensors(_only_a),
    "wrong_names": _tensors(_renamed("layers.0", "layers.77")),
    "wrong_shape": _tensors(_half_inputs),
    "nan": _tensors(_all_nan),
}
"""Every way in which an adapter can be broken, except for not being there at all."""
