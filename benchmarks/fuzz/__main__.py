"""Give bad input to every reader of bytes from outside, and count what crashes, hangs or takes memory.

usage: python -m benchmarks.fuzz [--inputs 1000000] [--target NAME ...] [--seed 0] [--json FILE]

Each target runs in a process of its own and gets an equal share of the inputs. Ctrl-C ends the run and prints what
there is. Ends with status 1 if there was a crash; the input that caused it, made as small as can be, is printed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection

from benchmarks.fuzz.run import Tally, fuzz
from benchmarks.fuzz.targets import TARGETS, Target
from benchmarks.result_file import result_file

STUCK_S = 600
"""Without a word from a target for so long, it hangs in what no signal ends. A round takes seconds, but minutes
where everything else on the machine goes first."""


def main() -> None:
    """Run, print the table, and end with status 1 after a crash."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=1_000_000, help="in all, default 1,000,000")
    names = [target.name for target in TARGETS]
    parser.add_argument("--target", action="append", choices=names, help="only this one; may be repeated")
    parser.add_argument("--seed", type=int, default=0, help="another one takes other inputs")
    parser.add_argument("--json", type=result_file, help="file for the result")
    wanted = parser.parse_args()
    targets = [target for target in TARGETS if target.name in (wanted.target or names)]
    tallies: list[Tally] = []
    try:
        for target in targets:
            tallies.append(Tally(target.name))
            for tallies[-1] in in_own_process(target, -(-wanted.inputs // len(targets)), wanted.seed):
                print(f"\r{row(tallies[-1])}", end="", file=sys.stderr, flush=True)
            print(file=sys.stderr)
    except KeyboardInterrupt:
        print("\nended early", file=sys.stderr)
    print(table(tallies))
    if wanted.json:
        wanted.json.write_text(json.dumps([tally.as_json() for tally in tallies], indent=2) + "\n")
    sys.exit(any(tally.crashes for tally in tallies))


def in_own_process(target: Target, inputs: int, seed: int) -> Iterator[Tally]:
    """Run one target in a process of its own, and yield its tally after each round."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(target, inputs, seed, theirs), daemon=True)
    process.start()
    theirs.close()
    tally = Tally(target.name)
    try:
        while ours.poll(STUCK_S):
            tally = ours.recv()
            yield tally
        tally.first, tally.crashes = f"it hangs: not a word for {STUCK_S} s", tally.crashes + 1
        yield tally
    except EOFError:
        process.join()
        if process.exitcode:
            tally.first, tally.crashes = f"its process ended with {process.exitcode}", tally.crashes + 1
            yield tally
    finally:
        process.kill()
        process.join()


def _run(target: Target, inputs: int, seed: int, told: Connection) -> None:
    told.send(fuzz(target, inputs, start=seed, told=told.send))


def row(tally: Tally) -> str:
    """Return one line of the table."""
    return (
        f"| {tally.target} | {tally.inputs:,} | {tally.seconds:.0f} | {tally.crashes} "
        f"| {tally.slowest_s * 1000:.0f} ms | {tally.peak_mb:.0f} |"
    )


def table(tallies: list[Tally]) -> str:
    """Return all of it, in Markdown."""
    whole = Tally(
        "all",
        inputs=sum(tally.inputs for tally in tallies),
        seconds=sum(tally.seconds for tally in tallies),
        crashes=sum(tally.crashes for tally in tallies),
        slowest_s=max(tally.slowest_s for tally in tallies),
        peak_mb=max(tally.peak_mb for tally in tallies),
    )
    found = [f"\n{tally.target}: {tally.first}" for tally in tallies if tally.first]
    head = ["| target | inputs | seconds | crashes | slowest | peak MB |", "|---|---|---|---|---|---|"]
    return "\n".join([*head, *map(row, tallies), row(whole), *found])


if __name__ == "__main__":
    main()
