"""A checkpoint's files: tensors in shards of bounded size, and the index that tells where each one is."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from proxy.artifacts.checkpoint import INDEX, WHOLE
from trainer_client.errors import UnservableError


class Shards:
    """Write tensors into a folder as they come. What is in memory is at most one shard."""

    def __init__(self, folder: Path, *, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0
        self._written: list[list[str]] = []
        """Names of the tensors in each shard."""
        self.bytes = 0
        """Of all tensors so far."""

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take one more tensor. Raises UnservableError if a value of it is not finite."""
        if not torch.isfinite(tensor).all():
            raise UnservableError(f"{name} has values that are NaN or infinite once the adapter is merged into it")
        if self._pending and self._pending_bytes + tensor.nbytes > self._max_bytes:
            self._write()
        self._pending[name] = tensor
        self._pending_bytes += tensor.nbytes
        self.bytes += tensor.nbytes

    def finish(self) -> list[Path]:
        """Write what is left, and return the files by the names that transformers gives, the index first."""
        self._write()
        count = len(self._written)
        if count == 1:
            return [self._shard(0).rename(self._folder / WHOLE)]
        names = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
        files = [self._shard(number).rename(self._folder / name) for number, name in enumerate(names)]
        weight_map = {tensor: name for name, held in zip(names, self._written, strict=True) for tensor in held}
        index = {"metadata": {"total_size": self.bytes}, "weight_map": dict(sorted(weight_map.items()))}
        (self._folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        return [self._folder / INDEX, *files]

    def _write(self) -> None:
        if self._pending:
            save_file(self._pending, self._shard(len(self._written)), {"format": "pt"})
            self._written.append(list(self._pending))
            self._pending, self._pending_bytes = {}, 0

    def _shard(self, number: int) -> Path:
        return self._folder / f"{number}.part"
