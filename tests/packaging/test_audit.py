"""scripts/audit says what an advisory service knows, and never calls clean what nobody has looked at."""

from __future__ import annotations

import tomllib
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from types import ModuleType
from typing import Any

import pytest

from tests.support.tiny_model import REPO


@pytest.fixture(scope="module")
def audit() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.dont_write_bytecode", True)
        loader = SourceFileLoader("audit", str(REPO / "scripts" / "audit"))
        spec = spec_from_loader("audit", loader)
        assert spec is not None
        module = module_from_spec(spec)
        loader.exec_module(module)
        return module


GOOD = {"name": "good", "version": "1.0", "vulns": []}
BAD = {"name": "bad", "version": "2.0", "vulns": [{"id": "PYSEC-1", "fix_versions": ["2.1"]}]}
UNSEEN = {"name": "unseen", "skip_reason": "Dependency not found on PyPI and could not be audited: unseen (3.0)"}


@pytest.mark.parametrize(
    ("packages", "status", "said"),
    [
        ([GOOD], 0, []),
        ([GOOD, BAD], 1, ["newest: bad 2.0: PYSEC-1, mended in 2.1"]),
        ([GOOD, UNSEEN], 69, ["newest: 1 of 2 were not audited: unseen"]),
        ([UNSEEN, BAD], 1, ["newest: bad 2.0: PYSEC-1, mended in 2.1", "newest: 1 of 2 were not audited: unseen"]),
    ],
)
def test_what_was_not_looked_at_is_not_clean(
    audit: ModuleType, packages: list[dict[str, Any]], status: int, said: list[str]
) -> None:
    assert audit.judge("newest", {"dependencies": packages}) == (status, said)


def test_the_oldest_versions_are_those_of_the_bounds(audit: ModuleType) -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    oldest = audit.oldest(project)
    assert len(oldest) == len(project["dependencies"]) + sum(map(len, project["optional-dependencies"].values()))
    assert "uvloop==0.21" in oldest and all(one.count("==") == 1 and ";" not in one for one in oldest)
