"""Decide on an announcement before any replica hears of it: what is refused, and how it relates to what is known.

Pure but for what looks at files: `inspect`, and `refuse_path` where there are roots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path, PurePosixPath

from proxy.artifacts.check import inspect_directory
from proxy.artifacts.digest import CONFIG_FILE, WEIGHTS_FILE
from proxy.artifacts.links import is_below, strays
from proxy.artifacts.manifest import is_published, verify_manifest
from proxy.artifacts.verdict import Way
from proxy.contract import LoadRequest, PolicyFile, managed_name
from proxy.errors import ApiError, ArtifactError
from proxy.fleet.names import SEPARATOR
from proxy.fleet.policies import OCCUPYING, Policy, PolicyState
from proxy.fleet.pool import Fleet


def refuse_early(request: LoadRequest, *, base_models: tuple[str, ...], roots: tuple[str, ...]) -> ApiError | None:
    """Return why `request` cannot work on any replica, or None. `roots`: the only directories allowed, if any."""
    name, path = request.lora_name, PurePosixPath(request.lora_path)
    if request.load_inplace:
        return _bad(
            "load_inplace would change weights under running rollouts: publish under a new name instead", "load_inplace"
        )
    if name in base_models:
        return _bad(f"The lora adapter name '{name}' conflicts with a served base model", "lora_name")
    if SEPARATOR in name:
        return _bad(f"lora_name must not contain '{SEPARATOR}', which the proxy uses: {name}", "lora_name")
    if request.policy is not None:
        announced = request.policy
        if name != managed_name(announced.run, announced.version, announced.digest):
            expected = managed_name(announced.run, announced.version, announced.digest)
            return _bad(f"lora_name must be '{expected}' for this run, version and digest, not '{name}'", "lora_name")
        if announced.alias and (SEPARATOR in announced.alias or announced.alias in base_models):
            return _bad(f"alias cannot be '{announced.alias}'", "policy.alias")
    return refuse_path(path, roots=roots, param="lora_path")


def refuse_path(path: PurePosixPath, *, roots: tuple[str, ...], param: str) -> ApiError | None:
    """Return why replicas must not be sent to `path`, which the field `param` of a body names, or None.

    With `roots` it looks at the files, as far as the proxy sees them: where links lead counts, not their names.
    """
    if not path.is_absolute():
        return _bad(f"{param} must be absolute; vLLM would take '{path}' for a Hub repository", param)
    if ".." in path.parts or "\0" in str(path):
        return _bad(f"{param} must not contain '..' or a zero byte: {path}", param)
    if roots:
        allowed = [Path(root) for root in roots]
        if not is_below(Path(path), allowed):
            return _bad(f"{param} {path} is not below PROXY_ADAPTER_ROOTS ({', '.join(roots)})", param)
        if outside := next(strays(Path(path), roots=allowed), None):
            return _bad(f"{param} {path}: {outside} leads out of PROXY_ADAPTER_ROOTS ({', '.join(roots)})", param)
    return None


@dataclass(frozen=True)
class Seen:
    """What the proxy itself sees of announced files."""

    digest: str | None
    """None if it cannot see them and nobody announced it."""
    checked: bool
    """Whether they have been read and found to be a good adapter. If not, one replica has to prove them first."""
    unfinished: str = ""
    """Why the directory is not whole yet; empty if it is, or is not seen at all."""


def inspect(
    request: LoadRequest, *, max_lora_rank: int | None, roots: tuple[str, ...] = (), landed: bool = False
) -> Seen:
    """Read what is announced, as far as the proxy can see it, and as long as it stays below `roots`, if any.

    Raises ApiError if it is an adapter that no replica can serve, or if the path is managed and its manifest is missing
    or says something else. `landed`: the Hub lists all its files whole, and what this side of the mount does not show
    yet is only late.
    """
    directory, announced = Path(request.lora_path), request.policy
    if (refusal := refuse_path(PurePosixPath(directory), roots=roots, param="lora_path")) is not None:
        raise refusal  # once more: the files may have come since
    if announced is not None and landed and not are_here(directory, announced.files):
        return Seen(announced.digest, checked=False)
    if announced is not None and directory.parent.is_dir() and not (landed and not is_published(directory)):
        try:
            verify_manifest(directory, announced, request.lora_name)
        except ArtifactError as error:
            raise ApiError(409, str(error), reason="manifest", param="policy") from error
    digest = announced.digest if announced else None
    if not (directory / CONFIG_FILE).exists() and not (directory / WEIGHTS_FILE).exists():
        return Seen(digest, checked=False)
    if not (directory / WEIGHTS_FILE).exists() and any(directory.glob("adapter_model.*")):
        return Seen(digest, checked=False)  # in a format that vLLM reads and the proxy does not
    try:
        found = inspect_directory(directory, max_lora_rank=max_lora_rank)
    except ArtifactError as error:
        return Seen(digest, checked=False, unfinished=str(error))
    if found.verdict.way is not Way.ADAPTER:
        message = f"'{request.lora_name}' cannot be served as an adapter. {directory}: {found.verdict}"
        raise ApiError(400, message, reason="unservable", type="BadRequestError", param="lora_path")
    return Seen(digest or found.digest, checked=True)


def are_here(directory: Path, files: Sequence[PolicyFile]) -> bool:
    """Tell whether this side sees the files, each with its size."""
    try:
        return all((directory / file.path).stat().st_size == file.size for file in files)
    except OSError:
        return False


class Relation(Enum):
    """How an announcement relates to what its name means now."""

    NEW = "new"
    """The name is free, or what it meant has ended."""
    SAME = "same"
    """It is live, or under way for a caller who waits: nothing is to be loaded twice."""
    REPLACES = "replaces"
    """Something else has the name and nobody uses it: that goes."""
    IN_USE = "in use"
    """Something else has the name, and connected clients use it."""


def relation(request: LoadRequest, digest: str | None, known: Policy | None) -> Relation:
    """Compare an announcement with the policy that has its name (P1).

    It is the same only if path and digest agree. Without any digest the path alone would say so, but the files at a
    path can have changed: then it counts as the same only while somebody uses it. What was adopted has no digest, so it
    is never the same, unless its name holds the digest (a managed one).
    """
    if known is None or known.state not in OCCUPYING or known.name != request.lora_name:
        return Relation.NEW  # also what was an alias so far: the policy that it meant has an owner who unloads it
    managed_alike = request.policy is not None and known.upstream == request.lora_name
    if known.state is PolicyState.RETIRING and not managed_alike:
        return Relation.NEW  # its client has given the name up; its rollouts keep what they have
    used = bool(known.leases or known.callers)
    digests_agree = known.digest == digest and (digest is not None or used)
    same = known.path == request.lora_path and (digests_agree or managed_alike)
    if same and (known.state is PolicyState.LIVE or (known.state is PolicyState.LOADING and known.callers)):
        return Relation.SAME
    if used and not (same or managed_alike):
        return Relation.IN_USE
    return Relation.REPLACES


def name_in_use(request: LoadRequest, known: Policy) -> ApiError:
    """Say that two live runs fight over a name."""
    clients = sorted({f"{lease.client[0]}:{lease.client[1]}" for lease in known.leased if lease.client})
    who = f"rollouts from {', '.join(clients[:4])}" if clients else "a client that waits for it to load"
    return ApiError(
        409,
        f"'{known.name}' means the adapter in {known.path}, which is in use by {who}; it cannot mean another one, in "
        f"{request.lora_path}, at the same time. Is another run, or a rollout worker of a killed one, still alive? End "
        "it, or publish under another name.",
        reason="name_in_use",
        param="lora_name",
    )


def no_slot(name: str, taken: Sequence[Policy], slots: int) -> ApiError:
    """Say that every slot is in real use, and by whom."""
    holders = ", ".join(f"{policy.name} ({policy.state}, {policy.leases} rollouts)" for policy in taken)
    return ApiError(
        409,
        f"No slot for '{name}': the replicas have --max-loras {slots}, taken by {holders}. "
        f"Unload one of them, or start the replicas with --max-loras {len(taken) + 1}.",
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
