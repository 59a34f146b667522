"""What a cell of the terminal says."""

from __future__ import annotations

import pytest
from rich.console import Console

from proxy.contract import PolicyStatus, Router, Stats
from trainer_client.status.reading import Reading
from trainer_client.status.view import base_label, frame


@pytest.mark.parametrize(
    ("weights", "shown"),
    [
        (None, []),
        ("default", []),
        ("updating", ["base:updating"]),
        ("3", ["base:3"]),
        ("3~math-r1-v40-9f86d081", ["base:v40"]),
        ("3~sft", ["base:sft"]),
    ],
)
def test_base_weights_are_shown_where_they_are_not_those_of_the_start(weights: str | None, shown: list[str]) -> None:
    assert base_label(weights) == shown


@pytest.mark.parametrize(
    ("told", "line"),
    [
        (
            {"state": "loading", "reason": "http://r1 after 9 tries: No adapter found"},
            "run-v1 is loading: http://r1 after",
        ),
        ({"state": "live", "blocked": "its files are gone"}, "run-v1 is blocked: its files are gone"),
        ({"state": "retired", "reason": "unloaded by the client"}, None),
    ],
)
def test_what_a_policy_waits_for_has_a_line(told: dict[str, str], line: str | None) -> None:
    known = {"name": "run-v1", "path": "", "version": 1, "leases": 0, "held_by": (), "files_deletable": False}
    policy = PolicyStatus.model_validate(known | told)
    router = Router(routed=0, affinity=0, spilled=0, unmatched=0, retried=0)
    console = Console(width=200)
    with console.capture() as shown:
        console.print(frame(Reading(0.0, (), (policy,), None, Stats(router=router, generated_tokens=0))))
    assert (line in shown.get()) if line else (" is " not in shown.get())
