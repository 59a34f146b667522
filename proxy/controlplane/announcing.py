"""Decide on an announcement before any replica hears of it: what is refused, what is known already, what it digests to.

Pure but for `announced_digest`, which reads files.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from proxy.artifacts.digest import adapter_digest
from proxy.artifacts.manifest import verify_manifest
from proxy.contract import LoadReport, LoadRequest
from proxy.errors import ApiError, ArtifactError
from proxy.fleet.policies import Policy, PolicyState
from proxy.fleet.pool import Fleet


def refuse_early(request: LoadRequest, *, base_models: tuple[str, ...]) -> ApiError | None:
    """Return why `request` cannot work on any replica, or None. Pure."""
    name, path = request.lora_name, request.lora_path
    if request.load_inplace:
        return _bad(
            "load_inplace would change weights under running rollouts: publish under a new name instead", "load_inplace"
        )
    if name in base_models:
        return _bad(f"The lora adapter name '{name}' conflicts with a served base model", "lora_name")
    if not PurePosixPath(path).is_absolute():
        return _bad(f"lora_path must be absolute; vLLM would take '{path}' for a Hub repository", "lora_path")
    if ".." in PurePosixPath(path).parts:
        return _bad(f"lora_path must not contain '..': {path}", "lora_path")
    return None


def announced_digest(request: LoadRequest) -> str | None:
    """Return the digest of what is announced: its manifest's, or the files' own; None if the files are not seen here.

    Raises ApiError if the path is managed and its manifest is missing or says something else.
    """
    directory, announced = Path(request.lora_path), request.policy
    if announced is None:
        try:
            return adapter_digest(directory)
        except ArtifactError:
            return None
    if directory.parent.is_dir():
        try:
            verify_manifest(directory, announced, request.lora_name)
        except ArtifactError as error:
            raise ApiError(409, str(error), reason="manifest", param="policy") from error
    return announced.digest


def same_or_refuse(request: LoadRequest, known: Policy, digest: str | None) -> LoadReport:
    """Answer an announcement of a policy that is served already: the same one is fine, another one is refused (P1)."""
    if (known.path, known.digest) == (request.lora_path, digest) and known.state is PolicyState.LIVE:
        return LoadReport(policy=known.name, version=known.version, status="live", seconds=0.0)
    raise ApiError(
        400,
        f"The lora adapter '{known.name}' has already been loaded from {known.path}, with other content. "
        "A name means one set of weights: unload it first, or publish under a new name.",
        reason="name_taken",
        type="InvalidUserInput",
    )


def no_slot(name: str, occupying: list[Policy], slots: int) -> ApiError:
    holders = ", ".join(f"{policy.name} ({policy.state}, {policy.leases} rollouts)" for policy in occupying)
    return ApiError(
        409,
        f"No slot for '{name}': the replicas have --max-loras {slots}, taken by {holders}. "
        f"Unload one of them, or start the replicas with --max-loras {len(occupying) + 1}.",
        reason="no_slot",
    )


def refuse_unable(fleet: Fleet) -> ApiError | None:
    """Return why the fleet cannot take adapters now: nobody is ready, or a ready replica lacks what a load needs."""
    ready = fleet.ready
    if not ready:
        return ApiError(503, f"No replica is ready: {fleet.not_ready()}.", reason="not_ready", retry_after_s=1)
    lacking = [f"{r.url}: {lack.message}" for r in ready if r.facts for lack in r.facts.lacks if lack.blocks_loads]
    if lacking:
        # TRL reads 404 as "runtime LoRA is disabled", which is the truth here.
        return ApiError(404, f"Replicas cannot load adapters. {'; '.join(lacking)}.", reason="replica_lacks")
    return None


def _bad(message: str, param: str) -> ApiError:
    return ApiError(400, message, reason="bad_request", type="BadRequestError", param=param)
