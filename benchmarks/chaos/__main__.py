"""Something breaks every second: are rollouts lost, answered by wrong weights, or stuck?

usage: python -m benchmarks.chaos [--trainer trl|client] [--quick] [--faults NAME,...] [--json FILE]
       .venv-vllm/bin/python -m benchmarks.chaos --vllm [--quick]

    hit             rollouts in flight, at that moment, on what the faults struck
    sent            rollouts in flight while such a fault was in force; "all" counts each once
    answered        by the weights that were asked for, whole
    moved           of these, by another replica than the first, unnoticed by the client
    retried         of these, after tries that the client saw fail and repeated, as TRL does
    retired         refused since the trainer had unloaded the policy: it would drop them as too stale
    error           given up after clear errors, while no ready replica held the policy
    left            went with their training run, which had ended
    recovery        seconds from the end of a fault until what it struck was ready again

Exits with 1 if one was lost, wrong or stuck, if anything is in flight at the end, if the proxy has logged a traceback,
or if a kind of fault has met too few rollouts to prove anything; with 130 after Ctrl-C or SIGTERM, which end it in
order and print what was seen.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import httpx2

from benchmarks.chaos.disk import Disk, small_disk
from benchmarks.chaos.faults import (
    NETWORK_KINDS,
    PROCESS_KINDS,
    SIMULATED_KINDS,
    STORAGE_KINDS,
    Kind,
    of_disk,
    of_proxy,
)
from benchmarks.chaos.fleet import SETTINGS, VLLM_SETTINGS, Fleet, running
from benchmarks.chaos.judge import Judge, LogprobJudge, TokenJudge
from benchmarks.chaos.monkey import Monkey
from benchmarks.chaos.report import Report
from benchmarks.chaos.rollouts import Rollouts
from benchmarks.chaos.scale import QUICK, SIMULATORS, VLLM, VLLM_QUICK, Scale
from benchmarks.chaos.tally import Ending, Tally
from benchmarks.chaos.trainers import Client, Syncs, Trl
from benchmarks.result_file import result_file
from proxy.demo.run import wait
from tests.support.proxies import RunningProxy
from tests.support.tiny_model import MODEL

QUIET_LIMIT_S = 30.0
"""Seconds from the last answer until every count of what is in flight must be zero."""

PUBLISHED = "published"
"""The directory that the trainer publishes in."""

INTERRUPTED = 130
STOPS = (signal.SIGINT, signal.SIGTERM)


def main() -> None:
    """Run, print a table, write JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description=__doc__.partition("\n")[0])
    parser.add_argument("--trainer", choices=["trl", "client"], default="trl", help="who announces (default trl)")
    parser.add_argument(
        "--quick", action="store_true", help="less of everything, within four minutes; of real vLLM, no restarts"
    )
    parser.add_argument("--vllm", action="store_true", help="two real vLLM replicas on the CPU; needs .venv-vllm")
    parser.add_argument("--rollouts", type=int, help="rollouts that must be answered (default 10000)")
    parser.add_argument("--seconds", type=float, help="how long it lasts at least (default 300)")
    parser.add_argument("--every", type=float, dest="every_s", help="seconds between two faults (default 1)")
    parser.add_argument("--replicas", type=int, help="replicas (default 8)")
    parser.add_argument("--seed", type=int, default=0, help="of the faults and the prompts")
    parser.add_argument("--faults", help="only these, as the table names them, separated by commas")
    parser.add_argument("--json", type=result_file, help="write everything to this file")
    parser.add_argument("--markdown", action="store_true", help="print the table in Markdown")
    asked = vars(parser.parse_args())
    if asked["vllm"] and find_spec("torch") is None:
        parser.error("--vllm needs torch here, to tell whose weights answered: run it by .venv-vllm/bin/python")
    whole, quick = (VLLM, VLLM_QUICK) if asked["vllm"] else (SIMULATORS, QUICK)
    scale = quick if asked["quick"] else whole
    given = {name: asked[name] for name in ("rollouts", "seconds", "every_s", "replicas") if asked[name] is not None}
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        faults = tuple(name.strip() for name in asked["faults"].split(",")) if asked["faults"] else ()
        chaos = run(replace(scale, **given), asked["trainer"], faults, seed=asked["seed"], folder=Path(folder))
        report = asyncio.run(chaos)
    print(report.markdown() if asked["markdown"] else report.table(), *report.sentences(), sep="\n")
    for story in report.tally.stories[:10]:
        print(story[:1000])
    failures = report.failures()
    if failures:
        print(f"FAILED: {'; '.join(failures)}. The proxy's log: {report.log}")
    else:
        print("every promise was kept")
        report.log.unlink()
    if asked["json"]:
        asked["json"].write_text(json.dumps(report.as_json(), indent=2) + "\n")
    sys.exit(1 if failures else 0 if report.whole else INTERRUPTED)


async def run(scale: Scale, trainer: str, faults: Sequence[str], *, seed: int, folder: Path) -> Report:
    """Start everything, let it go wrong for as long as `scale` says, and count. `faults`: only these; none: all."""
    with small_disk(folder / PUBLISHED) as disk:
        return await _run(scale, trainer, faults, disk, seed=seed, folder=folder)


