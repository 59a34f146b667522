"""The rules for numbering, retiring and deleting policies."""

from __future__ import annotations

import pytest

from proxy.contract import PolicyStatus
from proxy.errors import SettingsError
from trainer_client.policies import (
    Fate,
    Timings,
    check_run,
    fallen_out,
    fate,
    is_checkpoint,
    next_version,
    version_in,
)


def status(state: str, *, files_deletable: bool = False) -> PolicyStatus:
    return PolicyStatus(
        name="run-v1-00000000",
        path="/lora/run/run-v1-00000000",
        state=state,
        version=1,
        leases=0,
        held_by=(),
        files_deletable=files_deletable,
    )


@pytest.mark.parametrize("run", ["math-r1", "a", "7b.v2_x", "run-v3"])
def test_names_of_runs(run: str) -> None:
    assert check_run(run) == run


@pytest.mark.parametrize("run", ["", ".hidden", "-x", "a/b", "a~b", "a b", "..", "é", "x" * 101, "run\n"])
def test_a_run_that_cannot_be_part_of_a_name_is_refused(run: str) -> None:
    with pytest.raises(SettingsError, match="cannot be used in names"):
        check_run(run)


def test_numbering_goes_on_after_the_highest() -> None:
    assert next_version([]) == 1
    assert next_version([3, 1]) == 4


@pytest.mark.parametrize(
    ("versions", "max_staleness", "out"),
    [([], 0, []), ([1], 0, []), ([1, 2], 0, [1]), ([1, 2, 3], 1, [1]), ([5, 1, 6], 4, [1]), ([1, 2, 3], 4, [])],
)
def test_the_newest_and_max_staleness_before_it_stay(versions: list[int], max_staleness: int, out: list[int]) -> None:
    assert fallen_out(versions, max_staleness=max_staleness) == out


@pytest.mark.parametrize(
    ("known", "unloaded", "checkpoint", "expected"),
    [
        (None, False, False, Fate.UNLOAD),
        (None, False, True, Fate.UNLOAD),
        (None, True, False, Fate.DELETE),
        (None, True, True, Fate.KEEP),
        (status("live"), True, False, Fate.UNLOAD),
        (status("loading"), False, True, Fate.UNLOAD),
        (status("retiring"), True, False, Fate.WAIT),
        (status("retired"), False, False, Fate.WAIT),
        (status("retired", files_deletable=True), False, False, Fate.DELETE),
        (status("failed", files_deletable=True), False, False, Fate.DELETE),
        (status("retired", files_deletable=True), False, True, Fate.KEEP),
    ],
)
def test_what_becomes_of_a_policy_out_of_the_window(
    known: PolicyStatus | None, unloaded: bool, checkpoint: bool, expected: Fate
) -> None:
    assert fate(known, unloaded=unloaded, checkpoint=checkpoint) is expected


@pytest.mark.parametrize(("keep_every", "kept"), [(None, []), (1, [1, 2, 3, 4]), (2, [2, 4]), (5, [])])
def test_every_so_many_versions_one_is_a_checkpoint(keep_every: int | None, kept: list[int]) -> None:
    assert [version for version in (1, 2, 3, 4) if is_checkpoint(version, keep_every=keep_every)] == kept


@pytest.mark.parametrize(
    ("folder", "version"),
    [
        ("run-v7-1f3a9c02", 7),
        ("run-v7", None),
        ("run-v07-1f3a9c02", None),
        ("run-v0-1f3a9c02", None),
        ("other-v7-1f3a9c02", None),
        ("run-v2-v7-1f3a9c02", None),
        (".staging-1-1f3a9c02", None),
        ("run-v7-1f3a9c02.bak", None),
    ],
)
def test_only_a_runs_own_policies_count(folder: str, version: int | None) -> None:
    assert version_in("run", folder) == version


def test_the_total_is_the_sum_of_all_phases() -> None:
    assert Timings(gather=1.0, check=2.0, store=3.0, announce=4.0, retire=5.0).total == 15.0
