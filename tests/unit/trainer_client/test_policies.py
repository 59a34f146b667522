"""The rules for numbering, retiring and deleting policies."""

from __future__ import annotations

import pytest

from proxy.contract import PolicyStatus
from proxy.errors import SettingsError
from trainer_client.policies import Timings, check_run, fallen_out, may_delete, next_version


def status(*, files_deletable: bool) -> PolicyStatus:
    return PolicyStatus(
        name="run-v1-00000000",
        path="/lora/run/run-v1-00000000",
        state="retired",
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


@pytest.mark.parametrize("unloaded", [True, False])
def test_what_the_proxy_says_about_a_policys_files_decides(unloaded: bool) -> None:
    assert may_delete(status(files_deletable=True), unloaded=unloaded)
    assert not may_delete(status(files_deletable=False), unloaded=unloaded)


def test_a_policy_that_the_proxy_does_not_know_is_deleted_only_after_its_unload() -> None:
    assert may_delete(None, unloaded=True)
    assert not may_delete(None, unloaded=False)


def test_the_total_is_the_sum_of_all_phases() -> None:
    assert Timings(stage=1.0, check=2.0, announce=3.0, retire=4.0).total == 10.0
