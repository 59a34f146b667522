"""What benchmarks.sync counts as standing still, and that its rows tell a failure from a figure."""

from __future__ import annotations

from typing import cast

import pytest
from rich.console import Console

from benchmarks.sync.__main__ import ALL, QUICK, SIZES, Row, table
from benchmarks.sync.watch import Generation
from proxy.simulator.adapters import lora_tensors
from tests.support.replicas import SimulatedReplica


@pytest.mark.parametrize(
    ("arrivals", "standstill_s"),
    [
        ([], 10.0),
        ([0.1 * n for n in range(1, 100)], 0.0),
        ([0.1 * n for n in range(1, 50)] + [8.0 + 0.1 * n for n in range(20)], 3.1),
        ([-1.0, 11.0], 10.0),
    ],
)
def test_only_long_pauses_count(arrivals: list[float], standstill_s: float) -> None:
    generation = Generation(cast(SimulatedReplica, None))
    generation._arrivals = arrivals
    assert generation.standstill_s(0.0, 10.0) == pytest.approx(standstill_s)


def test_a_pattern_that_failed_says_so() -> None:
    row = Row("published, 2 s", 0.5, 1.0, 3, 4, None, None, 1.0, 1.0, 5, failed=3, syncs=3)
    half = Row("ours, mount", 0.5, 1.0, 3, 4, 2.0, 0.1, 1.0, 0.0, 0, failed=1, syncs=3)
    console = Console(width=160, record=True, file=None, quiet=False)
    with console.capture() as shown:
        console.print(table([row, half]))
    first, second = [
        line for line in shown.get().splitlines() if "s  " in line and ("published" in line or "ours" in line)
    ]
    assert "FAILED" in first
    assert "2.00 s (1 of 3 FAILED)" in second


def test_sizes_are_what_they_say() -> None:
    assert {cell.mb for cell in [*ALL, *QUICK]} == SIZES.keys()
    for mb in (2, 4, 40):
        rank, geometry = SIZES[mb]
        size = sum(tensor.nbytes for tensor in lora_tensors(rank=rank, seed=1, geometry=geometry).values())
        assert size == pytest.approx(mb * 1e6, rel=0.1)
