"""How adapters are merged into their base model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from proxy.errors import SettingsError


@dataclass(frozen=True)
class Merging:
    """How a client merges what vLLM cannot serve as an adapter. Raises SettingsError for what cannot work."""

    dtype: str | None = None
    """Of the checkpoint, such as `bfloat16`. None: that of the replicas, if the proxy knows it, else the model's."""
    max_shard_bytes: int = 2_000_000_000
    """Largest file of a checkpoint. One of them is in memory at a time, on rank 0."""
    scratch: str | Path | None = None
    """Directory on this machine where checkpoints are until the store has them, up to four at a time with `wait=False`.
    What a merge that was killed has left there is removed by the next one. None: the system's for temporary files
    (TMPDIR), which must not be in memory."""

    def __post_init__(self) -> None:
        if self.max_shard_bytes < 1:
            raise SettingsError(f"max_shard_bytes is {self.max_shard_bytes}; give the bytes of the largest file.")
        if self.scratch is not None and not Path(self.scratch).is_dir():
            raise SettingsError(f"scratch {self.scratch} is no directory; make it, or leave it out.")
