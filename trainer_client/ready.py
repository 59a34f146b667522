"""What is to be published, judged and described: an adapter as it is, or a checkpoint with it merged in."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from proxy.artifacts.check import Inspection, inspect
from proxy.artifacts.digest import canonical_config, checkpoint_digest, load_config
from proxy.artifacts.verdict import Verdict, Way
from proxy.contract import PolicyFile
from proxy.errors import ArtifactError
from trainer_client.adapters import Payload
from trainer_client.errors import UnservableError
from trainer_client.fleet import FleetLimits, on_fleet
from trainer_client.merging.scratch import Scratch
from trainer_client.stores.files import Content, size_of


@dataclass(frozen=True)
class Ready:
    """Weights that can be served, and what a manifest says of them."""

    contents: Mapping[str, Content]
    """The files by name."""
    files: tuple[PolicyFile, ...]
    digest: str
    config_digest: str
    base_model: str
    """As the adapter's config names it, empty if it does not."""
    merged: bool = False
    scratch: Scratch | None = None
    """Where the files are that are there for this alone."""

    def discard(self) -> None:
        """Remove files that are of no use any more."""
        if self.scratch is not None:
            self.scratch.discard()

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(map(size_of, self.contents.values()))


def judged(payload: Payload, *, step: int, limits: FleetLimits) -> tuple[Inspection, Verdict]:
    """Return what an adapter is, and how the fleet can serve it. Raises UnservableError unless there is some way."""
    what = f"{payload.source} (step {step})"
    try:
        found = inspect(
            payload.config, io.BytesIO(payload.weights), source="adapter", max_lora_rank=limits.max_lora_rank
        )
    except ArtifactError as error:
        raise UnservableError(f"{what} cannot be served: {str(error).removeprefix('adapter/')}") from error
    verdict = on_fleet(found.verdict, limits)
    if verdict.way is Way.BROKEN:
        raise UnservableError(f"{what} cannot be served as an adapter: {verdict}")
    return found, verdict


def as_adapter(payload: Payload, *, step: int, limits: FleetLimits) -> Ready:
    """Return an adapter that can be served as it is. Raises UnservableError with every reason for one that cannot."""
    found, verdict = judged(payload, step=step, limits=limits)
    if verdict.way is not Way.ADAPTER:
        raise UnservableError(
            f"{payload.source} (step {step}) cannot be served as an adapter: {verdict}; it could be served merged into "
            "the base model (on_unservable='merge')"
        )
    return described(payload, found)


def described(payload: Payload, found: Inspection) -> Ready:
    """Return an adapter with what one reading of it has told."""
    return Ready(payload.files(), found.files, found.digest, found.config_digest, found.config.base_model)


def as_checkpoint(paths: Sequence[Path], *, base_model: str, scratch: Scratch) -> Ready:
    """Describe a checkpoint's files, config first and weights after it, by reading each once. They are in `scratch`."""
    config = canonical_config(load_config(paths[0].read_bytes(), source=str(paths[0])))
    files = tuple(PolicyFile(path=path.name, size=path.stat().st_size, sha256=_sha256(path)) for path in paths)
    return Ready(
        contents={path.name: path for path in paths},
        files=files,
        digest=checkpoint_digest(config, [file.sha256 for file in files[1:]]),
        config_digest=hashlib.sha256(config).hexdigest(),
        base_model=base_model,
        merged=True,
        scratch=scratch,
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
