"""Look at a checkpoint before any replica is touched: one that is not whole, or of another model, tears the servers."""

from __future__ import annotations

from collections.abc import Set
from functools import partial
from pathlib import Path

from proxy.artifacts.checkpoint import Checkpoint, differences, read_checkpoint
from proxy.artifacts.manifest import is_published, verify_manifest
from proxy.contract import ReloadRequest
from proxy.controlplane.announcing import are_here
from proxy.errors import ApiError, ArtifactError
from proxy.threads import in_daemon_thread


class Checkpoints:
    """Compares checkpoints with the base model, or with the last one that was served."""

    def __init__(self) -> None:
        self._served: Checkpoint | None = None

    async def checked(
        self, request: ReloadRequest, models: Set[str], *, landed: bool = False
    ) -> tuple[Checkpoint | None, list[str]]:
        """Return what the checkpoint looks like, None where it cannot be seen here, and what nobody could check.

        `models`: what the replicas call their base model. `landed`: the Hub lists all its files whole, and what this
        side of the mount does not show yet, the manifest too, is only late. Whoever awaits it sets a limit. Raises
        ApiError 409 if it is not whole, 400 if it cannot take the base model's place.
        """
        directory = Path(request.path)
        if not await in_daemon_thread(directory.parent.is_dir):
            return None, [f"the proxy cannot see {directory}, so that nobody has checked it"]
        files = request.policy.files if request.policy else ()
        if landed and not await in_daemon_thread(partial(are_here, directory, files)):
            return None, [f"the proxy does not see all of {directory} yet, so that nobody has compared it"]
        try:
            found, original = await in_daemon_thread(partial(_read, request, models, landed))
        except ArtifactError as error:
            raise ApiError(409, f"{request.name}: {error}", reason="checkpoint", param="path") from None
        expected = original or self._served
        if expected is None:
            return found, ["the proxy cannot see the base model, so that nobody has compared it"]
        if wrong := list(differences(found, expected)):
            message = f"{request.name} cannot take the place of the base model: {directory}: {'; '.join(wrong)}"
            raise ApiError(400, message, reason="unservable", param="path")
        return found, []

    def served(self, checkpoint: Checkpoint | None) -> None:
        """Compare those to come with this one, which a replica serves."""
        self._served = checkpoint or self._served


def _read(request: ReloadRequest, models: Set[str], landed: bool) -> tuple[Checkpoint, Checkpoint | None]:
    """Return the checkpoint, and the base model's if it is to be seen here."""
    directory = Path(request.path)
    if request.policy is not None and not (landed and not is_published(directory)):
        verify_manifest(directory, request.policy, request.name)
    found = read_checkpoint(directory)
    for model in sorted(models):
        if Path(model).is_absolute() and Path(model).is_dir():
            return found, read_checkpoint(Path(model))
    return found, None
