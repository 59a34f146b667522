"""deploy/README.md names every file that is there, and no other."""

from __future__ import annotations

import re

from tests.support.tiny_model import REPO

DEPLOY = REPO / "deploy"
PAGE = (DEPLOY / "README.md").read_text()


def test_every_situation_is_told() -> None:
    for path in DEPLOY.iterdir():
        assert path.name == "README.md" or re.search(rf"`{path.name}[/`]", PAGE), f"{path.name} is not in the table"


def test_what_it_names_is_there() -> None:
    named = set(re.findall(r"deploy/[\w./-]+", PAGE)) - {"deploy/lora"}
    assert named and all((REPO / path).exists() for path in named), named
    links = re.findall(r"\]\((\.\./[^)#]+)", PAGE)
    assert all((DEPLOY / link).exists() for link in links), links


def test_each_row_has_a_command_and_a_price() -> None:
    table = PAGE.partition("\n\nWhat they share")[0]
    rows = [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 6
    for _, _, command, cost in rows:
        assert command.strip().startswith("`") and cost.strip()
