"""Which faults come up, and whether a run that has struck nothing says so."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.chaos.__main__ import dealt
from benchmarks.chaos.faults import NETWORK_KINDS, PROCESS_KINDS, SIMULATED_KINDS, STORAGE_KINDS, Kind
from benchmarks.chaos.monkey import Struck, deck
from benchmarks.chaos.report import Report
from benchmarks.chaos.scale import QUICK, VLLM, VLLM_QUICK, Scale
from benchmarks.chaos.tally import Tally
from benchmarks.chaos.trainers import Syncs

KINDS = [*PROCESS_KINDS, *NETWORK_KINDS, *STORAGE_KINDS, *SIMULATED_KINDS]


@given(st.lists(st.sampled_from(KINDS), unique=True), st.integers(1, 5), st.randoms(use_true_random=False))
def test_a_round_has_every_kind(kinds: list[Kind], shares: int, chance: random.Random) -> None:
    cards = Counter(kind.name for kind in deck(kinds, shares=shares, chance=chance))
    assert cards == {kind.name: 1 if kind.ends_runs else shares for kind in kinds}


def test_quickly_real_vllm_is_not_restarted() -> None:
    quick = {kind.name for kind in dealt(KINDS, VLLM_QUICK, [])}
    assert {kind.name for kind in dealt(KINDS, VLLM, [])} - quick == {k.name for k in PROCESS_KINDS if k.restarts}
    assert dealt(KINDS, QUICK, []) == KINDS


def test_what_was_asked_for_is_dealt_whatever_it_takes() -> None:
    assert [kind.name for kind in dealt(KINDS, VLLM_QUICK, ["kill -9"])] == ["kill -9"]


def test_names_of_kinds_can_be_asked_for() -> None:
    assert not [kind.name for kind in KINDS if "," in kind.name]
    with pytest.raises(SystemExit, match="no fault is called earthquake; there are: kill -9,"):
        dealt(KINDS, QUICK, ["earthquake"])


def report(by_kind: dict[str, Struck], tmp_path: Path, *, whole: bool = True, scale: Scale = QUICK) -> Report:
    """Return one of a run in which nothing went wrong."""
    return Report(
        scale=scale,
        settings={},
        seconds=1,
        whole=whole,
        tally=Tally(),
        by_kind=by_kind,
        left_out=["kill -9"],
        withheld=2,
        syncs=Syncs(tmp_path, base_model="sim"),
        seed=1,
        left={},
        log=tmp_path / "log",
        tracebacks=0,
    )


def test_a_kind_that_met_too_few_rollouts_is_a_failure(tmp_path: Path) -> None:
    hits = {"slow link": Struck(faults=3, hit=QUICK.least_hits), "network cut": Struck(faults=1, hit=0)}
    assert report(hits, tmp_path).failures() == ["network cut: it hit 0 rollouts, which proves nothing"]
    assert report(hits, tmp_path, whole=False).failures() == []


def test_what_was_left_out_is_said(tmp_path: Path) -> None:
    said = report({}, tmp_path).sentences()
    assert "kinds of faults left out: kill -9" in said
    assert any("seen late or torn, by one replica each: 2" in sentence for sentence in said)
