"""The pages agree with the code."""

from __future__ import annotations

import re
from pathlib import Path

REPO = Path(__file__).parents[2]

_REASON = re.compile(r'reason="(?P<plain>\w+)"|reason="(?P<first>\w+)" if .* else "(?P<second>\w+)"')


def test_every_error_is_explained() -> None:
    sources = [path.read_text() for room in ("dataplane", "controlplane", "routing") for path in _files(room)]
    sources += [path.read_text() for path in (REPO / "proxy").glob("*.py")]
    raised = {word for source in sources for found in _REASON.finditer(source) for word in found.groups() if word}
    page = (REPO / "docs/operating.md").read_text().partition("## Errors of the proxy")[2]
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    explained = {word for row in rows[1:] for word in re.findall(r"`(\w+)`", row)}
    assert raised - explained == set(), "not in docs/operating.md"
    assert explained - raised - {"aborted", "replicas_failed"} == set(), "nothing raises these"


def _files(room: str) -> list[Path]:
    return list((REPO / "proxy" / room).rglob("*.py"))
