"""A replica never becomes healthy: `up` ends with its last lines, and everything is canceled."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.hub.fleets import Fleet
from tests.hub.job_replica import DYING_WORDS, HANGING_WORDS
from tests.hub.offline_hub import OfflineHub

pytestmark = pytest.mark.timeout(240)


@pytest.mark.parametrize(
    ("how", "words", "why", "start_timeout"),
    [
        ("dies", DYING_WORDS, "ended as ERROR (Job failed with exit code: 1) before it was healthy", "30m"),
        ("hangs", HANGING_WORDS, "was not healthy within", "8s"),
    ],
)
def test_up_ends_with_the_last_lines_of_a_replica_that_is_never_healthy(
    hub: OfflineHub, tmp_path: Path, how: str, words: str, why: str, start_timeout: str
) -> None:
    fleet = Fleet(hub, tmp_path)
    fleet.write(spoiled_how=how, replicas={"start_timeout": start_timeout})
    fleet.spoil(1)
    with fleet.up() as up:
        fleet.ended_with(up, 1)
        assert why in up.log()
        assert f" | {words}" in up.log()
    assert not fleet.jobs(role="trainer")


@pytest.mark.parametrize("fields", [{"replicas": {"flavor": "h200x64"}}, {"namespace": "somebody"}])
def test_what_the_hub_refuses_ends_up_at_once(hub: OfflineHub, tmp_path: Path, fields: dict[str, Any]) -> None:
    fleet = Fleet(hub, tmp_path)
    fleet.write(**fields)
    with fleet.up() as up:
        fleet.ended_with(up, 1)
        assert re.search(r"the Hub answered 40[03] \(.*\); ", up.log())
        assert "Traceback" not in up.log()
