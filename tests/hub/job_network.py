"""Network groups of Jobs: each Job gets a loopback address of its own, which its group's members know by its aliases.

The names are in a file that every member sees as its /etc/hosts, which takes a mount namespace of its own.
"""

from __future__ import annotations

import secrets
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

WHY_NOT = "this machine gives processes no mount namespace of their own (unshare)"

_UNSHARE = ["unshare", "--map-root-user", "--mount", "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"']


@dataclass(frozen=True)
class Membership:
    """What a Job has of its group."""

    address: str
    prefix: str
    """HF_NETWORK_GROUP_PREFIX."""
    hosts: Path

    def wrap(self, command: list[str]) -> list[str]:
        """Return the command that runs `command` where the group's names are known."""
        return [*_UNSHARE, str(self.hosts), *command]


class NetworkGroups:
    """The groups of one Hub."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._prefixes: dict[str, str] = {}

    def join(self, network: dict[str, Any] | None) -> Membership | None:
        """Return the membership of a new Job; None without a group, or where there are no namespaces."""
        if network is None or not groups_work():
            return None
        group = network["group"]
        prefix = self._prefixes.setdefault(group, f"group-{secrets.token_hex(3)}-")
        address = "127." + ".".join(str(1 + secrets.randbelow(250)) for _ in range(3))
        hosts = self._home / f"hosts-{group}"
        if not hosts.exists():
            shutil.copyfile("/etc/hosts", hosts)
        with hosts.open("a") as file:  # in place: it is mounted in the Jobs that are there
            file.writelines(f"\n{address} {prefix}{alias}\n" for alias in network.get("aliases", ()))
        return Membership(address, prefix, hosts)


@cache
def groups_work() -> bool:
    """Return whether Jobs can have names of their own on this machine."""
    try:
        tried = subprocess.run([*_UNSHARE, "/etc/hosts", "true"], capture_output=True, timeout=10, check=False)
    except OSError:
        return False
    return tried.returncode == 0
