"""What a checkpoint is compared with: the base model where it can be seen, else the last one that was served."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from proxy.artifacts.manifest import MANIFEST_FILE
from proxy.contract import Announcement, PolicyFile, ReloadRequest
from proxy.controlplane.checkpoints import Checkpoints
from proxy.errors import ApiError
from proxy.simulator.adapters import Geometry
from proxy.simulator.checkpoints import write_checkpoint

SMALL = Geometry(hidden=8, intermediate=8, layers=2, heads=2, kv_heads=1)
LARGE = Geometry(hidden=16, intermediate=8, layers=2, heads=2, kv_heads=1)


def request(path: Path) -> ReloadRequest:
    return ReloadRequest(name=path.name, path=str(path))


def test_one_that_was_never_served_is_no_measure_for_others(tmp_path: Path) -> None:
    async def scenario() -> None:
        checkpoints = Checkpoints()
        wrong = write_checkpoint(tmp_path / "wrong", seed=1, geometry=LARGE)
        right = write_checkpoint(tmp_path / "right", seed=2, geometry=SMALL)
        _, warnings = await checkpoints.checked(request(wrong), {"some/model"})
        assert "nobody has compared it" in warnings[0]
        found, _ = await checkpoints.checked(request(right), {"some/model"})
        checkpoints.served(found)
        with pytest.raises(ApiError, match="has shape"):
            await checkpoints.checked(request(wrong), {"some/model"})
        assert await checkpoints.checked(request(right), {"some/model"}) == (found, [])

    asyncio.run(scenario())


def test_the_base_model_is_the_measure_where_it_can_be_seen(tmp_path: Path) -> None:
    async def scenario() -> None:
        base = write_checkpoint(tmp_path / "base", seed=0, geometry=SMALL)
        wrong = write_checkpoint(tmp_path / "wrong", seed=1, geometry=LARGE)
        with pytest.raises(ApiError, match="has shape"):
            await Checkpoints().checked(request(wrong), {str(base)})

    asyncio.run(scenario())


def test_what_cannot_be_seen_is_trusted_and_said_so(tmp_path: Path) -> None:
    async def scenario() -> None:
        checkpoint, warnings = await Checkpoints().checked(request(tmp_path / "nowhere" / "run-v1"), set())
        assert checkpoint is None and "nobody has checked it" in warnings[0]

    asyncio.run(scenario())


def announced(path: Path) -> ReloadRequest:
    """Return the request of a trainer that has put the directory on the Hub, and its manifest beside it, or will."""
    files = tuple(
        PolicyFile(path=file.name, size=file.stat().st_size, sha256="0" * 64, xet_hash="1" * 64)
        for file in sorted(path.iterdir())
    )
    policy = Announcement(run="run", version=1, step=1, digest="0" * 64, files=files)
    return ReloadRequest(name=path.name, path=str(path), policy=policy)


def test_what_the_hub_vouches_for_needs_no_manifest_yet(tmp_path: Path) -> None:
    async def scenario() -> None:
        path = write_checkpoint(tmp_path / "run-v1", seed=1, geometry=SMALL)
        asked = announced(path)
        with pytest.raises(ApiError, match="is missing, so the policy is not published"):
            await Checkpoints().checked(asked, set())
        found, _ = await Checkpoints().checked(asked, set(), landed=True)
        assert found is not None
        (path / MANIFEST_FILE).write_text("{}")
        with pytest.raises(ApiError, match="is not a manifest"):
            await Checkpoints().checked(asked, set(), landed=True)

    asyncio.run(scenario())


def test_what_the_hub_vouches_for_may_be_late_here(tmp_path: Path) -> None:
    async def scenario() -> None:
        path = write_checkpoint(tmp_path / "run-v1", seed=1, geometry=SMALL)
        asked = announced(path)
        next(path.glob("*.safetensors")).unlink()
        checkpoint, warnings = await Checkpoints().checked(asked, set(), landed=True)
        assert checkpoint is None and "does not see all of" in warnings[0]

    asyncio.run(scenario())
