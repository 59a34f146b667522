"""How long it takes to bring a policy to all replicas, and what it costs trainer and generation meanwhile.

usage: python -m benchmarks.sync [--quick] [--match TEXT] [--syncs N] [--json FILE]

    landing       seconds from an upload's end until the Hub lists the files
    negative      seconds for which a mount remembers that it did not find something
    served        from the trainer's first call until every replica serves the policy
    after listed  the same, from the moment in which the Hub lists the files
    waits         seconds for which the trainer could not go on
    standstill    seconds without a token on the replica that stood still for longest
    recomputed    tokens of rollouts in flight whose KV had to be computed again, on all replicas
    sent          bytes that went to the store

The last way, merged, is what it costs when an adapter cannot be served as one: a whole model of the adapter's shapes,
in float32, written in place of a real merge, and read by one replica after the other.

Medians of N syncs. FAILED: a replica saw half of the directory, which the published pattern cannot tell from an adapter
that is broken. The Hub is an offline one, the mounts behave as hf-mount 0.9, the replicas are simulated.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from benchmarks.result_file import result_file
from benchmarks.sync.patterns import PATTERNS, Adapter, Pattern
from benchmarks.sync.watch import Generation, Listing
from benchmarks.sync.world import World, world
from proxy.simulator.adapters import Geometry, lora_config, lora_tensors
from tests.hub.mount import WITHOUT_FUSE

SIZES: dict[int, tuple[int, Geometry]] = {
    2: (16, Geometry(hidden=512, intermediate=1024, layers=4)),
    4: (32, Geometry(hidden=512, intermediate=1024, layers=4)),
    40: (32, Geometry(hidden=2048, intermediate=4096, layers=10)),
    600: (64, Geometry(hidden=4096, intermediate=8192, layers=36)),
}
"""Rank and layers of an adapter of so many MB."""
MERGED = "ours, merged"
LARGEST_MERGED = 40
"""MB of an adapter whose base model is written in whole: that of the next larger one has 25 GB."""
WARM_UP = 1
"""Syncs of ours that are not counted: the first one makes connections and tables. The published pattern keeps none."""


@dataclass(frozen=True)
class Cell:
    """What is to be measured."""

    landing_s: float
    negative_ttl_s: float
    replicas: int
    mb: int

    def __str__(self) -> str:
        return (
            f"landing {self.landing_s:g} s, negative {self.negative_ttl_s:g} s, {self.replicas} replicas, {self.mb} MB"
        )


@dataclass(frozen=True)
class Row:
    """The medians of one pattern in one cell. None where no sync has succeeded, or it is not to be seen."""

    pattern: str
    landing_s: float
    negative_ttl_s: float
    replicas: int
    mb: int
    publish_to_served_s: float | None
    served_after_listed_s: float | None
    trainer_wait_s: float
    standstill_s: float
    tokens_recomputed: int
    failed: int
    """Of so many syncs."""
    syncs: int
    sent_mb: float = 0.0


@dataclass(frozen=True)
class Sync:
    """One measurement."""

    served_s: float | None
    after_listed_s: float | None
    wait_s: float
    standstill_s: float
    recomputed: int
    sent: int


QUICK = [Cell(0.5, 1, 3, 4), Cell(2.5, 30, 3, 4)]
ALL = [
    Cell(*values)
    for values in itertools.product((0.5, 2.5), (1.0, 30.0), (1, 3, 8), (2, 40, 600))
    if not (values[2] == 8 and values[3] == 600)  # eight copies of 600 MB for every sync
] + [Cell(landing, negative, 3, 4) for landing in (0.5, 2.5) for negative in (1.0, 30.0)]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sync", description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two cells, one sync each, within four minutes")
    parser.add_argument("--match", default="", metavar="TEXT", help="only cells with this text in their name")
    parser.add_argument("--syncs", type=int, metavar="N", help="syncs of each pattern in each cell (default 3)")
    parser.add_argument("--json", type=result_file, metavar="FILE", help="write the rows to this file")
    asked = parser.parse_args()
    if WITHOUT_FUSE is not None:
        sys.exit(f"benchmarks.sync needs mounts: {WITHOUT_FUSE}")
    cells = [cell for cell in (QUICK if asked.quick else ALL) if asked.match in str(cell)]
    rows: list[Row] = []
    try:
        for cell, pattern in itertools.product(cells, PATTERNS):
            if pattern == MERGED and cell.mb > LARGEST_MERGED:
                continue
            print(f"{cell}: {pattern}", file=sys.stderr)
            rows.append(measure(cell, pattern, syncs=asked.syncs or (1 if asked.quick else 3)))
    except KeyboardInterrupt:
        print("interrupted: these are the rows so far", file=sys.stderr)
    Console(width=140).print(table(rows))
    if asked.json:
        asked.json.write_text(json.dumps({"rows": [asdict(row) for row in rows]}, indent=2) + "\n")


def measure(cell: Cell, pattern: str, *, syncs: int) -> Row:
    """Bring policies to a world of their own, and return the medians."""
    ours = pattern.startswith("ours")
    warm_up = WARM_UP if ours else 0
    with world(replicas=cell.replicas, negative_ttl_s=cell.negative_ttl_s, with_proxy=ours) as there:
        there.hub.set_faults(landing_s=cell.landing_s)
        trainer = PATTERNS[pattern](there)
        try:
            seen = [one_sync(there, trainer, adapter) for adapter in adapters(cell.mb, warm_up + syncs)][warm_up:]
        finally:
            trainer.close()
    return Row(
        pattern=pattern,
        **asdict(cell),
        publish_to_served_s=_median([sync.served_s for sync in seen]),
        served_after_listed_s=_median([sync.after_listed_s for sync in seen]),
        trainer_wait_s=statistics.median(sync.wait_s for sync in seen),
        standstill_s=statistics.median(sync.standstill_s for sync in seen),
        tokens_recomputed=round(statistics.median(sync.recomputed for sync in seen)),
        failed=sum(sync.served_s is None for sync in seen),
        syncs=syncs,
        sent_mb=round(statistics.median(sync.sent for sync in seen) / 1e6, 1),
    )


def adapters(mb: int, count: int) -> Iterator[Adapter]:
    """Make adapters, one after the other: they are large."""
    rank, geometry = SIZES[mb]
    for version in range(1, count + 1):
        tensors = lora_tensors(rank=rank, seed=version, geometry=geometry)
        yield Adapter(version, tensors, lora_config(rank=rank), geometry)


def one_sync(there: World, trainer: Pattern, adapter: Adapter) -> Sync:
    """Bring one policy to all replicas while they generate."""
    with ExitStack() as stack:
        generations = [stack.enter_context(Generation(replica)) for replica in there.replicas]
        before = [generation.recomputed for generation in generations]
        listing = stack.enter_context(Listing(there.hub.api()))
        served = trainer.sync(adapter)
        end = max(served.free_at, served.served_at or 0.0)
        after = [generation.recomputed for generation in generations]
    if served.trouble:
        print(f"  {served.trouble[:200]}", file=sys.stderr)
    listed_at = listing.whole_at
    return Sync(
        served_s=served.served_at - served.began_at if served.served_at else None,
        after_listed_s=served.served_at - listed_at if served.served_at and listed_at else None,
        wait_s=served.free_at - served.began_at,
        standstill_s=max(generation.standstill_s(served.began_at, end) for generation in generations),
        recomputed=sum(after) - sum(before),
        sent=adapter.bytes if served.sent is None else served.sent,
    )


def table(rows: list[Row]) -> Table:
    """Return the rows for people."""
    shown = Table(box=None, pad_edge=False)
    for name in ("landing", "negative", "replicas", "MB", "pattern", "served", "after listed", "waits", "standstill"):
        shown.add_column(name, justify="left" if name == "pattern" else "right")
    for name in ("recomputed", "sent"):
        shown.add_column(name, justify="right")
    for row in rows:
        served = f"{row.publish_to_served_s:.2f} s" if row.publish_to_served_s is not None else "FAILED"
        if row.failed and row.publish_to_served_s is not None:
            served += f" ({row.failed} of {row.syncs} FAILED)"
        listed = "" if row.served_after_listed_s is None else f"{row.served_after_listed_s:+.2f} s"
        shown.add_row(
            f"{row.landing_s:g} s", f"{row.negative_ttl_s:g} s", str(row.replicas), str(row.mb), row.pattern, served,
            listed, f"{row.trainer_wait_s:.3f} s", f"{row.standstill_s:.2f} s", str(row.tokens_recomputed),
            f"{row.sent_mb:.1f} MB",
        )  # fmt: skip
    return shown


def _median(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


if __name__ == "__main__":
    main()
