"""The manifest: the small file, written last, that makes a directory a published policy.

A directory without one is not published, whatever else it holds. Who writes it has fsynced the files before.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from proxy.artifacts.digest import CONFIG_FILE, WEIGHTS_FILE, read_file
from proxy.artifacts.durable import write_whole
from proxy.artifacts.links import strays
from proxy.contract import Announcement, PolicyFile
from proxy.errors import ArtifactError

MANIFEST_FILE = "lora_sync_manifest.json"

ADAPTER_FILES = (CONFIG_FILE, WEIGHTS_FILE)
"""All that vLLM reads of an adapter, and all that a published one holds beside its manifest."""


class Manifest(BaseModel):
    """What was published, when, and of which bytes it consists."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    schema_version: Literal[1] = 1
    run: str = Field(min_length=1)
    version: int = Field(ge=1)
    step: int = Field(ge=0)
    name: str = Field(min_length=1)
    """The policy's name, which is also that of its directory."""
    base_model: str
    """The model that was trained, empty if unknown."""
    digest: str = Field(pattern=r"^[0-9a-f]{64}$")
    """`adapter_digest` of the directory, or `checkpoint_digest` of one with merged weights."""
    config_digest: str = Field(pattern=r"^[0-9a-f]{64}$")
    """sha256 of the canonical config: it changes when the shape of the adapter or model does, not with its weights."""
    files: tuple[PolicyFile, ...]
    alias: str | None = None
    """The client's own name for it (see `contract.Announcement`), so that a proxy that restarts knows it again."""
    merged: bool = False
    """Whether it is a whole model, the adapter merged into its base, that takes the place of replicas' base weights."""
    checkpoint: bool = False
    """Whether its files stay in the store for ever."""
    created: AwareDatetime
    """When it was published, UTC."""

    def content(self) -> bytes:
        """Return the manifest as it is written."""
        return self.model_dump_json(indent=2).encode() + b"\n"

    def announcement(self) -> Announcement:
        """Return the `policy` field of the load request."""
        return Announcement(
            run=self.run,
            version=self.version,
            step=self.step,
            digest=self.digest,
            files=self.files,
            alias=self.alias,
        )


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Publish `directory`: from here on readers may trust what is in it. Writing it again replaces it whole."""
    write_whole(directory / MANIFEST_FILE, manifest.content())


def is_published(directory: Path) -> bool:
    """Return whether there is a manifest in `directory`."""
    return (directory / MANIFEST_FILE).exists()


def read_manifest(directory: Path) -> Manifest:
    """Read the manifest in `directory`.

    Raises ArtifactError if there is none, it cannot be understood, or a link in the directory leads out of it.
    """
    path = directory / MANIFEST_FILE
    if not is_published(directory):
        raise ArtifactError(
            f"{path} is missing, so the policy is not published; publish it again, or wait until its files are here"
        )
    if outside := list(strays(directory, roots=[directory])):
        raise ArtifactError(f"{directory} holds {', '.join(outside)}, which leads out of it; publish the policy again")
    return parse_manifest(read_file(path), source=str(path))


def parse_manifest(content: bytes, *, source: str) -> Manifest:
    """Read the content of a manifest; `source` names the file in the ArtifactError when it cannot be understood."""
    try:
        return Manifest.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise ArtifactError(
            f"{source} is not a manifest of this version: {where}: {first['msg']}; "
            "upgrade lora-sync-proxy if a newer one wrote it, else delete the directory and publish again"
        ) from error


def verify_manifest(directory: Path, announcement: Announcement, name: str) -> None:
    """Hold a directory to what was announced. Raises ArtifactError with every difference, or if it is not published.

    Compared are name, run, version, step and digest, the list of files if one was announced, and the sizes on the
    disk. Contents are not read; `adapter_digest` does that.
    """
    manifest = read_manifest(directory)
    differences = [*_differences(manifest, announcement, name), *_size_differences(directory, manifest)]
    if differences:
        raise ArtifactError(f"{directory} is not what was announced as {name}: {'; '.join(differences)}")


def _differences(manifest: Manifest, announcement: Announcement, name: str) -> Iterator[str]:
    if manifest.name != name:
        yield f"its manifest names {manifest.name}"
    for field in ("run", "version", "step", "digest"):
        announced, found = getattr(announcement, field), getattr(manifest, field)
        if announced != found:
            yield f"{field} {announced} was announced, its manifest has {found}"
    if announcement.files and set(announcement.files) != set(manifest.files):
        yield "the announced files are not those of its manifest"


def _size_differences(directory: Path, manifest: Manifest) -> Iterator[str]:
    for file in manifest.files:
        try:
            size = (directory / file.path).stat().st_size
        except OSError as error:
            yield f"{file.path} cannot be read: {error.strerror}"
        else:
            if size != file.size:
                yield f"{file.path} has {size} bytes, not {file.size}"
