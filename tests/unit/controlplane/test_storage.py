"""Which bucket is asked about which path."""

from __future__ import annotations

import asyncio
from urllib.parse import unquote

import httpx2
import pytest

from proxy.contract import PolicyFile
from proxy.controlplane.storage import HubGate
from proxy.errors import ApiError

STORAGE = [
    ("hf://buckets/me/runs", "/lora"),
    ("hf://buckets/me/inner/a", "/lora/inner"),
    ("hf://buckets/me/other/b/", "/elsewhere/"),
]
FILE = PolicyFile(path="adapter_config.json", size=2, sha256="", xet_hash="a" * 64)


def _asked(path: str) -> str:
    """Return the bucket and folder that the Hub is asked about."""
    asked: list[str] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        asked.append(unquote(request.url.path).removeprefix("/api/buckets/"))
        return httpx2.Response(404, headers={"X-Error-Code": "RepoNotFound"})

    async def wait() -> None:
        async with httpx2.AsyncClient(transport=httpx2.MockTransport(answer)) as client:
            await HubGate(STORAGE, client, lambda: "hf_x").wait(path, (FILE,), least=(), timeout_s=5.0)

    with pytest.raises(ApiError, match=f"{path} was not loaded, and no replica was asked for it: bucket me/"):
        asyncio.run(wait())
    (one,) = asked
    return one


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/lora/run/x", "me/runs/tree/run/x/"),
        ("/lora/inner/run/x", "me/inner/tree/a/run/x/"),
        ("/elsewhere/x", "me/other/tree/b/x/"),
        ("/lora/innermost/x", "me/runs/tree/innermost/x/"),
    ],
)
def test_the_innermost_mount_names_the_bucket(path: str, asked: str) -> None:
    assert _asked(path) == asked


def test_what_is_below_no_mount_is_not_asked_about() -> None:
    async def wait() -> None:
        async with httpx2.AsyncClient() as client:
            gate = HubGate(STORAGE, client, lambda: None)
            assert not gate.covers("/loras/x")
            await gate.wait("/loras/x", (FILE,), least=(), timeout_s=5.0)

    asyncio.run(wait())