def kinds_for(scale: Scale, disk: Disk | None, proxy: RunningProxy) -> list[Kind]:
    """Return what can go wrong with replicas of this sort."""
    kinds = [*PROCESS_KINDS, *NETWORK_KINDS, *STORAGE_KINDS, *of_proxy(proxy), *of_disk(disk)]
    return kinds if scale.vllm else [*kinds, *SIMULATED_KINDS]


def dealt(kinds: Sequence[Kind], scale: Scale, faults: Sequence[str]) -> list[Kind]:
    """Return those of `kinds` that `faults` names; none: those that belong to `scale`. Exits if it names another."""
    names = [kind.name for kind in kinds]
    if unknown := set(faults) - set(names):
        sys.exit(f"benchmarks.chaos: no fault is called {', '.join(sorted(unknown))}; there are: {', '.join(names)}")
    if faults:
        return [kind for kind in kinds if kind.name in faults]
    return [kind for kind in kinds if scale.restarts or not kind.restarts]


async def _run(
    scale: Scale, trainer: str, only: Sequence[str], disk: Disk | None, *, seed: int, folder: Path
) -> Report:
    async with running(scale, folder / PUBLISHED, folder / "seen") as fleet:
        tally, syncs = Tally(), Syncs(folder / "made", base_model=str(MODEL) if scale.vllm else "sim")
        judge: Judge = LogprobJudge(MODEL) if scale.vllm else TokenJudge()
        rollouts = Rollouts(fleet, tally, judge, scale, seed=seed)
        kinds = kinds_for(scale, disk, fleet.proxy)
        monkey = Monkey(fleet, tally, scale, dealt(kinds, scale, only), seed=seed)
        training, url = asyncio.Event(), fleet.proxy.url
        trains = (
            Trl(url, fleet.http, rollouts, syncs, folder / PUBLISHED)
            if trainer == "trl"
            else Client(url, rollouts, syncs, folder / PUBLISHED)
        )
        stop, interrupted, began = asyncio.Event(), asyncio.Event(), time.monotonic()
        for asked_to_stop in STOPS:
            asyncio.get_running_loop().add_signal_handler(asked_to_stop, _interrupt, interrupted)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_clock(scale, tally, syncs, monkey, stop, interrupted))
            faults = tasks.create_task(monkey.run(stop))
            tasks.create_task(rollouts.run(stop))
            tasks.create_task(trains.train(training, every_s=scale.publish_s))
            await faults
            training.set()  # last, since the fleet is to recover while it trains
        seconds = time.monotonic() - began
        left = await _left(fleet)
        tracebacks = fleet.proxy.log().count("Traceback")
    for asked, story in judge.verdicts(syncs.made):
        tally.found_wrong(asked, story)
    return Report(
        scale=scale,
        settings=VLLM_SETTINGS if scale.vllm else SETTINGS,
        seconds=seconds,
        whole=not interrupted.is_set(),
        tally=tally,
        by_kind=monkey.by_kind,
        left_out=[kind.name for kind in kinds if kind.name not in monkey.by_kind],
        withheld=sum(site.view.withheld for site in fleet.sites),
        syncs=syncs,
        seed=seed,
        left=left,
        log=fleet.proxy.log_path,
        tracebacks=tracebacks,
    )


async def _clock(
    scale: Scale, tally: Tally, syncs: Syncs, monkey: Monkey, stop: asyncio.Event, interrupted: asyncio.Event
) -> None:
    """Say every second how it goes, and set `stop` once there was enough of it, or at Ctrl-C."""
    began = time.monotonic()
    while not await wait(interrupted, 1.0):
        elapsed = time.monotonic() - began
        _progress(
            f"{elapsed:4.0f} s  answered {tally.answered}  in flight {len(tally.in_flight)}  "
            f"retired {tally.endings['all'][Ending.RETIRED]}  bad {tally.bad}  policies {len(syncs.seconds)}  "
            f"in force: {', '.join(sorted(+tally.in_force)) or 'nothing'}"
        )
        enough = tally.answered >= scale.rollouts and monkey.has_hit_enough
        if elapsed >= (scale.seconds if enough else scale.limit_s):
            break
    _progress("ending: no new faults or rollouts, waiting for those under way\n")
    stop.set()


async def _left(fleet: Fleet) -> dict[str, int]:
    """Return what is in flight once it has had the time to become nothing."""
    deadline = time.monotonic() + QUIET_LIMIT_S
    while True:
        try:
            left = await fleet.left_in_flight()
        except httpx2.HTTPError as error:
            left = {f"unknown: {type(error).__name__} {error}": 1}
        if not any(left.values()) or time.monotonic() > deadline:
            return left
        await asyncio.sleep(0.2)


def _interrupt(interrupted: asyncio.Event) -> None:
    """End in order; the next one ends at once."""
    interrupted.set()
    asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)


def _progress(text: str) -> None:
    print(f"\r\x1b[K{text}" if sys.stderr.isatty() else text, file=sys.stderr, end="" if sys.stderr.isatty() else "\n")


if __name__ == "__main__":
    main()
