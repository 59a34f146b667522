"""The rooms and the arrows between them, as `proxy/__init__.py` draws them: nothing imports upwards or sideways."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]

LEAVES = {"contract", "errors", "settings", "sources", "auth", "access", "logs", "descriptors", "threads"} | {
    "metrics",
    "artifacts",
}

ARROWS: dict[str, set[str]] = {
    "contract": set(),
    "errors": set(),
    "sources": set(),
    "settings": {"contract", "errors", "sources"},
    "auth": set(),
    "access": {"auth"},
    "logs": set(),
    "descriptors": set(),
    "threads": set(),
    "metrics": {"contract"},
    "artifacts": {"contract", "errors"},
    "fleet": set(),
    "routing": {"fleet", "errors"},
    "dataplane": {"routing", "fleet"} | LEAVES - {"artifacts"},
    "controlplane": {"fleet"} | LEAVES,
    "discovery": {"fleet"} | LEAVES - {"artifacts"},
    "admin": {"fleet", "routing"} | LEAVES,
    "dashboard": {"admin", "fleet", "routing"} | LEAVES,
    "telemetry": {"fleet", "routing"} | LEAVES,
    "tracing": {"dataplane", "controlplane", "routing", "fleet"} | LEAVES,
    "simulator": LEAVES,
    "demo": {"simulator", "trainer_client"} | LEAVES,
    "app": {"dataplane", "controlplane", "discovery", "admin", "dashboard", "telemetry", "tracing", "routing", "fleet"}
    | LEAVES,
    "cli": {"app", "simulator", "demo"} | LEAVES,
    "trainer_client": {"contract", "artifacts", "errors"},
}
"""Room -> the other rooms of this project that it may import. `admin` shows what `routing` counts."""


def room_of(module: str) -> str | None:
    """Return the room that a dotted module name belongs to, or None if it is not ours."""
    first, _, rest = module.partition(".")
    if first == "trainer_client":
        return first
    return rest.partition(".")[0] or None if first == "proxy" else None


def imports(file: Path) -> set[str]:
    """Return the dotted names of all modules that `file` imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


FILES = sorted(path for package in ("proxy", "trainer_client") for path in (REPO / package).rglob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(REPO)))
def test_a_file_imports_only_what_its_room_may(file: Path) -> None:
    own = room_of(".".join(file.relative_to(REPO).with_suffix("").parts))
    if own in (None, "__init__"):
        assert not imports(file) - {"__future__"}, "proxy/__init__.py is a map and imports nothing"
        return
    assert own in ARROWS, f"{own} is a new room: draw its arrows here and in proxy/__init__.py"
    others = {room for module in imports(file) if (room := room_of(module)) is not None} - {own}
    assert others <= ARROWS[own], f"{file.relative_to(REPO)} reaches {sorted(others - ARROWS[own])}"


def test_every_room_is_on_the_map() -> None:
    map_text = (REPO / "proxy" / "__init__.py").read_text()
    rooms = {path.stem for path in (REPO / "proxy").iterdir() if path.suffix == ".py" or path.is_dir()}
    missing = {room for room in rooms - {"__init__", "__pycache__", "py"} if room not in map_text}
    assert not missing
