"""Replicas behind https, as on Hugging Face Jobs: a trusted authority is enough, one that is not is refused."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from pathlib import Path

import pytest

from proxy.auth import Credentials
from proxy.dataplane.budget import Account, Budget
from proxy.dataplane.errors import UpstreamError
from proxy.dataplane.upstream import Upstream
from proxy.settings import UpstreamSettings


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that vouches for itself, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    paths = folder / "certificate.pem", folder / "key.pem"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1"
    command += f" -addext subjectAltName=IP:127.0.0.1 -out {paths[0]} -keyout {paths[1]}"
    subprocess.run(command.split(), check=True, capture_output=True, timeout=15)
    return paths


async def ask(certificate: tuple[Path, Path]) -> tuple[bytes | None, bytes]:
    """Serve one request over TLS, send it, and return the answer's body and the request's head."""
    heads: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        await writer.drain()
        writer.close()

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*certificate)
    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, Upstream(UpstreamSettings(), Credentials(lambda: "secret")) as upstream:
        connection, answer = await upstream.start(
            url, "POST", "/v1/completions", [], b"{}", account=Account(Budget(1 << 20)), under_way=set()
        )
        body = await answer.read(1 << 20)
        connection.close()
        return body, heads[0]


def test_a_trusted_replica_is_asked_and_gets_the_token(
    certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
    body, head = asyncio.run(ask(certificate))
    assert body == b"ok" and b"authorization: Bearer secret" in head


def test_a_replica_that_nobody_vouches_for_is_unreachable(certificate: tuple[Path, Path]) -> None:
    with pytest.raises(UpstreamError, match="certificate verify failed") as caught:
        asyncio.run(ask(certificate))
    assert caught.value.unreachable
