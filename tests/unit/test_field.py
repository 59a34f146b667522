"""Every bug in tests/FIELD.md has a test that exists, or a reason in words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
ROWS = [
    line for line in (TESTS / "FIELD.md").read_text().splitlines() if line.startswith("| ") and "#number" not in line
]
BUG = re.compile(r"[\w./-]+#\d+")
CITED = re.compile(r"`([\w/]+\.py)::(\w+)`")


@pytest.mark.parametrize("row", ROWS, ids=[row.split("|")[1].split(",")[0].strip() for row in ROWS])
def test_every_row_names_bugs_and_tests_that_exist(row: str) -> None:
    bugs, happened, shown = (cell.strip() for cell in row.strip("|").split("|"))
    assert BUG.match(bugs) and happened
    cited = CITED.findall(shown)
    assert cited, "no test"
    for path, name in cited:
        assert re.search(rf"^(async )?def {name}\(", (TESTS / path).read_text(), re.MULTILINE), f"{path}::{name}"


def test_no_bug_stands_in_two_rows() -> None:
    bugs = [bug for row in ROWS for bug in BUG.findall(row.split("|")[1])]
    assert len(bugs) == len(set(bugs)) > 60
