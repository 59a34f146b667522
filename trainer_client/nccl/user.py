"""What the user has set for NCCL: in the environment, or in the configuration files that NCCL reads.

NCCL takes a file's value only where the environment has none (setenv without overwriting, src/misc/param.cc), so
whatever is put into the environment would override the user's file unless somebody looks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SYSTEM_FILE = Path("/etc/nccl.conf")

ENVIRONMENT = "the environment"

ALSO_DECIDED_BY = {"NCCL_P2P_DISABLE": "NCCL_P2P_LEVEL"}
"""NCCL_P2P_DISABLE=1 outranks NCCL_P2P_LEVEL (ncclGetLevel in src/graph/paths.cc), so who set the latter decided."""


@dataclass(frozen=True)
class UserSetting:
    """One variable that the user has set."""

    name: str
    value: str
    where: str
    """`ENVIRONMENT`, or the path of the file."""


def user_settings(environ: Mapping[str, str], *, system_file: Path = SYSTEM_FILE) -> dict[str, UserSetting]:
    """Return what the user has set, by name: the environment first, then the user's file, then the system's.

    The user's file is $NCCL_CONF_FILE, or ~/.nccl.conf where that is not set. A file that cannot be read says nothing,
    as for NCCL.
    """
    found: dict[str, UserSetting] = {}
    for file in (system_file, _user_file(environ)):
        found |= {name: UserSetting(name, value, str(file)) for name, value in _read(file).items()}
    own = {name: value for name, value in environ.items() if name.startswith("NCCL_")}
    return found | {name: UserSetting(name, value, ENVIRONMENT) for name, value in own.items()}


def _user_file(environ: Mapping[str, str]) -> Path | None:
    if named := environ.get("NCCL_CONF_FILE"):
        return Path(named)
    return Path(home) / ".nccl.conf" if (home := environ.get("HOME")) else None


def _read(file: Path | None) -> dict[str, str]:
    try:
        lines = file.read_text().splitlines() if file else []
    except (OSError, UnicodeDecodeError):
        return {}
    pairs = (line.partition("=") for line in lines if "=" in line and not line.startswith("#"))
    return {name: value for name, _, value in pairs}
