"""What a cell of the terminal says."""

from __future__ import annotations

import pytest

from trainer_client.status.view import base_label


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
