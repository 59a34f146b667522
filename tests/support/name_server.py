"""A name server of this machine for one name, and the way to let a process ask it.

with NameServer("vllm.test") as server:
    server.addresses = ["127.0.0.2", "::1"]
    subprocess.run([*server.within(), "getent", "ahosts", "vllm.test"])
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
import subprocess
import tempfile
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

ADDRESS = "127.0.0.53"
_PORT = 53
_TYPES = {1: 4, 28: 6}
"""A and AAAA -> IP version."""
_SERVER_FAILURE, _NO_SUCH_NAME = 2, 3


def why_not() -> str | None:
    """Return why processes cannot be given another name server here, or None if they can."""
    if os.geteuid() != 0:
        return "only root may answer on port 53 and mount another resolv.conf"
    tried = subprocess.run(["unshare", "-m", "mount", "--bind", "/etc/hosts", "/etc/resolv.conf"], capture_output=True)
    return None if tried.returncode == 0 else f"no mount namespaces here: {tried.stderr.decode().strip()}"


class NameServer:
    """Answers questions for `name` from `addresses`; while `broken`, it fails. Other names do not exist."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.addresses: list[str] = []
        self.broken = False
        self.questions = 0

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="name-server-")
        self._resolv = Path(self._folder.name) / "resolv.conf"
        self._resolv.write_text(f"nameserver {ADDRESS}\noptions timeout:1 attempts:1\n")
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((ADDRESS, _PORT))
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stop:
            stop.sendto(b"", (ADDRESS, _PORT))
        self._thread.join()
        self._socket.close()
        self._folder.cleanup()

    def within(self) -> tuple[str, ...]:
        """Return the command in front of another that asks this server for names."""
        script = f'mount --bind {self._resolv} "$(realpath /etc/resolv.conf)" && exec "$@"'
        return ("unshare", "-m", "sh", "-c", script, "sh")

    def _serve(self) -> None:
        while True:
            question, client = self._socket.recvfrom(512)
            if not question:
                return
            self.questions += 1
            self._socket.sendto(self._answer(question), client)

    def _answer(self, question: bytes) -> bytes:
        name, end = _name_in(question)
        (kind,) = struct.unpack_from("!H", question, end)
        records, code = b"", 0
        if self.broken:
            code = _SERVER_FAILURE
        elif name != self.name or not self.addresses:
            code = _NO_SUCH_NAME
        else:
            wanted = [ipaddress.ip_address(address) for address in self.addresses]
            packed = [address.packed for address in wanted if address.version == _TYPES.get(kind)]
            records = b"".join(struct.pack("!HHHIH", 0xC00C, kind, 1, 0, len(raw)) + raw for raw in packed)
        count = len(records) // (12 + (16 if kind == 28 else 4))
        head = question[:2] + struct.pack("!HHHHH", 0x8180 | code, 1, count, 0, 0)
        return head + question[12 : end + 4] + records


def _name_in(question: bytes) -> tuple[str, int]:
    labels, at = [], 12
    while length := question[at]:
        labels.append(question[at + 1 : at + 1 + length].decode())
        at += 1 + length
    return ".".join(labels), at + 1
